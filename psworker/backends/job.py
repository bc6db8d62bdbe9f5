"""A worker of a job by itself: a member that pushes to its shards."""

import logging
import time
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final, Self, TypeVar

from torch import nn
from torch.optim import Optimizer

from pswire import failpoints
from pswire.leased_data import DataReport, Origin, RecordedSplit
from pswire.placement import Placement
from pswire.schema import OptimizerSpec
from psworker import event_loop, fork_guard
from psworker.backends import termination
from psworker.backends.backend import WorkerPlace
from psworker.backends.between_pushes import JobBetweenPushes
from psworker.backends.prepared import PreparedObjects, leased
from psworker.config import WorkerConfig
from psworker.data import CountedLoader, LeasedLoader
from psworker.data.batch_tensors import watch_calls
from psworker.data.pending import PendingData
from psworker.data.source import part_in_rounds
from psworker.errors import (
    ConfigurationError,
    ConnectError,
    PsError,
    UnsupportedError,
)
from psworker.event_loop import EventLoop, LoopFuture
from psworker.launch.reachability import (
    problem_behind_call,
    unreachable,
    wait_reachable,
)
from psworker.member.joining import Joining, OtherOrderError
from psworker.member.script_state import HasState, RewindCallback
from psworker.member.session import CALL_TIMEOUT_S, Session
from psworker.optim.buffer_policies import warn_of_defaults
from psworker.optim.buffers import Buffers
from psworker.optim.gradients import SpentGradients
from psworker.optim.named_objects import NamedObjects
from psworker.optim.optimizer import PreparedOptimizer
from psworker.optim.prepare import (
    LocalTraining,
    Prepared,
    PrepareOptions,
    sort_objects,
)
from psworker.optim.privacy import DifferentialPrivacy
from psworker.optim.private_gradients import PrivateGradients
from psworker.optim.published import Published
from psworker.optim.wrappers import data_parallel_in, is_in_group
from psworker.steps.job_tensors import JobTensors
from psworker.steps.overlap.arriving_values import ArrivingValues
from psworker.steps.overlap.during_backward import DuringBackward
from psworker.steps.sending import Sending
from psworker.steps.stepper import Stepper
from psworker.tensors.value_store import ValueStore
from psworker.transport.calls import CallError, now, told_to_users, until_decided
from psworker.transport.ports import Traffic
from psworker.transport.values import EpochRequest, Lease, LeaseRequest
from psworker.transport.waiting_log import saying_whom
from psworker.work_log import WorkLog

T = TypeVar("T")

logger: Final = logging.getLogger("psworker")

AT_ONCE_TIMEOUT_S: Final = 5.0
"""Longest time to leave in when a signal ends the process: SIGKILL follows, mostly
after ten seconds or more."""


