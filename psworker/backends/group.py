"""A process that `torch.distributed` has connected with others.

With the model wrapped in `DistributedDataParallel` the group is one worker: rank 0
leads, the others never register. Without, each process is a worker of its own. Which
of the two it is shows at `prepare`, so that only the leader registers before.

The processes send each other what they need over a gloo group of psworker's own, so
that no call of it can meet one of the user's, and on the CPU, whatever the user's group
uses. Calls of the channel are collective: all processes make the same in the same
order.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any, Final, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from pswire.leased_data import RecordedSplit
from pswire.reasons import ErrorReason
from pswire.schema import OptimizerSpec
from pswire.torch_types import bytes_of
from psworker.backends.backend import (
    GROUP_PUBLISH_TEXT,
    GROUP_REWIND_TEXT,
    GROUP_STATE_TEXT,
    GROUP_STRATEGY_TEXT,
    LeaderError,
    WorkerPlace,
)
from psworker.backends.between_pushes import BetweenPushes
from psworker.backends.job import Job
from psworker.backends.value_codec import ValueCodec
from psworker.config import WorkerConfig
from psworker.data.batch_tensors import watch_calls
from psworker.data.counted import CountedLoader, is_split_by_user
from psworker.data.pending import PendingData
from psworker.errors import (
    ConfigurationError,
    UnavailableError,
    UnsupportedError,
    refuse_closed,
)
from psworker.member.script_state import HasState, RewindCallback
from psworker.optim.buffers import Buffers
from psworker.optim.declared_tensors import DeclaredTensors
from psworker.optim.gradients import SpentGradients
from psworker.optim.named_objects import NamedObjects
from psworker.optim.optimizer import PreparedOptimizer, Steps
from psworker.optim.optimizer_state import States
from psworker.optim.prepare import (
    Prepared,
    PrepareOptions,
    point_schedulers,
    sort_objects,
)
from psworker.optim.published import Published
from psworker.optim.push_result import PushResult
from psworker.optim.step_contents import OptimizerStep, StateLoad
from psworker.optim.wrappers import data_parallel_in
from psworker.tensors.value_store import same_bytes
from psworker.transport.ports import Traffic
from psworker.transport.values import OptimizerSettings
from psworker.work_log import WorkLog

T = TypeVar("T")

logger: Final = logging.getLogger("psworker")

_LEADER: Final = 0
_BUCKET_BYTES: Final = 64 * 2**20
"""Values travel in buckets of about this size: a copy of so much is made at a time."""

_VALUES: Final = ValueCodec(
    ErrorReason, LeaderError, PushResult, RecordedSplit, WorkerPlace
)
"""What the leader tells the others."""


class GroupChannel:
    """The processes of the default group of `torch.distributed`.

    Attributes:
        rank: Of this process in the group.
        process_count: Processes of the group.
    """

    def __init__(self, timeout_s: float) -> None:
        """Opens the channel, in all processes.

        Args:
            timeout_s: Longest wait for the leader to do what all wait for.
        """
        self.rank = dist.get_rank()
        self.process_count = dist.get_world_size()
        with _peer_errors(self.rank):
            self._group: Any = dist.new_group(
                backend="gloo", timeout=timedelta(seconds=timeout_s)
            )

    @property
    def is_leader(self) -> bool:
        """Whether this process speaks to the job."""
        return self.rank == _LEADER

    def led(self, work: Callable[[], T]) -> T:
        """Does `work` in the leader; its result, or its error, in all processes.

        Args:
            work: What the leader does. Its result is made of `_VALUES`.

        Raises:
            PsError: The leader failed, or is lost. In the leader, whatever it raised.
        """
        if not self.is_leader:
            sent = self._broadcast(None)
            if isinstance(sent, LeaderError):
                raise sent.to_error(f"rank {_LEADER} of this process group")
            result: T = sent
            return result
        try:
            result = work()
        except BaseException as error:
            self._broadcast_error(error)
            raise
        self._broadcast(result)
        return result

    def sum(self, value: float) -> float:
        """The sum of the values of all processes."""
        total = torch.tensor([value], dtype=torch.float64)
        with _peer_errors(self.rank):
            dist.all_reduce(total, group=self._group)
        return float(total.item())

    def spread(self, tensors: Iterable[torch.Tensor], device_group: Any) -> None:  # noqa: ANN401, untyped in torch
        """Copies the leader's values to all processes.

        Args:
            tensors: The same in all processes, of any shapes, types and devices.
            device_group: The group that carries tensors which are not on the CPU.
        """
        with torch.no_grad():
            for bucket in _buckets(tensors):
                device = bucket[0].device
                sizes = [each.nbytes for each in bucket]
                if self.is_leader:
                    flat = torch.cat([bytes_of(each) for each in bucket])
                else:
                    flat = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
                group = self._group if device.type == "cpu" else device_group
                with _peer_errors(self.rank):
                    dist.broadcast(flat, src=_LEADER, group=group)
                if not self.is_leader:
                    for tensor, piece in zip(bucket, flat.split(sizes), strict=True):
                        values = piece.view(tensor.dtype)
                        if not same_bytes(tensor, values):  # graphs may hold it
                            tensor.copy_(values.view(tensor.shape))

    def close(self) -> None:
        """Ends the channel, if the user has not ended torch's default group."""
        if dist.is_initialized():
            dist.destroy_process_group(self._group)

    def _broadcast(self, message: object) -> Any:  # noqa: ANN401, the leader's
        """Not by torch's own broadcast of objects, which reads pickles."""
        data = _VALUES.encode(message) if self.is_leader else b""
        length = torch.tensor([len(data)])
        with _peer_errors(self.rank):
            dist.broadcast(length, src=_LEADER, group=self._group)
            flat = torch.frombuffer(bytearray(data or int(length)), dtype=torch.uint8)
            dist.broadcast(flat, src=_LEADER, group=self._group)
        return message if self.is_leader else _VALUES.decode(flat.numpy().tobytes())

    def _broadcast_error(self, error: BaseException) -> None:
        try:
            self._broadcast(LeaderError.of(error))
        except UnavailableError as unheard:
            # The first error is the one to raise.
            logger.warning(
                "could not send the error to the other processes: %s", unheard
            )


