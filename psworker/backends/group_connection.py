"""`Connection` of a process that `torch.distributed` has connected with others.

With the model wrapped in `DistributedDataParallel` the group is one worker: rank 0
leads, the others never register. Without, each process is a worker of its own. Which
of the two it is shows at `prepare`, so that nobody but the leader registers before.
"""

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from typing_extensions import override

from pswire.recorded_split import RecordedSplit
from psworker.backends.group_channel import GroupChannel
from psworker.backends.group_steps import GroupPlace, GroupSteps
from psworker.backends.joint_worker import JointWorker
from psworker.connection import Connection
from psworker.data.batch_tensors import watch_calls
from psworker.data.counted import CountedLoader, is_split_by_user
from psworker.data.split_value import Split
from psworker.data.splitting import check_recorded, to_record
from psworker.errors import ConfigurationError, UnsupportedError, refuse_closed
from psworker.optim.buffer_policies import BufferChoice
from psworker.optim.buffers import Buffers
from psworker.optim.declared_tensors import DeclaredTensors
from psworker.optim.named_objects import NamedObjects
from psworker.optim.optimizer import PreparedOptimizer
from psworker.optim.prepare import Prepared, point_schedulers, sort_objects
from psworker.optim.push_result import PushResult
from psworker.optim.wrappers import data_parallel_in
from psworker.refusals import at_entrance
from psworker.tensors.compression import CompressionChoice