class Job:
    """One worker of a job: a `Backend`."""

    title = ""
    is_leader = True

    def __init__(self, config: WorkerConfig, loop: EventLoop, session: Session) -> None:
        self._config = config
        self._loop = loop
        self._session = session
        self._pending = PendingData()
        self._stepper: Stepper | None = None
        self._prepared: PreparedObjects | None = None
        self._local_training: LocalTraining | None = None
        self._is_closed = False

    @classmethod
    def open(cls, config: WorkerConfig) -> Self:
        """Registers this process as a worker.

        Raises:
            ConnectError: The coordinator was not reached; the text says why.
        """
        deadline = time.monotonic() + config.connect_timeout_s
        wait_reachable(config.coordinator, config.connect_timeout_s, log=logger.warning)
        loop = event_loop.acquire()
        fork_guard.guard(config.coordinator)
        try:
            left_s = max(0.1, deadline - time.monotonic())
            session = loop.run(lambda: Session.open(config, left_s))
        except CallError as error:
            _give_up(config)
            raise _connect_error(config, error) from None
        except BaseException:
            _give_up(config)
            raise
        made = cls(config, loop, session)
        termination.watch(made)
        return made

    @property
    def coordinator(self) -> str:
        """HOST:PORT of the job."""
        return str(self._config.coordinator)

    @property
    def is_out(self) -> bool:
        """Whether the job is over, or goes on without this worker."""
        # An evicted worker registers anew, under another record of membership.
        return self._session.membership.failure is not None

    @property
    def place(self) -> WorkerPlace:
        """Where the worker stands."""
        record, stepper = self._session.membership.record, self._stepper
        mode = record.mode if record else self._session.settings.mode
        worker_id = self._session.worker.worker_id
        if stepper is None:
            return WorkerPlace(worker_id=worker_id, mode=mode.label)
        return WorkerPlace(
            worker_id=worker_id,
            mode=mode.label,
            rank=stepper.member.rank,
            worker_count=len(record.members) if record else 0,
            clock=stepper.clock,
            generation=stepper.generation,
            last_push=stepper.last_push,
        )

    @property
    def traffic(self) -> Traffic:
        """Bytes of all messages to and from shards."""
        return self._session.shards.traffic

    @property
    def work(self) -> WorkLog:
        """What its script does."""
        return self._session.work

    @property
    def between_pushes(self) -> JobBetweenPushes:
        """What local steps need of the worker."""
        assert self._stepper is not None, "it has joined"
        return JobBetweenPushes(self._stepper, self._session, self._pending)

    def join(self, call: NamedObjects, options: PrepareOptions) -> Mapping[int, Any]:
        """Becomes a member; the models then hold the job's values."""
        _refuse_late_group(call.objects)
        given = sort_objects(call, options)
        link = DataLink(
            self._loop,
            self._session,
            self._pending,
            wait_timeout_s=self._config.step_timeout_s,
            local_training=options.local_training,
        )
        loaders = leased(given.loaders, link)
        private = _private_gradients(
            given,
            options.differential_privacy,
            self._session.worker.worker_id,
            loaders.values(),
        )
        try:
            stepper = self._join_in_order(given, options, loaders)
        except OtherOrderError as other:
            given = given.in_order(other.positions)
            stepper = self._join_in_order(given, options, loaders)
        if options.buffers is None and stepper.member.rank == 0:  # once in a job
            warn_of_defaults(given.buffers)

        def make(inner: Optimizer, spec: OptimizerSpec) -> PreparedOptimizer:
            made = PreparedOptimizer(
                inner, spec, stepper, given.bound, stepper.compression, stepper.calls
            )
            made.before_step = partial(self._go_on, spec.name)
            if stepper.overlaps:
                made.watch_parameters(stepper.settle)
            return made

        stepper.private = private
        self._stepper = stepper
        self._local_training = options.local_training
        self._prepared = prepared = PreparedObjects(given, loaders, make)
        link.start(stepper, prepared.optimizers)
        self._session.rewinds.add_follower(prepared.rewind)
        self._loop.run(self._session.announce_state)
        self.work.start()
        return prepared.follow_schedulers(
            is_late=stepper.member.base_clock > 0,
            new_epoch=stepper.new_epochs.get(self._session.script_state.loader, 0),
            local=options.local_training.optimizers if options.local_training else (),
        )

    def _go_on(self, optimizer: str) -> None:
        """A step begins, with which the script has gone on if it is not void."""
        assert self._stepper is not None
        if self._local_training or not self._stepper.is_void(optimizer):
            self._session.rewinds.end()

    def exchange(
        self, call: NamedObjects, options: PrepareOptions
    ) -> Mapping[int, Any]:
        """Replaces optimizers of the last call, on all shards."""
        _refuse_late_group(call.objects)
        prepared, stepper = self._prepared, self._stepper
        assert prepared is not None, "it has joined"
        assert stepper is not None, "it has joined"
        if options.overlap and not stepper.overlaps:
            raise ConfigurationError(
                "steps overlap if the first prepare() says so, and it did not; "
                "leave overlap out when prepare() is called again"
            )
        return prepared.exchange(call, options, stepper.declare)

    def settle(self) -> None:
        """Completes a step that is under way."""
        if self._stepper is not None:
            self._stepper.settle()

    def publish(self, what: Sequence[Published]) -> None:
        """Makes values the job's, by a push of their own."""
        assert self._prepared is not None, "it has joined"
        assert self._stepper is not None, "it has joined"
        stepper, prepared = self._stepper, self._prepared
        if stepper.private is not None:
            raise UnsupportedError(
                "ps.publish() sends values as they are, and this job has "
                "differential_privacy: set them before prepare()"
            )
        stepper.settle()
        optimizer = next(iter(prepared.optimizers.values()))

        stepper.calls.run(
            "ps.publish()", lambda: stepper.publish(optimizer.next_step(), what)
        )

    def record_split(self, record: RecordedSplit) -> RecordedSplit:
        """Records a split with the coordinator."""
        return self._loop.run(lambda: self._session.record_split(record))

    def register_state(self, name: str, holder: HasState) -> None:
        """Has checkpoints take the state of an object, and loads what they have."""
        self._session.script_state.register(name, holder)
        self._loop.run(self._session.announce_state)

    def on_rewind(self, callback: RewindCallback) -> None:
        """Has a callback called when the job has returned to a checkpoint."""
        self._session.rewinds.add_callback(callback)

    def close(self, *, leaves: bool) -> None:
        """Leaves the job if it is in it, and ends all calls."""
        if self._is_closed:
            return
        try:
            if leaves and not self.is_out:
                self._leave()
        finally:
            self._is_closed = True
            termination.unwatch(self)
            if self._stepper is not None:
                self._stepper.close()
            try:
                self._loop.run(self._session.close)
            finally:
                _give_up(self._config)

    def leave_at_once(self, signal_name: str) -> None:
        """Leaves the job from a signal handler, in the middle of whatever is under way.

        A push under way, and data behind earlier ones, count as those of a lost worker
        do: the shards can't be asked here. Data that was drawn and not pushed goes to
        the others.

        Raises:
            PsError: The coordinator refused.
            TimeoutError: It did not answer in time.
        """
        if self._is_closed or self.is_out:
            return
        sequence = self._stepper.sequence_acknowledged if self._stepper else 0
        state = self._session.script_state.copies.newest

        async def leave() -> None:
            if state:
                await self._session.save_state(0, state)
            await self._session.leave(sequence, DataReport(), signal_name=signal_name)

        self._loop.run(leave, AT_ONCE_TIMEOUT_S)
        worker_id = self._session.worker.worker_id
        logger.warning("%s: worker %s has left the job", signal_name, worker_id)

    def _leave(self) -> None:
        report = self._pending.take_last_report()
        try:
            sequence = self._stepper.settled_sequence() if self._stepper else 0
            state = self._session.script_state.end()
            self._loop.run(lambda: self._session.end_state(state))
            self._loop.run(lambda: self._session.leave(sequence, report))
        except PsError as error:
            # The script is done, and an error now would hide that.
            logger.warning(
                "could not leave the job in good order, so that it counts worker %s as "
                "lost: %s",
                self._session.worker.worker_id,
                error,
            )

    def _join_in_order(
        self, given: Prepared, options: PrepareOptions, loaders: Mapping[int, Any]
    ) -> Stepper:
        placement = given.terms.placement(self._session.settings)
        buffers = Buffers(
            given.bound, given.buffers, given.specs.values(), given.followed
        )
        store = _store_of(
            given, placement, local=buffers.local, overlap=options.overlap
        )
        deadline = time.monotonic() + self._config.start_timeout_s
        joined = Joining(self._loop, self._session, store, given).join_first(deadline)
        first_loader = ""
        for name, loader in given.loaders.items():
            made = loaders[id(loader)]
            if isinstance(made, LeasedLoader):
                first_loader = first_loader or name
                made.note_first_epoch(joined.epochs[name])
        state = self._session.script_state
        for number, scaler in enumerate(given.loss_scales.scalers):
            state.register(f"prepared GradScaler {number}", scaler)
        state.joined(first_loader)
        if joined.checkpoint:
            state.load(joined.checkpoint, joined.state)
        if failpoints.armed:
            failpoints.hit("worker.joined")
        tensors = JobTensors.of(given, store, buffers)
        local = options.local_training
        watch_calls(local.models if local else given.models.values(), self._pending)
        trained = local.parameters if local else store.tensors
        looked = SpentGradients(len(trained))
        self._pending.watch(
            lambda: looked.differ_from(trained),
            parameters=trained,
            optimizer_count=len(local.optimizers if local else given.optimizers),
        )
        sending = (
            DuringBackward(self._loop, self._session, tensors, store)
            if isinstance(store, ArrivingValues)
            else Sending(self._loop, self._session, tensors)
        )
        return Stepper(
            sending,
            pending=self._pending,
            joined=joined,
            timeout_s=self._config.step_timeout_s,
            calls=options.calls,
        )


