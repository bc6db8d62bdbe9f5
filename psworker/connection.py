"""What a user holds after `connect()`: one worker of a job."""

import atexit
import logging
import os
import sys
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Self

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from pswire import failpoints
from pswire.leased_data import DataReport
from pswire.placement import Placement
from pswire.schema import OptimizerSpec
from psworker import event_loop, fork_guard, own_places, termination
from psworker.backends.data_link import DataLink
from psworker.backends.group_channel import refuse_late_group
from psworker.backends.prepare_again import refuse_other_choices, sort_again
from psworker.config import WorkerConfig
from psworker.data import LeasedLoader, LoaderRefused, Split, prepare_loader
from psworker.data.batch_tensors import watch_calls
from psworker.data.pending import PendingData
from psworker.data.splitting import check_recorded, to_record
from psworker.errors import (
    ConfigurationError,
    ConnectError,
    PsError,
    refuse_closed,
)
from psworker.event_loop import EventLoop
from psworker.launch.reachability import (
    problem_behind_call,
    unreachable,
    wait_reachable,
)
from psworker.left_behind import reduced
from psworker.member.joining import OtherOrderError
from psworker.member.rejoining import join_first
from psworker.member.session import Session
from psworker.optim.buffer_policies import BufferChoice, tell_defaults
from psworker.optim.buffers import Buffers
from psworker.optim.gradients import SpentGradients
from psworker.optim.model_schema import describe_optimizer
from psworker.optim.named_objects import NamedObjects
from psworker.optim.optimizer import PreparedOptimizer
from psworker.optim.optimizer_state import states_of
from psworker.optim.prepare import (
    Prepared,
    check_loss,
    check_overlap,
    check_same_clip_norm,
    point_schedulers,
    sort_objects,
)
from psworker.optim.published import NOT_PREPARED_TEXT, published_entries
from psworker.optim.push_result import PushResult
from psworker.refusals import at_entrance
from psworker.steps.job_tensors import JobTensors
from psworker.steps.overlap.arriving_values import ArrivingValues
from psworker.steps.overlap.during_backward import DuringBackward
from psworker.steps.sending import Sending
from psworker.steps.stepper import Stepper
from psworker.tensors.compression import CompressionChoice
from psworker.tensors.value_store import ValueStore
from psworker.transport.call_error import CallError
from psworker.user_calls import UserCalls, in_turn

logger: Final = logging.getLogger("psworker")

AT_ONCE_TIMEOUT_S: Final = 5.0
"""Longest time to leave in when the process is told to end: who has sent the signal
sends SIGKILL next, mostly after ten seconds or more."""


@dataclass(frozen=True, slots=True)
class _Active:
    """What `prepare` has made.

    Attributes:
        given: What the first call was given.
        link: What loaders have of this connection.
        optimizers: The job's by name, as prepared last.
        loaders: Prepared loaders by `id()` of the user's.
    """

    given: Prepared
    link: DataLink
    optimizers: dict[str, PreparedOptimizer]
    loaders: dict[int, Any]