@contextmanager
def _peer_errors(rank: int) -> Iterator[None]:
    """Turns torch's error after the loss of a peer into one that says what to do."""
    try:
        yield
    except RuntimeError as error:
        lost = "another process of this process group has ended or is silent"
        if rank != _LEADER:  # it waits for the leader, perhaps by another process
            lost = (
                f"rank {_LEADER} of this process group, which speaks to the job for "
                "all of it, did not answer: it or another process of the group has "
                "ended or is silent"
            )
        raise UnavailableError(
            f"{lost}, and the group can't go on without it; torchrun ends what is "
            f"left and, with --max-restarts, starts the group again ({error})"
        ) from None


def _buckets(tensors: Iterable[torch.Tensor]) -> Iterator[Sequence[torch.Tensor]]:
    """Runs of one device each; wide types first, so that every view is aligned."""
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            by_device.setdefault(tensor.device, []).append(tensor)
    for members in by_device.values():
        bucket: list[torch.Tensor] = []
        bucket_bytes = 0
        for tensor in sorted(members, key=lambda each: -each.element_size()):
            if bucket and bucket_bytes >= _BUCKET_BYTES:
                yield bucket
                bucket, bucket_bytes = [], 0
            bucket.append(tensor)
            bucket_bytes += tensor.nbytes
        yield bucket