class DataLink:
    """A worker, as its loaders see it: a `psworker.data.DataSource`.

    Loaders exist before the worker has joined, since joining names them. They are
    iterated after it.
    """

    def __init__(
        self,
        loop: EventLoop,
        session: Session,
        pending: PendingData,
        *,
        wait_timeout_s: float,
        local_training: LocalTraining | None = None,
    ) -> None:
        self._loop = loop
        self._session = session
        self._pending = pending
        self._wait_timeout_s = wait_timeout_s
        self._local_training = local_training
        self._awaited_optimizer = ""
        self._optimizers: dict[str, PreparedOptimizer] = {}
        self._stepper: Stepper | None = None

    def start(self, stepper: Stepper, optimizers: dict[str, PreparedOptimizer]) -> None:
        """Connects it with the worker, and its optimizers by name."""
        self._stepper = stepper
        self._optimizers = optimizers

    @property
    def work(self) -> WorkLog:
        """What the script does."""
        return self._session.work

    @property
    def pending(self) -> PendingData:
        """What was drawn and not yet pushed or reported."""
        return self._pending

    @property
    def rejoin_count(self) -> int:
        """How often this worker was evicted and has rejoined."""
        assert self._stepper is not None, "loaders are handed out after joining"
        return self._stepper.rejoin_count

    def open_before(self, loader: str, epoch: int) -> Iterable[int]:
        """Epochs before one of which something was left when the worker last joined."""
        assert self._stepper is not None, "loaders are handed out after joining"
        return range(self._stepper.first_epochs.get(loader, epoch), epoch)

    def enter_again(self, loader: str, epoch: int) -> None:
        """Has schedulers take the steps that lie before an epoch's beginning."""
        if loader == self._session.script_state.loader:
            for each in self._optimizers.values():
                each.schedules.enter_again(epoch)

    @property
    def sharer_count(self) -> int:
        """Workers that take ranges on demand; 0 where ranges are dealt in rounds."""
        record = self._session.membership.record
        if record is None:
            return 0
        is_in_step = not self._session.settings.backup_worker_count
        if record.mode.rules.deals_rounds and is_in_step:
            return 0
        return len(record.members)

    @property
    def worker_count(self) -> int:
        """Workers of the job now, at least 1."""
        record = self._session.membership.record
        return max(1, len(record.members)) if record is not None else 1

    @property
    def rank(self) -> int:
        """This worker's place among these, from 0."""
        assert self._stepper is not None, "loaders are handed out after joining"
        return self._stepper.member.rank

    def dealt_count(self, batch_count: int) -> int:
        """Of the batches of an epoch those that this worker gets, at most."""
        place = 0 if self.sharer_count else self.rank
        return part_in_rounds(batch_count, place, self.worker_count)

    @property
    def has_gradient(self) -> bool:
        """Whether a gradient was begun that no step has taken yet."""
        return self._stepper is not None and self._stepper.has_gradient

    def note_draw(self, loader: str, epoch: int) -> None:
        """The script asks for a batch: it is done with its last step."""
        self._session.rewinds.end()
        if self._local_training is not None:
            self._local_training.before_draw()
        self._session.script_state.draw(loader, epoch)
        if loader == self._session.script_state.loader:
            for each in self._optimizers.values():
                each.schedules.draw(epoch)

    def settle(self) -> None:
        """Completes a step that is under way."""
        self._member().settle()

    def rejoin(self, rejoin_count: int) -> None:
        """Joins again after an eviction, unless it has since `rejoin_count`."""
        assert self._stepper is not None, "loaders are handed out after joining"
        self._stepper.rejoin(rejoin_count)
        if self._local_training is not None:
            self._local_training.start_over()
        self._session.rewinds.end()

    def open_epoch(self, request: EpochRequest) -> LoopFuture[Origin]:
        """Opens an epoch; what its order is drawn from."""
        return self._submit(
            lambda timeout_s: self._session.control.open_epoch(
                self._session.worker, request, timeout_s=timeout_s
            )
        )

    def lease_data(self, request: LeaseRequest) -> LoopFuture[Lease]:
        """Leases ranges."""

        async def attempt(timeout_s: float) -> Lease:
            if request.wait:
                self._session.membership.waiting = None  # of an earlier wait
            return await self._session.control.lease_data(
                self._session.worker, request, timeout_s=timeout_s
            )

        # Whoever asks logs waits for other workers.
        return self._submit(attempt, is_answered_at_once=not request.wait)

    def await_contribution(self) -> LoopFuture[None]:
        """Done once the next clock waits for nobody but workers without data."""
        place = self._member().next_place()

        async def wait() -> None:
            contribution = await self._session.shards.await_contribution(*place)
            self._awaited_optimizer = contribution.optimizer

        return self._loop.submit(wait)

    def holders(self) -> str:
        """Which workers have what this one waits for, in words, if that is known."""
        waiting = self._session.membership.waiting
        return waiting.reason if waiting is not None else ""

    def end_round(self) -> None:
        """Pushes what local steps have trained, before it waits for other workers."""
        if self._local_training is not None:
            self._local_training.end_round()

    def push_nothing(self) -> None:
        """Pushes weight 0 for the next clock and leaves the newest values."""
        named = self._optimizers.get(self._awaited_optimizer)
        optimizer = named or next(iter(self._optimizers.values()))
        if self._local_training is not None:
            self._local_training.contribute(optimizer.push_nothing)
        else:
            optimizer.push_nothing()

    def _member(self) -> Stepper:
        assert self._stepper is not None, "loaders are handed out after joining"
        self._stepper.refuse_out()
        return self._stepper

    def _submit(
        self,
        attempt: Callable[[float], Coroutine[Any, Any, T]],
        *,
        is_answered_at_once: bool = True,
    ) -> LoopFuture[T]:
        self._member()

        async def call() -> T:
            def decided() -> Coroutine[Any, Any, T]:
                return until_decided(
                    lambda timeout_s: attempt(min(timeout_s, CALL_TIMEOUT_S)),
                    now() + self._wait_timeout_s,
                )

            peer = self._session.control.peer
            with told_to_users():
                return await self._session.membership.unless_failed(
                    saying_whom(decided, f"{peer} to answer")
                    if is_answered_at_once
                    else decided()
                )

        return self._loop.submit(call)


