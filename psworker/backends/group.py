"""A process that `torch.distributed` has connected with others.

With the model wrapped in `DistributedDataParallel` the group is one worker: rank 0
leads, the others never register. Without, each process is a worker of its own. Which
of the two it is shows at `prepare`, so that nobody but the leader registers before.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from pswire.recorded_split import RecordedSplit
from psworker.backends.backend import PrepareOptions, WorkerPlace
from psworker.backends.group_channel import GroupChannel
from psworker.backends.group_steps import GroupSteps
from psworker.backends.job import Job
from psworker.config import WorkerConfig
from psworker.data.batch_tensors import watch_calls
from psworker.data.counted import CountedLoader, is_split_by_user
from psworker.errors import ConfigurationError, UnsupportedError
from psworker.optim.buffers import Buffers
from psworker.optim.declared_tensors import DeclaredTensors
from psworker.optim.named_objects import NamedObjects
from psworker.optim.optimizer import PreparedOptimizer
from psworker.optim.prepare import Prepared, point_schedulers
from psworker.optim.published import Published
from psworker.optim.wrappers import data_parallel_in
from psworker.transport.ports import Traffic


class Group:
    """One process of a group of `torch.distributed`: a `Backend`."""

    def __init__(self, channel: GroupChannel, config: WorkerConfig) -> None:
        """Registers the leader, while the others wait for what comes of it.

        Args:
            channel: To the other processes.
            config: Where the job is.
        """
        self._channel = channel
        self._config = config
        self._job: Job | None = None
        self._steps: GroupSteps | None = None
        try:
            channel.led(self._register)
        except BaseException:
            channel.close()
            raise

    @property
    def coordinator(self) -> str:
        """HOST:PORT of the job."""
        return str(self._config.coordinator)

    @property
    def title(self) -> str:
        """Which process of the group this is."""
        return f"process {self._channel.rank} of {self._channel.process_count}"

    @property
    def is_leader(self) -> bool:
        """Whether this process speaks to the job: alone, or for all of the group."""
        return self._job is not None

    @property
    def is_out(self) -> bool:
        """As the leader's; where another process leads that is not known."""
        return self._job is None or self._job.is_out

    @property
    def place(self) -> WorkerPlace:
        """Where the group stands, or this process if it is a worker of its own."""
        if self._steps is not None:
            return self._steps.place
        if self._job is not None:
            return self._job.place
        return WorkerPlace(worker_id=self._config.worker_id, mode="")

    @property
    def traffic(self) -> Traffic:
        """Of this process, if it is the one that sends."""
        return self._job.traffic if self._job is not None else Traffic()

    def join(self, call: NamedObjects, options: PrepareOptions) -> Mapping[int, Any]:
        """Joins the job, as one worker if the models are data-parallel.

        Raises:
            ConfigurationError: Some models are data-parallel and some are not, or a
                loader gives every process the same batches.
            UnsupportedError: `overlap` for data-parallel models.
        """
        models = [each for each in call.objects if isinstance(each, nn.Module)]
        wrapped = [data_parallel_in(each) for each in models]
        if not any(wrapped):
            self._register()
            assert self._job is not None, "registered"
            return self._job.join(call, options)
        if options.overlap:
            raise UnsupportedError(
                "prepare(overlap=True) is not possible for DistributedDataParallel: "
                "gradients are final only once the group has averaged them, which "
                "overlaps with backward() by itself; leave overlap out"
            )
        first, *_ = found = self._check_models(wrapped)
        plain = {
            id(each): inner.module for each, inner in zip(models, found, strict=True)
        }
        given = options.describe(call.replaced(plain))
        for loader in given.loaders.values():
            _check_loader(loader)
        steps, optimizers = self._join_as_one(given, options, first.process_group)
        self._steps = steps
        loaders = given.loaders.values()
        return optimizers | {id(each): CountedLoader(each, steps) for each in loaders}

    def exchange(
        self, call: NamedObjects, options: PrepareOptions
    ) -> Mapping[int, Any]:
        """Takes other optimizers, if this process is a worker of its own."""
        if self._steps is not None:
            raise ConfigurationError(
                "prepare() was called already: in a process group give it everything "
                "in one call; another optimizer half-way needs a worker without "
                "DistributedDataParallel"
            )
        assert self._job is not None, "it has joined"
        return self._job.exchange(call, options)

    def settle(self) -> None:
        """Completes a step of this process's own; one of the group is complete."""
        if self._job is not None:
            self._job.settle()

    def publish(self, what: Sequence[Published]) -> None:
        """Publishes values, if this process is a worker of its own."""
        if self._steps is not None:
            raise UnsupportedError(
                "publish() is not possible in a group of processes that push as one: "
                "set values before prepare(), or start each process as a worker of its "
                "own"
            )
        assert self._job is not None, "it has joined"
        self._job.publish(what)

    def record_split(self, record: RecordedSplit) -> RecordedSplit:
        """Records a split with the job, once for the group."""
        job = self._job
        if self.place.rank is None:
            raise ConfigurationError(
                "the processes of a group record splits once prepare() was called"
            )
        if self._steps is None:
            assert job is not None, "it has joined"
            return job.record_split(record)

        def work() -> RecordedSplit:
            assert job is not None, "the leader is registered"
            return job.record_split(record)

        return self._channel.led(work)

    def close(self, *, leaves: bool) -> None:
        """Leaves the job, in the leader, and ends the channel."""
        if self._job is not None:
            self._job.close(leaves=leaves)
        if self._steps is not None:
            self._steps.close()
        self._channel.close()

    def _register(self) -> None:
        self._job = self._job or Job.open(self._config)

    def _check_models(
        self, models: Sequence[DistributedDataParallel | None]
    ) -> list[DistributedDataParallel]:
        """The same, if all are data-parallel over all processes."""
        found = []
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
            found.append(model)
        return found

    def _join_as_one(
        self,
        given: Prepared,
        options: PrepareOptions,
        device_group: Any,  # noqa: ANN401, untyped in torch
    ) -> tuple[GroupSteps, dict[int, Any]]:
        """Joins as one worker; prepared optimizers by `id()` of the user's."""
        job = self._job
        call = given.objects.without(lambda each: isinstance(each, DataLoader))
        replaced: Mapping[int, Any] = {}

        def join() -> WorkerPlace:
            nonlocal replaced
            assert job is not None, "the leader is registered"
            replaced = job.join(call, options)
            return job.place

        # The leader joins the job on its own terms; the others wait for how it ends.
        joined = self._channel.led(join)
        steps = GroupSteps(
            self._channel,
            DeclaredTensors(given.bound, given.buffers, given.followed),
            Buffers(given.bound, given.buffers, given.specs.values()),
            device_group,
            place=joined,
            look=lambda: joined if job is None else job.place,
            optimizer_count=len(given.optimizers),
        )
        watch_calls(given.models.values(), steps.pending)
        if job is not None:
            optimizers = dict(replaced)
            for optimizer in optimizers.values():
                optimizer.step_through(steps.lead)
            return steps, optimizers
        optimizers = {
            id(optimizer): PreparedOptimizer(
                optimizer, given.specs[name], steps, given.bound
            )
            for name, optimizer in given.optimizers.items()
        }
        point_schedulers(given.schedulers, optimizers)
        for optimizer in optimizers.values():
            optimizer.loss_scales = given.loss_scales
        return steps, optimizers


def _check_loader(loader: DataLoader[Any]) -> None:
    if not is_split_by_user(loader) or loader.batch_size is None:
        raise ConfigurationError(
            "in a group of DistributedDataParallel each process needs its own part of "
            "the data: build the loader with sampler=DistributedSampler(dataset) and a "
            "batch_size, or leave it out of prepare() and give step(weight=n)"
        )