class GroupSteps:
    """Lets the leader push for all, and copies the new values to all.

    `DistributedDataParallel` has averaged the gradient over the group already, so that
    the leader's is everybody's. The samples behind it are those of all processes.

    Attributes:
        place: Where the group stands in the job.
        work: What this process does.
    """

    def __init__(
        self,
        channel: GroupChannel,
        declared: DeclaredTensors,
        buffers: Buffers,
        device_group: Any,  # noqa: ANN401, untyped in torch
        *,
        place: WorkerPlace,
        look: Callable[[], WorkerPlace],
        work: WorkLog,
        optimizer_count: int = 1,
    ) -> None:
        """Begins with the leader's values in all processes.

        Args:
            channel: To the other processes.
            declared: The models' tensors, the same in all processes.
            buffers: Those of them that are buffers.
            device_group: The group that carries tensors which are not on the CPU.
            place: Where the group stands after joining.
            look: Returns, in the leader, where the group stands now.
            work: What this process does.
            optimizer_count: Optimizers that step.
        """
        self._channel = channel
        self._declared = declared
        self._buffers = buffers
        self._device_group = device_group
        self._look = look
        self.work = work
        self._sample_count = 1
        self._is_closed = False
        self._leader: Steps | None = None
        self._pending = PendingData()
        self._spent = SpentGradients(len(declared.tensors))
        self._looked = SpentGradients(len(declared.tensors))
        self._pending.watch(
            lambda: self._looked.differ_from(declared.tensors),
            parameters=declared.tensors,
            optimizer_count=optimizer_count,
        )
        # By step, what to call once the state is loaded that it carries. Steps have the
        # same numbers in all processes.
        self._step_count = 0
        self._loading: dict[int, Callable[[], None]] = {}
        self._loaded: list[int] = []  # of the leader, not yet sent to the others
        self.place = place
        self._spread(frozenset())

    @property
    def _tensors(self) -> Sequence[torch.Tensor]:
        """One for each entry of the schema, as of the last look."""
        return self._declared.tensors

    @property
    def pending(self) -> PendingData:
        """Samples that this process has drawn since the last step."""
        return self._pending

    @property
    def worker_count(self) -> int:
        """Processes of the group, whose samplers split its data."""
        return self._channel.process_count

    @property
    def rank(self) -> int:
        """This process's place among these, from 0."""
        return self._channel.rank

    @property
    def has_gradient(self) -> bool:
        """Whether there is a gradient that a step may have to take yet."""
        return self._spent.has_others(self._tensors)

    @property
    def reads_state(self) -> bool:
        """Whether this process can ask shards for optimizer state, as the leader."""
        return self._leader is not None

    def lead(self, inner: Steps) -> Steps:
        """Takes over an optimizer of the leader, whose own steps are `inner`."""
        self._leader = inner
        return self

    def step(self, wanted: OptimizerStep) -> PushResult:
        """Pushes the group's gradient, with the samples of all its processes.

        Raises:
            PsError: What the leader's step has raised, in all processes.
        """
        self._refuse_closed()
        self._declared.look()
        drawn = self._pending.take()
        if drawn.sample_count is not None:
            self._sample_count = drawn.sample_count
        own = self._sample_count if wanted.weight is None else wanted.weight
        wanted = replace(wanted, weight=self._channel.sum(own))
        if wanted.spec.loss_is_sum:
            wanted = replace(wanted, averaged_over=self._channel.process_count)
        held = frozenset(wanted.spec.entry_indexes)
        try:
            return self._led(wanted, lambda leader, wanted: leader.step(wanted))
        finally:  # as with the samples, also when the call has ended an earlier push
            self._spent.note(
                [
                    each.grad if index in held else None
                    for index, each in enumerate(self._tensors)
                ]
            )

    def note_zeroed(self) -> None:
        """Data behind gradients that were zeroed has no weight."""
        if self._pending.has_trained and not self.has_gradient:
            self._pending.throw_away()

    def push_nothing(self, wanted: OptimizerStep) -> PushResult:
        """Takes part in the next clock with weight 0."""
        self._refuse_closed()
        self._declared.look()
        return self._led(wanted, lambda leader, wanted: leader.push_nothing(wanted))

    def declare(self, spec: OptimizerSpec) -> None:
        """Declares other groups, or another optimizer, in the leader.

        Raises:
            PsError: What the leader's call has raised, in all processes.
        """
        self._refuse_closed()

        def declare() -> None:
            assert self._leader is not None, "the leader has prepared its optimizers"
            self._leader.declare(spec)

        self._channel.led(declare)
        self._buffers.declare(spec)

    def settings_used(self, optimizer: str) -> OptimizerSettings:
        """What the newest update was made with, in the leader alone."""
        assert self._leader is not None, "the others' schedulers follow their script"
        return self._leader.settings_used(optimizer)

    def optimizer_state(self, optimizer: str, spec_digest: str) -> States:
        """The state of an optimizer, in the leader alone: no call to the others.

        Raises:
            UnsupportedError: This process is not the leader.
        """
        self._refuse_closed()
        if self._leader is None:
            raise UnsupportedError(
                "only rank 0 of a process group speaks to the shards, where the "
                "optimizer's state is: call state_dict() there, as for saving"
            )
        return self._leader.optimizer_state(optimizer, spec_digest)

    def close(self) -> None:
        """Refuses everything from now on."""
        self._is_closed = True

    def _refuse_closed(self) -> None:
        refuse_closed(is_closed=self._is_closed)

    def _led(
        self,
        wanted: OptimizerStep,
        push: Callable[[Steps, OptimizerStep], PushResult | None],
    ) -> PushResult:
        """Pushes in the leader, and follows the result in all processes."""
        self._step_count += 1
        number = self._step_count
        if wanted.load is not None:
            self._loading[number] = wanted.load.on_loaded
            load = StateLoad(wanted.load.states, lambda: self._loaded.append(number))
            wanted = replace(wanted, load=load)

        def push_and_look() -> tuple[PushResult, WorkerPlace, list[int]]:
            assert self._leader is not None, "the leader has prepared its optimizers"
            result = push(self._leader, wanted)
            assert result is not None, "a group's steps do not overlap"
            return result, self._look(), self._loaded

        result, self.place, loaded = self._channel.led(push_and_look)
        for each in loaded:
            if each in self._loading:  # else only the leader's script has loaded state
                self._loading[each]()
        self._loading.clear()  # no push is under way any more
        self._loaded.clear()
        self._spread(self._buffers.scope_of(wanted.spec.name).withheld)
        return result

    def _spread(self, withheld: frozenset[int]) -> None:
        spread = [e for index, e in enumerate(self._tensors) if index not in withheld]
        self._channel.spread(spread, self._device_group)