class GroupConnection(JointWorker):
    """One process of several, with the interface of `Connection`.

    All processes of a group make the same calls. As one worker they have one
    `worker_id`, `rank` and `clock`; `torch.distributed.get_rank()` tells them apart.
    """

    def __init__(
        self,
        channel: GroupChannel,
        open_connection: Callable[[], Connection],
        worker_id: str,
    ) -> None:
        """Connects the leader, while the others wait for what comes of it.

        Args:
            channel: To the other processes.
            open_connection: Registers this process as a worker.
            worker_id: The id that it wants, empty for none.
        """
        self._channel = channel
        self._open = open_connection
        self._worker_id = worker_id
        self._inner: Connection | None = None
        self._steps: GroupSteps | None = None
        try:
            channel.led(self._register)
        except BaseException:
            channel.close()
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._inner is not None:
            self._inner.__exit__(kind, error, traceback)
        self._end()

    def __repr__(self) -> str:
        state = "closed" if self.is_closed else f"clock {self.clock}"
        place = f"{self._channel.rank} of {self._channel.process_count}"
        return f"<psworker.GroupConnection {self.worker_id}, process {place}, {state}>"

    @property
    def worker_id(self) -> str:
        """The worker's name; before `prepare` the wanted one, where it has none."""
        return self._worker_id if self._place is None else self._place.worker_id

    @property
    def is_leader(self) -> bool:
        """Whether this process speaks to the job: alone, or for all of the group."""
        return self._channel.is_leader or self._inner is not None

    @property
    def last_push(self) -> PushResult | None:
        """What became of the worker's newest push, `None` before the first."""
        return None if self._place is None else self._place.last_push

    @property
    def bytes_sent(self) -> int:
        """Bytes of all messages to shards, which only the leader sends."""
        return self._inner.bytes_sent if self._inner is not None else 0

    @property
    def bytes_received(self) -> int:
        """Bytes of all messages from shards, which only the leader gets."""
        return self._inner.bytes_received if self._inner is not None else 0

    @at_entrance
    def prepare(
        self,
        /,
        *objects: Any,  # noqa: ANN401
        clip_grad_norm: float | None = None,
        buffers: BufferChoice = None,
        overlap: bool = False,
        compression: CompressionChoice = None,
        loss: str | None = None,
        **named: Any,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401, what was given
        """Joins the job, as one worker if the models are data-parallel.

        See `Connection.prepare`. In a data-parallel group a loader needs a
        `DistributedSampler`, and stays the user's own.

        Raises:
            ConfigurationError: Some models are data-parallel and some are not, or a
                loader gives every process the same batches.
            UnsupportedError: `overlap` for data-parallel models.
        """
        self._refuse_closed()
        call = NamedObjects.of(objects, named)
        wrapped = [
            (each, data_parallel_in(each))
            for each in call.objects
            if isinstance(each, nn.Module)
        ]
        if self._steps is not None:
            raise ConfigurationError(
                "prepare() was called already: in a process group give it everything "
                "in one call; another optimizer half-way needs a worker without "
                "DistributedDataParallel"
            )
        if all(inner is None for _, inner in wrapped):
            self._inner = self._inner or self._open()
            return self._inner.prepare(
                *objects,
                clip_grad_norm=clip_grad_norm,
                buffers=buffers,
                overlap=overlap,
                compression=compression,
                loss=loss,
                **named,
            )
        if overlap:
            raise UnsupportedError(
                "prepare(overlap=True) is not possible for DistributedDataParallel: "
                "gradients are final only once the group has averaged them, which "
                "overlaps with backward() by itself; leave overlap out"
            )
        self._check_models([inner for _, inner in wrapped])
        plain = {id(each): inner.module for each, inner in wrapped if inner is not None}
        given = sort_objects(
            call.replaced(plain),
            clip_grad_norm=clip_grad_norm,
            buffers=buffers,
            compression=compression,
            loss=loss,
        )
        loaders = {id(each): _checked_loader(each) for each in given.loaders.values()}
        self._steps, results = self._join(given, wrapped[0][1], buffers)
        for key, loader in loaders.items():
            results[key] = CountedLoader(loader, self._steps)
        return call.returned(results)

    def wait(self) -> None:
        """Returns once the newest values are in the models; see `Connection.wait`."""
        self._refuse_closed()
        if self._inner is not None:
            self._inner.wait()

    @at_entrance
    def record_split(self, name: str, split: Split) -> Split:
        """Records a split with the job, once for the group; see `Connection`."""
        self._refuse_closed()
        if self._steps is None and not self.generation:
            raise ConfigurationError(
                "the processes of a group record splits once prepare() was called"
            )
        inner = self._inner
        if self._steps is None:
            assert inner is not None, "prepared without the group"
            return inner.record_split(name, split)

        def record() -> RecordedSplit:
            assert inner is not None, "the leader is registered"
            return to_record(name, inner.record_split(name, split))

        check_recorded(split, self._channel.led(record))
        return split

    def close(self) -> None:
        """Leaves the job, in the leader; more calls do nothing."""
        if self._inner is not None:
            self._inner.close()
        self._end()

    def _refuse_closed(self) -> None:
        refuse_closed(is_closed=self.is_closed)

    @property
    @override
    def _place(self) -> GroupPlace | Connection | None:
        """Who tells where the worker stands: the group, or this process's own."""
        return self._inner if self._steps is None else self._steps.place

    def _register(self) -> None:
        self._inner = self._open()

    def _end(self) -> None:
        if self.is_closed:
            return
        self._is_closed = True
        if self._steps is not None:
            self._steps.close()
        self._channel.close()

    def _check_models(self, models: Sequence[DistributedDataParallel | None]) -> None:
        count = self._channel.process_count
        for position, model in enumerate(models):
            name = f"model{position or ''}"
            if model is None:
                raise ConfigurationError(
                    f"{name} is not wrapped in DistributedDataParallel and another "
                    "model is: its gradient would be that of rank 0 alone; wrap all "
                    "models or none"
                )
            size = dist.get_world_size(model.process_group)
            if size != count:
                raise ConfigurationError(
                    f"the process group of {name} has {size} of the {count} processes "
                    "of the default group; make one group of all, and start one "
                    "torchrun for each worker of the job"
                )

    def _join(
        self,
        given: Prepared,
        first: DistributedDataParallel | None,
        buffers: BufferChoice,
    ) -> tuple[GroupSteps, dict[int, Any]]:
        """Joins as one worker; prepared optimizers by `id()` of the user's."""
        assert first is not None, "all models are wrapped"
        inner = self._inner
        prepared: tuple[Any, ...] = ()
        call = given.objects.without(lambda each: isinstance(each, DataLoader))

        def join() -> GroupPlace:
            nonlocal prepared
            assert inner is not None, "the leader is registered"
            prepared = inner.prepare(
                *call.positional,
                clip_grad_norm=given.clip_grad_norm or None,
                buffers=buffers,
                compression=given.compression,
                loss=given.loss,
                **call.by_name,
            )
            return _place_of(inner)

        # The leader joins the job on its own terms; the others wait for how it ends.
        joined = self._channel.led(join)
        steps = GroupSteps(
            self._channel,
            DeclaredTensors(given.bound, given.buffers, given.followed),
            Buffers(given.bound, given.buffers, given.specs.values()),
            first.process_group,
            place=joined,
            look=lambda: joined if inner is None else _place_of(inner),
            optimizer_count=len(given.optimizers),
        )
        watch_calls(given.models.values(), steps.pending)
        if inner is not None:
            results = {
                id(mine): theirs
                for mine, theirs in zip(call.objects, prepared, strict=True)
                if isinstance(mine, Optimizer)
            }
            for optimizer in results.values():
                optimizer.step_through(steps.lead)
            return steps, results
        results = {
            id(optimizer): PreparedOptimizer(
                optimizer, given.specs[name], steps, given.bound
            )
            for name, optimizer in given.optimizers.items()
        }
        point_schedulers(given.schedulers, results)
        for optimizer in results.values():
            optimizer.scale_with(given.loss_scales)
        return steps, results


def _checked_loader(loader: DataLoader[Any]) -> DataLoader[Any]:
    if not is_split_by_user(loader) or loader.batch_size is None:
        raise ConfigurationError(
            "in a group of DistributedDataParallel each process needs its own part of "
            "the data: build the loader with sampler=DistributedSampler(dataset) and a "
            "batch_size, or leave it out of prepare() and give step(weight=n)"
        )
    return loader


def _place_of(connection: Connection) -> GroupPlace:
    return GroupPlace(
        worker_id=connection.worker_id,
        rank=connection.rank,
        worker_count=connection.worker_count,
        clock=connection.clock,
        generation=connection.generation,
        mode=connection.mode,
        last_push=connection.last_push,
    )