class Connection:
    """One worker of a job. A context manager: leaving it leaves the job.

    An exception that passes through it does not: the worker then counts as lost.
    """

    def __init__(self, config: WorkerConfig, loop: EventLoop, session: Session) -> None:
        self._config = config
        self._loop = loop
        self._session = session
        self._pending = PendingData()
        self._calls = UserCalls(config.step_timeout_s)
        self._stepper: Stepper | None = None
        self._loaders: tuple[LeasedLoader, ...] = ()
        self._active: _Active | None = None
        self._is_closed = False
        self._process_id = os.getpid()
        self._error_at_start = getattr(sys, "last_value", None)
        atexit.register(self._at_exit)

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
            session = loop.run(Session.open(config, left_s))
        except CallError as error:
            _give_up(config)
            raise _connect_error(config, error) from None
        except BaseException:
            _give_up(config)
            raise
        made = cls(config, loop, session)
        own_places.take(
            made,
            str(config.coordinator),
            config.worker_id,
            # An evicted worker registers anew, under another record of membership.
            is_out=lambda: session.membership.failure is not None,
        )
        termination.watch(made)
        return made

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
        else:
            self._abandon()

    def __repr__(self) -> str:
        clock = self._stepper.clock if self._stepper else 0
        state = "closed" if self._is_closed else f"clock {clock}"
        return (
            f"<psworker.Connection {self.worker_id} at {self._config.coordinator}, "
            f"{state}>"
        )

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        """Refused: it is this process that is the worker."""
        return reduced(
            f"the connection of worker {self.worker_id}",
            "it is this process that is the worker",
        )

    @property
    def is_closed(self) -> bool:
        """Whether it has ended, by `close` or by an error that passed through it."""
        return self._is_closed

    @property
    def worker_id(self) -> str:
        """Stable name of this worker in the job."""
        return self._session.worker.worker_id

    @property
    def is_leader(self) -> bool:
        """True: this process speaks to the job by itself; see `HostConnection`."""
        return True

    @property
    def rank(self) -> int:
        """Dense index among the workers, as of joining.

        Raises:
            ConfigurationError: `prepare` was not called yet.
        """
        if self._stepper is None:
            raise ConfigurationError("a worker has a rank once prepare() was called")
        return self._stepper.member.rank

    @property
    def worker_count(self) -> int:
        """Workers of the job now, with this one; as few as the ranks there are.

        Raises:
            ConfigurationError: `prepare` was not called yet.
        """
        record = self._session.membership.record
        if self._stepper is None or record is None:
            raise ConfigurationError("the workers are known once prepare() was called")
        return len(record.members)

    @property
    def clock(self) -> int:
        """Clocks this worker has completed, with the one it joined at.

        It moves when the mode changes, and when an evicted worker joins again.
        """
        if self._stepper is None:
            return 0
        self._stepper.look()
        return self._stepper.clock

    @property
    def generation(self) -> int:
        """Newest generation known here; grows when workers come or go."""
        return self._stepper.generation if self._stepper else 0

    @property
    def mode(self) -> str:
        """How workers keep together: `bsp`, `ssp` or `asp`."""
        record = self._session.membership.record
        return (record.mode if record else self._session.settings.mode).label

    @property
    def last_push(self) -> PushResult | None:
        """What became of the newest push, `None` before the first."""
        if self._stepper is None:
            return None
        self._stepper.look()
        return self._stepper.last_push

    @property
    def bytes_sent(self) -> int:
        """Bytes of all messages to shards."""
        return self._session.shards.traffic.sent_bytes

    @property
    def bytes_received(self) -> int:
        """Bytes of all messages from shards."""
        return self._session.shards.traffic.received_bytes

    @at_entrance
    @in_turn("ps.prepare()")
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
        """Joins the job with models, optimizers, loaders and schedulers.

        Returns when the job has started and the model holds its values. Give it
        everything at once; where there are several of a kind, by name, as in
        `prepare(generator=G, discriminator=D, opt_g=og, opt_d=od)`: what has no name
        is matched between workers by its place in the call. Called again with the same
        models and a new optimizer, it puts that in the place of the last one, on all
        shards; all workers of a script do so at the same place.

        Args:
            objects: Any of `nn.Module`, `torch.optim.Optimizer`, `DataLoader`,
                `LRScheduler` and `GradScaler`; at least one model and one optimizer.
                Or one dict of them, with names as keys.
            clip_grad_norm: Largest L2 norm of the gradient of a step, taken over all
                workers and shards; a larger one is scaled down to it, as
                `torch.nn.utils.clip_grad_norm_` does in one process. The same on every
                worker. `None` for no clipping.
            buffers: What becomes of buffers, such as the running statistics of batch
                norm: `"mean"` over the workers, the `"leader"`'s, or `"local"` to each
                of them; or a dict of these by patterns of names as in `state_dict()`,
                with the model's name and a dot before where there are several. By
                default `mean` for running statistics and `leader` for the rest. See
                docs/buffers.md.
            overlap: Whether gradients leave while `backward()` goes on, and `step()`
                returns before the new values are there: the next forward pass waits
                for each as it reads it. The numbers are the same. See `wait`.
            compression: How to send fewer bytes: `"bf16"`, `"fp16"`, `"int8"`, `"topk"`
                or `"onebit"`, or a `Compression`; the same on every worker.
            loss: What the loss is over its batch: `"mean"`, or `"sum"`, as with
                `reduction="sum"`, and then the gradients of all workers are added up;
                the same on every worker. By default a mean. See docs/data.md.
            named: Further objects, by the names that they have in the job and in
                snapshots.

        Returns:
            The same in the order of the call, a single one as it is, a dict for a
            dict: models, schedulers and scalers themselves, optimizers and loaders
            that work on the job.

        Raises:
            ConfigurationError: What was given does not go together,
                `clip_grad_norm` is no norm, or `loss` no such word.
            SchemaMismatchError: The job trains another model.
            OptimizerMismatchError: The job has another optimizer, clips otherwise, or
                has another loss.
            OptimizerUnsupportedError: Shards can't run an optimizer.
            StartTimeoutError: The job did not start in time.
        """
        self._refuse_closed()
        call = NamedObjects.of(objects, named)
        refuse_late_group(call.objects)
        check_overlap(overlap)
        if self._active is not None:
            if overlap and not (self._stepper and self._stepper.overlaps):
                raise ConfigurationError(
                    "steps overlap if the first prepare() says so, and it did not; "
                    "leave overlap out when prepare() is called again"
                )
            refuse_other_choices(self._active.given, buffers, compression)
            check_loss(loss, self._active.given.loss)
            return self._prepare_again(self._active, call, clip_grad_norm)
        given = sort_objects(
            call,
            clip_grad_norm=clip_grad_norm,
            buffers=buffers,
            compression=compression,
            loss=loss,
        )
        if buffers is None:
            tell_defaults(given.buffers)
        timeout_s = self._config.step_timeout_s
        link = DataLink(
            self._loop, self._session, self._pending, wait_timeout_s=timeout_s
        )
        replaced: dict[int, Any] = {
            id(loader): _leased(loader, link, name)
            for name, loader in given.loaders.items()
        }
        self._loaders = tuple(
            loader for loader in replaced.values() if isinstance(loader, LeasedLoader)
        )
        by_loader = dict(replaced)
        given, stepper = self._join(given, overlap=overlap)
        self._stepper = stepper
        optimizers = {
            name: _made_optimizer(optimizer, given.specs[name], stepper, given)
            for name, optimizer in given.optimizers.items()
        }
        for each in optimizers.values():
            each.scale_with(given.loss_scales)
        given.states.clear()  # the shards have it
        link.start(stepper, optimizers)
        self._active = _Active(given, link, optimizers, by_loader)
        by_id = {id(given.optimizers[name]): each for name, each in optimizers.items()}
        point_schedulers(given.schedulers, by_id)
        for each in optimizers.values():
            each.follow(given.schedulers, is_late=stepper.member.base_clock > 0)
        replaced.update(by_id)
        return call.returned(replaced)

    def wait(self) -> None:
        """Returns once the newest values are in the models.

        After `prepare(overlap=True)` a step may still be under way. Whatever reads
        parameters through their modules waits by itself; call this before reading them
        through references that you hold. Without `overlap` there is nothing to wait
        for.

        Raises:
            StepTimeoutError: Some worker or shard did not come in time.
            ClosedError: The connection is closed.
        """
        self._refuse_closed()
        if self._stepper is not None:
            self._stepper.settle()

    @at_entrance
    def record_split(self, name: str, split: Split) -> Split:
        """Records a split of data with the job, or checks it against the recorded one.

        The first worker that names it records it. Every other one, and an evaluation
        with `SnapshotReader.split`, then has the same or an error.

        Args:
            name: Its name in the job, up to 1,024 bytes.
            split: What `psworker.data.split` returned.

        Returns:
            The same split.

        Raises:
            SplitError: The job has another one of this name; the text says how they
                differ.
        """
        self._refuse_closed()
        record = to_record(name, split)
        check_recorded(split, self._loop.run(self._session.record_split(record)))
        return split

    @at_entrance
    def publish(self, *what: nn.Module | torch.Tensor | Iterable[torch.Tensor]) -> None:
        """Makes values that the script has set by itself those of the job.

        Weights that were clamped, pruned, drawn anew, averaged or loaded: between two
        steps the job's values are on the shards, and what a script writes into its own
        copy is lost otherwise. State of optimizers stays as it is. All workers of a
        script do so at the same place, and in BSP it takes a clock of its own; where
        their values differ, those of the worker that is longest in the job count. See
        docs/optimizers.md.

        Args:
            what: Models, parts of them, parameters and buffers, or lists of these;
                all models by default.

        Raises:
            ConfigurationError: `prepare` was not called yet, or a tensor belongs to no
                model that it was given.
            OptimizerMismatchError: In BSP, another worker steps in the same clock.
            StepTimeoutError: Some worker or shard did not come in time; calling it
                again goes on with the same values.
        """
        self._refuse_closed()
        if self._active is None or self._stepper is None:
            raise ConfigurationError(NOT_PREPARED_TEXT)
        self._stepper.settle()
        bound, tensors = self._active.given.bound, self._stepper.tensors
        optimizer = next(iter(self._active.optimizers.values()))
        optimizer.publish(published_entries(what, bound, tensors))

    def _prepare_again(
        self,
        active: "_Active",
        call: NamedObjects,
        clip_grad_norm: float | None,
    ) -> Any:  # noqa: ANN401, what was given
        """Puts new optimizers in the place of those of the last call."""
        assert self._stepper is not None, "the worker has joined"
        given = active.given
        check_same_clip_norm(clip_grad_norm, given.clip_grad_norm or None)
        again = sort_again(call, given, active.optimizers, active.loaders)
        specs = {
            name: describe_optimizer(
                name,
                optimizer,
                given.bound,
                exchange_count=active.optimizers[name].spec.exchange_count + 1,
                loss_is_sum=active.optimizers[name].spec.loss_is_sum,
            )
            for name, optimizer in again.optimizers.items()
        }
        for spec in specs.values():
            self._stepper.declare(spec)
        replaced: dict[int, Any] = dict(again.loaders)
        for name, optimizer in again.optimizers.items():
            states = states_of(optimizer, given.bound.index_of_tensors())
            made = _made_optimizer(optimizer, specs[name], self._stepper, given)
            made.take_place(states)
            made.scale_with(again.loss_scales or given.loss_scales)
            active.optimizers[name].retire()
            active.optimizers[name] = replaced[id(optimizer)] = made
        point_schedulers(again.schedulers, replaced)
        for name in again.optimizers:
            active.optimizers[name].follow(again.schedulers, is_late=False)
        active.link.start(self._stepper, active.optimizers)
        return call.returned(replaced)

    @at_entrance
    def close(self) -> None:
        """Leaves the job and ends all calls. More calls of it do nothing.

        Nor does one in a forked child, which has no part in the job.

        Raises:
            ConfigurationError: Another call is under way, as a step is when a signal
                handler runs.
        """
        if self._is_closed:
            return
        if self._calls.is_forked:
            self._is_closed = True
            return
        self._calls.run("ps.close()", self._close)

    def _close(self) -> None:
        if self._is_closed:
            return
        for loader in self._loaders:
            loader.tell_missed()
        try:
            if self._session.membership.failure is None:
                self._leave()
        finally:
            self._abandon()

    def _leave(self) -> None:
        report = self._pending.take_last_report()
        try:
            sequence = self._stepper.settled_sequence() if self._stepper else 0
            self._loop.run(self._session.leave(sequence, report))
        except PsError as error:
            # The script is done: an error now would hide that.
            logger.warning(
                "could not leave the job in good order, so that it counts worker %s as "
                "lost: %s",
                self.worker_id,
                error,
            )

    def leave_at_once(self, signal_name: str) -> None:
        """Leaves the job from a signal handler, in the middle of whatever is under way.

        Of a push that is, and of the data behind what was pushed, the shards know more
        than can be asked here: it counts as that of a worker that is lost does. Data
        that was drawn and not pushed goes to the others.

        Args:
            signal_name: That of the signal which ends this process.

        Raises:
            PsError: The coordinator did not take it.
            TimeoutError: It did not answer in time.
        """
        if self._is_closed or self._session.membership.failure is not None:
            return
        sequence = self._stepper.sequence_acknowledged if self._stepper else 0
        leaving = self._session.leave(sequence, DataReport(), signal_name=signal_name)
        self._loop.run(leaving, AT_ONCE_TIMEOUT_S)
        logger.warning("%s: worker %s has left the job", signal_name, self.worker_id)

    def _abandon(self) -> None:
        """Ends without leaving."""
        if self._is_closed:
            return
        self._is_closed = True
        own_places.give_up(self)
        termination.unwatch(self)
        if self._calls.is_forked:
            return
        if self._stepper is not None:
            self._stepper.close()
        atexit.unregister(self._at_exit)
        try:
            self._loop.run(self._session.close())
        finally:
            _give_up(self._config)

    def _at_exit(self) -> None:
        """Leaves when the script ended well, since nobody called `close`."""
        if os.getpid() != self._process_id:
            return  # a forked child has no part in the job
        error = getattr(sys, "last_value", None)
        is_over = error is None or error is self._error_at_start or hasattr(sys, "ps1")
        if is_over and not self._calls.is_busy:
            self.close()
        else:
            self._abandon()

    def _refuse_closed(self) -> None:
        refuse_closed(is_closed=self._is_closed)

    def _join(self, given: Prepared, *, overlap: bool) -> tuple[Prepared, Stepper]:
        """Becomes a member; the models then hold the job's values.

        Returns:
            What was given, in the job's order, and who steps.
        """
        try:
            return given, self._join_in_order(given, overlap=overlap)
        except OtherOrderError as other:
            given = given.in_order(other.positions)
        return given, self._join_in_order(given, overlap=overlap)

    def _join_in_order(self, given: Prepared, *, overlap: bool) -> Stepper:
        placement = given.terms.placement(self._session.settings)
        buffers = Buffers(
            given.bound, given.buffers, given.specs.values(), given.followed
        )
        store = _store_of(given, placement, local=buffers.local, overlap=overlap)
        deadline = time.monotonic() + self._config.start_timeout_s
        joined = join_first(self._loop, self._session, store, given, deadline)
        if failpoints.armed:
            failpoints.hit("worker.joined")
        tensors = JobTensors.of(given, store, buffers)
        watch_calls(given.models.values(), self._pending)
        looked = SpentGradients(len(store.tensors))
        self._pending.watch(
            lambda: looked.differ_from(store.tensors),
            parameters=store.tensors,
            optimizer_count=len(given.optimizers),
        )
        sending = (
            DuringBackward(self._loop, self._session, tensors, store)
            if isinstance(store, ArrivingValues)
            else Sending(self._loop, self._session, tensors)
        )
        return Stepper(
            self._loop,
            self._session,
            tensors,
            pending=self._pending,
            member=joined.member,
            stand_in=joined.stand_in,
            timeout_s=self._config.step_timeout_s,
            calls=self._calls,
            sending=sending,
        )