class Group:
    """One process of a group of `torch.distributed`: a `Backend`."""

    def __init__(self, channel: GroupChannel, config: WorkerConfig) -> None:
        """Registers the leader, while the others wait for it to be registered."""
        self._channel = channel
        self._config = config
        self._job: Job | None = None
        self._steps: GroupSteps | None = None
        self._work = WorkLog()
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

    @property
    def work(self) -> WorkLog:
        """What this process does; that of the leader is reported."""
        return self._job.work if self._job is not None else self._work

    @property
    def between_pushes(self) -> BetweenPushes:
        """What local steps need of the worker, if this process is one by itself."""
        if self._job is None:
            raise UnsupportedError(GROUP_STRATEGY_TEXT)
        return self._job.between_pushes

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
        if options.differential_privacy is not None:
            raise UnsupportedError(
                "differential_privacy is not possible for DistributedDataParallel: it "
                "averages gradients before any is clipped; give prepare() the model "
                "itself, and each process is a worker"
            )
        first, *_ = found = self._check_models(wrapped)
        plain = {
            id(each): inner.module for each, inner in zip(models, found, strict=True)
        }
        given = sort_objects(call.replaced(plain), options)
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
            raise UnsupportedError(GROUP_PUBLISH_TEXT)
        assert self._job is not None, "it has joined"
        self._job.publish(what)

    def register_state(self, name: str, holder: HasState) -> None:
        """Registers state, if this process is a worker of its own."""
        if self._steps is not None or self.place.rank is None:
            raise UnsupportedError(GROUP_STATE_TEXT)
        assert self._job is not None, "it has joined"
        self._job.register_state(name, holder)

    def on_rewind(self, callback: RewindCallback) -> None:
        """Takes a callback, if this process is a worker of its own."""
        if self._steps is not None or self.place.rank is None:
            raise UnsupportedError(GROUP_REWIND_TEXT)
        assert self._job is not None, "it has joined"
        self._job.on_rewind(callback)

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
            work=self.work,
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