def _refuse_late_group(objects: Iterable[object]) -> None:
    """Checks that the group of data-parallel models was made before `connect()`."""
    if is_in_group() and any(
        isinstance(each, nn.Module) and data_parallel_in(each) for each in objects
    ):
        raise ConfigurationError(
            "torch.distributed was set up after psworker.connect(), so that each "
            "process of the group became a worker by itself: call "
            "init_process_group() before connect()"
        )


def _store_of(
    given: Prepared, placement: Placement, *, local: Collection[int], overlap: bool
) -> ValueStore:
    """Writes the job's values into the models, but for entries of `local` buffers."""
    named: dict[str, Any] = {
        "buffers": given.followed.union(given.buffers),
        "local": local,
        "compression": given.compression,
    }
    if overlap:
        specs = given.specs.values()
        return ArrivingValues.of(given.bound, placement, specs, **named)
    return ValueStore(given.bound.tensors, placement, **named)


def _give_up(config: WorkerConfig) -> None:
    fork_guard.unguard(config.coordinator)
    event_loop.release()


def _connect_error(config: WorkerConfig, error: CallError) -> ConnectError | PsError:
    if error.refusal is not None:
        return error.to_ps_error()
    problem = problem_behind_call(config.coordinator, error.code, error.text)
    return unreachable(config.coordinator, config.connect_timeout_s, problem)


def _private_gradients(
    given: Prepared,
    choice: DifferentialPrivacy | None,
    worker_id: str,
    loaders: Iterable[LeasedLoader | CountedLoader],
) -> PrivateGradients | None:
    """What makes the gradients of a job private, if they are to be.

    Raises:
        UnsupportedError: The job would not count how often a sample takes part.
    """
    if choice is None or given.privacy is None:
        return None
    for loader in loaders:
        if not isinstance(loader, LeasedLoader):
            raise UnsupportedError(
                "differential_privacy needs a loader whose data the job leases, so "
                "that it counts how often a sample takes part: leave a split of your "
                "own, as by DistributedSampler, out"
            )
        loader.draws_once = True
    return PrivateGradients(
        given.privacy,
        given.models,
        choice.random_bytes(worker_id),
        loss_is_sum=given.loss == "sum",
    )