def _made_optimizer(
    inner: Optimizer, spec: OptimizerSpec, stepper: Stepper, given: Prepared
) -> PreparedOptimizer:
    """The optimizer that steps on the shards in place of the user's."""
    made = PreparedOptimizer(
        inner,
        spec,
        stepper,
        given.bound,
        stepper.compression,
        stepper.calls,
    )
    if stepper.overlaps:
        made.watch_parameters(stepper.settle)
    return made


def _store_of(
    given: Prepared, placement: Placement, *, local: Collection[int], overlap: bool
) -> ValueStore:
    """Where the values of a job go.

    Args:
        given: What is trained.
        placement: How tensors are cut.
        local: Entries of buffers that are never written to.
        overlap: Whether values come while a forward pass reads them.
    """
    named: dict[str, Any] = {
        "buffers": given.followed.union(given.buffers),
        "local": local,
        "compression": given.compression,
    }
    if overlap:
        specs = given.specs.values()
        return ArrivingValues.of(given.bound, placement, specs, **named)
    return ValueStore(given.bound.tensors, placement, **named)


def _leased(loader: DataLoader[Any], link: DataLink, name: str) -> Any:  # noqa: ANN401
    try:
        return prepare_loader(loader, link, name=name)
    except LoaderRefused as refused:
        raise ConfigurationError(f"{name}: {refused}") from None


def _give_up(config: WorkerConfig) -> None:
    fork_guard.unguard(config.coordinator)
    event_loop.release()


def _connect_error(config: WorkerConfig, error: CallError) -> ConnectError | PsError:
    if error.refusal is not None:
        return error.to_ps_error()
    problem = problem_behind_call(config.coordinator, error.code, error.text)
    return unreachable(config.coordinator, config.connect_timeout_s, problem)
