"""The steps of a member: sequence numbers, clocks, what was acknowledged.

In the user's thread only. One push is under way at a time. What it ends with, an
answer of all shards, a jump over clocks that closed without it, or an eviction, is
settled before the next one begins.
"""

import logging
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Final, TypeVar

import torch
from torch._C import _len_torch_dispatch_stack
from torch._ops import _len_torch_dispatch_stack_pre_dispatch
from torch.utils._python_dispatch import _disable_current_modes

from pswire import failpoints
from pswire.frames import bits_to_bytes
from pswire.membership import Member
from pswire.reasons import ErrorReason
from pswire.schema import OptimizerSpec
from psworker import fork_guard
from psworker.data.pending import PendingData
from psworker.errors import (
    ClosedError,
    CorruptionError,
    EvictedError,
    OptimizerMismatchError,
    PsError,
    StepTimeoutError,
    refuse_closed,
)
from psworker.member.catch_up import catch_up, pull_lost, pull_values
from psworker.member.core import Missed, NextPush, Pull
from psworker.member.exchange import Delivery, PushExchange
from psworker.member.joining import Joined, Joining, LostStart
from psworker.optim import gradients
from psworker.optim.buffers import leads
from psworker.optim.gradients import SpentGradients
from psworker.optim.optimizer_state import States
from psworker.optim.push_result import PushResult, combine
from psworker.optim.step_contents import OptimizerStep, StateLoad, StepContents
from psworker.optim.user_calls import UserCalls
from psworker.steps.model_hooks import ModelHooks
from psworker.steps.notices import Notices
from psworker.steps.sending import Sending
from psworker.steps.state_exchange import StateExchange
from psworker.tensors.value_store import Scope, ValueStore, same_bytes
from psworker.transport.values import OptimizerSettings, PushHeader, PushTrailer

logger: Final = logging.getLogger("psworker")

T = TypeVar("T")

_NEXT: Final = "next(loader)"
_READING: Final = "reading the model"


class Stepper:
    """Pushes of a worker.

    Attributes:
        pending: Data that was drawn and not yet pushed or reported.
        member: This worker's place in the job, as of joining.
        last_push: What became of the newest push, `None` before the first.
        rejoin_count: How often the worker was evicted and has joined again.
        compression: What is kept for gradients in fewer bytes.
        calls: The calls of the script, of which one is under way at a time.
    """

    def __init__(
        self,
        sending: Sending,
        *,
        pending: PendingData,
        joined: Joined,
        timeout_s: float,
        calls: UserCalls | None = None,
    ) -> None:
        """Takes over a worker that has joined.

        Args:
            sending: How pushes leave: the worker and what it trains.
            pending: Data that was drawn and not yet pushed or reported.
            joined: Its place in the job.
            timeout_s: Longest time for a step.
            calls: The calls of the script, by default those of this stepper alone.
        """
        loop, session, tensors = sending.loop, sending.session, sending.tensors
        self._loop = loop
        self.calls = calls or UserCalls(timeout_s)
        self._models = tuple(tensors.given.models.values())
        self._session = session
        self._store = store = tensors.store
        self._joining = Joining(loop, session, store, tensors.given)
        self._guard = tensors.guard
        self._states = StateExchange(loop, session, store, timeout_s)
        self._buffers = tensors.buffers
        self._declared = tensors.declared
        self._buffers.note_all(store)
        self.compression = tensors.compression
        self._timeout_s = timeout_s
        self._sending = sending
        self._unfinished: PushExchange | None = None
        self._lost: LostStart | None = None
        # Values that were loaded with optimizer state, until both count.
        self._loaded: list[torch.Tensor | None] | None = None
        # Of an unfinished push that was settled between two steps.
        self._settled: PushResult | None = None
        self._spent = SpentGradients(len(store.tensors))
        self._has_stale_gradient = False
        self._shadow: ValueStore | None = None
        self._is_closed = False
        # Until its first push: others have trained before it came.
        self._is_late = joined.late_joiner is not None
        self._notices = Notices()
        # A second step on the same batch, as a GAN takes it, has as many samples.
        self._sample_count = 1
        self.pending = pending
        self.member = joined.member
        self._late_joiner = joined.late_joiner
        self.last_push: PushResult | None = None
        self.rejoin_count = 0
        self._hooks: ModelHooks | None = None
        if self._sending.overlaps:
            fork_guard.settle_before_fork(self)
            self._hooks = ModelHooks(
                self._models,
                store.tensors,
                gradient_is_there=self.gradient_is_there,
                about_to_read=self.about_to_read,
            )

    @property
    def overlaps(self) -> bool:
        """Whether a step may return before its values are there."""
        return self._sending.overlaps

    @property
    def sequence_acknowledged(self) -> int:
        """Last push that is settled on every shard."""
        return self._session.core.sequence

    @property
    def clock(self) -> int:
        """Clocks this worker has completed, as the newest record counts them."""
        return self._place.clock_of(self.sequence_acknowledged)

    @property
    def generation(self) -> int:
        """Newest generation that the coordinator or a shard has named."""
        return self._session.core.generation_heard

    def next_place(self) -> tuple[int, int, int]:
        """Generation, clock and sequence of the next push, of a worker that is here.

        Raises:
            StepTimeoutError: What was pushed in its place is not complete in time.
        """
        return self.calls.run(_NEXT, self._next_place)

    def _next_place(self) -> tuple[int, int, int]:
        self._settle()
        self._catch_up()
        sequence = self.sequence_acknowledged + 1
        generation = self._session.membership.generation
        return generation, self._place.clock_of(sequence), sequence

    def step(self, wanted: OptimizerStep) -> PushResult | None:
        """Pushes the gradient of one optimizer and leaves the newest values.

        Returns:
            What became of it, `None` while that is left under way.

        Raises:
            StepTimeoutError: Some worker or shard did not come in time.
            UnsupportedError: The optimizer can't take a gradient, sparse or dense.
        """
        if failpoints.armed:
            failpoints.hit("worker.step")
        if wanted.load is not None:
            wanted = self._with_loaded_values(wanted, wanted.load)
        before = self.sequence_acknowledged
        try:
            return self._step(wanted)
        except PsError:
            raise
        except BaseException:
            self._note_interrupted(before)
            raise

    def _step(self, wanted: OptimizerStep) -> PushResult | None:
        """As `step`, which sees to errors that are none of psworker's."""
        if (result := self._open(wanted, takes_data=True)) is not None:
            return result
        # Whoever loads state keeps it until it knows that it has counted.
        is_awaited = wanted.is_awaited or wanted.load is not None
        contents = self._with_gradient(wanted)
        try:
            exchange = self._begin(contents)
        except EvictedError:
            return self._lose(None)
        self._has_stale_gradient = False
        self._unfinished = exchange
        result = self._conclude(exchange, is_awaited=is_awaited)
        self._sending.stepped(wanted.spec.name)
        if self._hooks is not None:
            self._hooks.watch_gradients()
        return result

    def _with_gradient(self, wanted: OptimizerStep) -> StepContents:
        """The gradient that is there, with its data, weight, norm and verdict."""
        held = gradients.gradients_of(wanted.spec, wanted.groups, self._store.tensors)
        scale = wanted.scale
        loss_scale = 1.0 if scale is None else gradients.unscale(held, scale)
        loss_scale /= wanted.averaged_over
        self._spent.note(held)
        drawn = self.pending.take()
        if drawn.sample_count is not None:
            self._sample_count = drawn.sample_count
        weight = wanted.weight
        if is_discarded := self._has_stale_gradient or drawn.is_of_lost:
            weight = 0.0
        elif weight is None:
            weight = float(self._sample_count)
        is_counted = wanted.is_finite and weight > 0
        norm = gradients.norm_of(held) / loss_scale if is_counted else 0.0
        is_finite = is_discarded or (wanted.is_finite and gradients.is_finite(norm))
        # Neither a skipped clock nor a weight of 0 needs any bytes.
        averaged_buffers = b""
        if not is_finite or weight == 0:
            held = [None] * len(held)
        else:
            place = self._session.membership.record, self._session.worker
            if self._buffers.are_sent:
                averaged_buffers = self._buffers.add_to(
                    held,
                    self._store,
                    is_leader=leads(*place, self.sequence_acknowledged + 1),
                )
        nothing = self._without_gradient(wanted)
        return replace(
            nothing,
            tensors=held,
            trailer=replace(
                nothing.trailer,
                weight=weight,
                is_finite=is_finite,
                ranges=() if is_discarded else drawn.ranges,
                loss_scale=loss_scale,
                gradient_norm=norm if is_finite else 0.0,
                averaged_buffers=averaged_buffers,
            ),
            ranges=drawn.ranges,
            is_discarded=is_discarded,
        )

    def _note_interrupted(self, before: int) -> None:
        """The script has left a step by an error of its own, such as Ctrl-C.

        Its push is settled before the model is read again, or with the next step.

        Args:
            before: Last push that was settled before the step.
        """
        unfinished = self._unfinished
        if unfinished is not None:
            unfinished.is_left = False
            self._watch_reads()
        elif self.sequence_acknowledged > before:
            self._settled = self.last_push  # the same step again pushes nothing

    def _watch_reads(self) -> None:
        if self._hooks is None and self._models:
            self._hooks = ModelHooks(
                self._models, self._store.tensors, about_to_read=self.about_to_read
            )

    def gradient_is_there(self, entry_index: int) -> None:
        """A backward pass has added to a gradient: sends what is final by it.

        Raises:
            StepTimeoutError: The step before is not complete in time.
        """
        if not (self._is_closed or self.calls.is_forked):
            self.calls.run("backward()", self._send_final, entry_index)

    def _send_final(self, entry_index: int) -> None:
        optimizer = self._sending.gradient_is_there(entry_index)
        if optimizer is None:
            return
        self._settle()
        record = self._session.membership.record
        is_here = record is not None and record.member_of(self._session.worker)
        if (
            is_here
            and not self._has_stale_gradient
            and self._unfinished is None
            and self._late_joiner is None
        ):  # else the step finds out what there is to do
            place = self._session.core.next_push()
            self._sending.begin_ahead(
                self._header_of(place, optimizer, self._buffers.value_entries)
            )

    def about_to_read(self, entry_indexes: Sequence[int]) -> None:
        """Returns once these tensors hold the values of the last step.

        Raises:
            StepTimeoutError: They did not come in time.
        """
        if not (self._is_closed or self.is_settled):
            self._refuse_forked()
            if _len_torch_dispatch_stack() or _len_torch_dispatch_stack_pre_dispatch():
                # Who traces the model, as `torch.export` does, must not trace the wait.
                with _disable_current_modes():
                    self.calls.run(_READING, self._wait_for, entry_indexes)
            else:
                self.calls.run(_READING, self._wait_for, entry_indexes)
        if self._hooks is not None and not self._sending.overlaps:
            self._hooks.remove()  # until a step is left by an error again
            self._hooks = None

    def _wait_for(self, entry_indexes: Sequence[int]) -> None:
        if not self._sending.wait_for(entry_indexes):
            self._settle()

    @property
    def is_settled(self) -> bool:
        """Whether no step is under way, nor was left so by an error of the script's."""
        return not (self._sending.is_open or self._is_interrupted)

    def settle(self) -> None:
        """Completes a step that was left under way.

        Raises:
            ConfigurationError: It is under way in a call that this one interrupts.
            StepTimeoutError: Some worker or shard did not come in time.
        """
        if not self.is_settled:
            self._refuse_forked()
            self.calls.run(_READING, self._settle)

    def _refuse_forked(self) -> None:
        if self.calls.is_forked:
            raise ClosedError(
                "this process was forked while a step was under way, whose values came "
                "to its parent: call ps.wait() before you fork"
            )

    @property
    def _is_interrupted(self) -> bool:
        """Whether the script has left a step by an error that is none of psworker's.

        What it computes next needs the values of that step. After a timeout it is told
        to step again instead, and may look around before.
        """
        unfinished = self._unfinished
        return unfinished is not None and not (
            unfinished.has_timed_out or unfinished.is_left
        )

    def _settle(self) -> None:
        """As `settle`, within a call."""
        if self._is_closed:
            return
        if self._sending.is_open:
            self._settle_left()
        elif self._is_interrupted and self._unfinished is not None:
            self._settle_unfinished(self._unfinished)

    def _settle_left(self) -> None:
        """Completes a step that has returned before its values were there."""
        self._sending.end_writing()
        exchange = self._unfinished
        is_left = exchange is not None and exchange.is_left
        had_data = self.pending.has_drawn
        try:
            if self._lost is not None:
                result = self._lose(exchange)
            elif exchange is not None:
                result = self._finish(exchange, self._store)
            else:
                return
        finally:
            if self._unfinished is None:
                self._sending.complete()
        self._has_stale_gradient |= self._sending.was_mixed(
            rejoined=result.rejoined
        ) or (result.rejoined and had_data)
        if not is_left:
            self._settled = result

    def settle_before_fork(self) -> None:
        """Completes a step that is under way, whose values would not come to a child.

        Where that can't be done the child refuses to read them.
        """
        if self._is_closed or self.calls.is_forked or self.calls.is_within:
            return
        try:
            self.settle()
        except PsError as error:
            logger.warning(
                "this process forks while a step is under way, which could not be "
                "completed before; the child can't read the model: %s",
                error,
            )

    def _settle_unfinished(self, exchange: PushExchange) -> None:
        """Completes a push between two steps; the next one may report it."""
        is_behind = self.has_gradient
        result = self._finish(exchange, self._taken_back())
        if exchange.contents.trailer.publishes and not result.rejoined:
            return  # it was no step
        # A gradient that is there already is of values before it, or of some of both.
        self._has_stale_gradient |= is_behind
        self._settled = result

    def push_nothing(self, wanted: OptimizerStep) -> PushResult:
        """Pushes weight 0 for the next clock, for a worker that has no data.

        With a gradient begun the values are kept back until the next step, since it
        was computed from the values that are there. Where no data was drawn since the
        last step none is begun: a GAN leaves some behind that it never steps with.
        """
        if self._loaded is not None:
            wanted = replace(wanted, load=None)  # goes with its values, by a step
        if (result := self._open(wanted, takes_data=False)) is not None:
            return result
        try:
            exchange = self._begin(self._without_gradient(wanted))
        except EvictedError:
            return self._lose(None)
        if not (self.pending.has_drawn and self.has_gradient):
            return self._finish(exchange, self._taken_back())
        if self._shadow is None:
            self._shadow = self._store.copy()
        return self._finish(exchange, self._shadow)

    def publish(
        self, wanted: OptimizerStep, entry_indexes: Collection[int]
    ) -> PushResult:
        """Makes the values of these tensors, as they are here, those of the job.

        By a push of its own, which is no step: what comes back is written as after
        one. Again as a new start where this worker was evicted meanwhile.

        Raises:
            OptimizerMismatchError: Another worker steps in the same clock.
            StepTimeoutError: Some worker or shard did not come in time; the values
                are kept, and go with the next call.
        """
        self.refuse_closed()
        self._settle()
        if self._is_late:
            return self._keep_values("published")
        values = self._values_of(entry_indexes)
        if self._loaded is not None:
            # What an earlier call has left open is another push, and has its own state.
            if self._unfinished is not None:
                self._settle_unfinished(self._unfinished)
            wanted = replace(wanted, load=None)
        if wanted.load is not None:
            return self._publish_loaded(wanted, wanted.load, values)
        return self._published(wanted, values)

    def _with_loaded_values(
        self, wanted: OptimizerStep, load: StateLoad
    ) -> OptimizerStep:
        """Publishes what was loaded into the models together with optimizer state.

        A script that loads after `prepare` loads both, and both are to count or none:
        the state goes with the values, before the step. Buffers that a forward pass
        has changed since are this worker's still, and go with the step as always.

        What an error leaves open goes on with the next step, values and state.

        Returns:
            What is left to go with the step.

        Raises:
            OptimizerMismatchError: The worker whose values count has stepped instead.
        """
        self.refuse_closed()
        was_begun = self._loaded is not None
        self._settle()
        if was_begun and self._loaded is None:
            return replace(wanted, load=None)  # it has just counted
        if not was_begun and not self._guard.has_writes:
            return wanted
        if self._is_late:
            self._keep_values("loaded")
            self._loaded = None
            load.on_loaded()
            return replace(wanted, load=None)
        store = self._store
        values = self._loaded or self._values_of(range(len(store.tensors)))
        self._publish_loaded(wanted, load, values)
        with torch.no_grad():
            for index in self._buffers.policies:
                value = values[index]
                if value is not None and not same_bytes(
                    value, store.tensors[index].detach()
                ):
                    store.tensors[index].copy_(value)
        return replace(wanted, load=None)

    def _publish_loaded(
        self,
        wanted: OptimizerStep,
        load: StateLoad,
        values: list[torch.Tensor | None],
    ) -> PushResult:
        """Publishes values with optimizer state; keeps them until both count.

        Raises:
            OptimizerMismatchError: The worker whose values count has stepped instead.
        """
        if self._loaded is None and self._unfinished is not None:
            self._settle_unfinished(self._unfinished)  # a push without this state
        self._loaded = values

        def note_loaded() -> None:
            self._loaded = None
            load.on_loaded()

        carried = StateLoad(load.states, note_loaded)
        result = self._published(replace(wanted, load=carried), values)
        if result.dropped:
            raise OptimizerMismatchError(
                "the values and optimizer state that this worker has loaded are not "
                "used: in the same clock the worker that is longest in the job has "
                "stepped, since the two are at different places of the script. Load "
                "in all workers at the same place; the next step() sends both again"
            )
        return result

    def _keep_values(self, verb: str) -> PushResult:
        """Goes on with the job's values, in a worker that has just joined it late.

        Its script begins where those of the others were long ago: what it sets then
        would undo what the job has trained since. A gradient that was computed of that
        is thrown away by the next step.
        """

        def pull(clock: int) -> PushResult:
            pull = Pull(self.generation, clock)
            deadline = time.monotonic() + self._timeout_s
            replies = pull_values(
                self._loop, self._session, self._taken_back(), pull, deadline
            )
            return combine(replies)

        self._has_stale_gradient |= self.has_gradient
        result = self.as_member(pull)
        self._guard.note()
        self._buffers.note_written(self._store)
        logger.warning(
            "this worker has joined a job that trains already: what its script has %s "
            "before its first step is not used, and the job's values stay",
            verb,
        )
        return result

    def _values_of(self, entry_indexes: Iterable[int]) -> list[torch.Tensor | None]:
        """Copies: what has to be settled before is written into the user's own."""
        self._look()
        values: list[torch.Tensor | None] = [None] * len(self._store.tensors)
        for index in entry_indexes:
            if index not in self._buffers.local:
                values[index] = self._store.tensors[index].detach().clone()
        return values

    def _published(
        self, wanted: OptimizerStep, values: Sequence[torch.Tensor | None]
    ) -> PushResult:
        while True:
            unfinished = self._unfinished
            if unfinished is None or not unfinished.contents.trailer.publishes:
                self._guard.note()  # what the script has edited is what it publishes
                if self._open(wanted, takes_data=False) is not None:
                    continue  # an earlier step is settled, or this is a new start
                self._shadow = None  # older than what is published
                try:
                    unfinished = self._begin(self._with_values(wanted, values))
                except EvictedError:
                    self._lose(None)
                    continue
            result = self._finish(unfinished, self._store)
            if not result.dropped:
                self._tell_counted(values)
                return result
            if not result.rejoined:
                logger.warning(
                    "what this worker has published is not used: in the same clock the "
                    "worker that is longest in the job has stepped, since the two are "
                    "at different places of the script; the job's values stay"
                )
                return result

    def _tell_counted(self, values: Sequence[torch.Tensor | None]) -> None:
        """Says so where what has come is not what this worker has published."""
        record = self._session.membership.record
        longest = record.longest if record is not None else None
        if longest is None or longest.worker == self._session.worker:
            return
        if self._store.base.is_rounded:
            return
        names = [
            f"{entry.name!r} of {entry.model}"
            for entry, published, now in zip(
                self._buffers.entries, values, self._store.tensors, strict=True
            )
            if published is not None and not same_bytes(published, now.detach())
        ]
        if names:
            logger.warning(
                "what this worker has published of %s%s is not what counts: those of "
                "worker %s do, which is longest in the job; have all workers publish "
                "the same at the same place, such as with the same seed",
                names[0],
                f" and {len(names) - 1} more" if len(names) > 1 else "",
                longest.worker.worker_id,
            )

    def _with_values(
        self, wanted: OptimizerStep, values: Sequence[torch.Tensor | None]
    ) -> StepContents:
        """Values that replace those of the job."""
        nothing = self._without_gradient(wanted)
        return replace(
            nothing,
            tensors=values,
            value_entries=bits_to_bytes([each is not None for each in values]),
            trailer=replace(nothing.trailer, weight=1.0, publishes=True),
        )

    @property
    def tensors(self) -> Sequence[torch.Tensor]:
        """The user's tensor of each entry of the schema, where it is now."""
        self._look()
        return self._store.tensors

    @property
    def reads_state(self) -> bool:
        """Whether this process can ask shards for optimizer state: yes."""
        return True

    def optimizer_state(self, optimizer: str, spec_digest: str) -> States:
        """The state of an optimizer after all that this worker has pushed.

        Raises:
            StepTimeoutError: What was pushed is not complete in time.
            WaitTimeoutError: The state did not come in time.
        """
        return self.as_member(
            lambda clock: self._states.pull(optimizer, clock, spec_digest)
        )

    def settings_used(self, optimizer: str) -> OptimizerSettings:
        """What the newest update of an optimizer was made with."""
        return self.as_member(
            lambda clock: self._states.pull_settings(optimizer, clock)
        )

    def as_member(self, work: Callable[[int], T]) -> T:
        """Does work as a member, again as a new start if it was evicted meanwhile.

        Args:
            work: Called with this worker's clock.
        """
        while True:
            self.refuse_closed()
            self._settle()
            if self._lost is not None:
                self._rejoin()
            if self._unfinished is not None:
                self._settle_unfinished(self._unfinished)
            try:
                self._catch_up()
                return work(self.clock)
            except EvictedError:
                self._rejoin()

    def rejoin(self) -> None:
        """Joins again after an eviction that was noticed between two steps.

        A gradient that was begun with data of the start before is thrown away by the
        next step: that data went back to the others.
        """
        self.calls.run(_NEXT, self._rejoin)

    def _rejoin(self) -> None:
        self.refuse_closed()
        has_push = self._unfinished is not None
        was_left = self._sending.is_open
        last_push = self.last_push
        result = self._lose(self._unfinished)
        self._sending.complete()
        if not has_push:
            self.last_push = last_push
        elif not was_left:  # else its step has returned: the next one pushes its own
            self._settled = result

    def settled_sequence(self) -> int:
        """The last push that is settled, for a worker that leaves.

        Raises:
            StepTimeoutError: What was pushed in its place is not complete in time.
        """
        with suppress(OptimizerMismatchError):  # its push counts on no shard then
            self._settle()
        self._arrive()
        return self.sequence_acknowledged

    def close(self) -> None:
        """Refuses everything from now on."""
        if self._hooks is not None:
            self._hooks.remove()
        self._sending.drop()
        self._is_closed = True
        self._abandon_late()
        if self._unfinished is not None:
            self._unfinished.cancel()
        self._sending.close()

    def refuse_closed(self) -> None:
        """Checks that the connection is open.

        Raises:
            ClosedError: It is not.
        """
        refuse_closed(is_closed=self._is_closed)

    def refuse_lost(self) -> None:
        """Checks that this worker was not evicted, as far as it knows.

        Raises:
            EvictedError: It was, and has not joined again.
        """
        if self._lost is not None:
            raise EvictedError(
                f"worker {self._lost.worker.worker_id} was evicted and has not joined "
                "again yet"
            )

    def _abandon_late(self) -> None:
        if self._late_joiner is not None:
            self._late_joiner.abandon()
            self._late_joiner = None

    @property
    def _place(self) -> Member:
        """The place in the newest record, in the last one known of if it has none."""
        record = self._session.membership.record
        place = record.member_of(self._session.worker) if record else None
        return place or self.member

    def _open(self, wanted: OptimizerStep, *, takes_data: bool) -> PushResult | None:
        """What a call that pushes begins with.

        Args:
            wanted: What goes with the push; state that it loads is sent here.
            takes_data: Whether the gradient is of the data drawn since the last one.

        Returns:
            What the call ends with, where it only settles an earlier push, or the
            worker had to join again.
        """
        self.refuse_closed()
        self._settle()
        self._look()
        if not takes_data:
            self._sending.drop()
        if (result := self._resume()) is not None:
            return result
        self._guard.check(self.clock + 1)
        try:
            self._catch_up()
            if wanted.load is not None:
                self._states.stage(
                    wanted.spec.name,
                    self.sequence_acknowledged + 1,
                    wanted.load.states,
                    wanted.spec_digest,
                )
        except EvictedError:
            if takes_data:
                self.pending.take()
            return self._lose(None)
        return None

    def _look(self) -> None:
        """Looks what the script has done to its tensors, and follows them.

        Raises:
            ConfigurationError: The job can't follow one.
        """
        for index in self._declared.look():
            self._store.put(index, self._declared.tensors[index])
            self._buffers.forget(index)
        if len(self._declared.frozen) < len(self._buffers.frozen):
            self._buffers.hold(self._buffers.frozen - self._declared.frozen)

    def declare(self, spec: OptimizerSpec) -> None:
        """Sends other groups, or another optimizer, for pushes to come.

        Returns when every shard knows, so that no push waits for that.

        Raises:
            OptimizerUnsupportedError: Shards can't run it.
            LimitError: Too much was declared already.
            WaitTimeoutError: The shards did not hear of it in time.
        """
        self.as_member(lambda clock: self._states.declare(spec, clock))
        self._sending.declare(spec)
        held = spec.entry_indexes
        self._declared.hold(held)
        self._buffers.hold(held)
        self._buffers.declare(spec)

    def _scope_of(self, exchange: PushExchange) -> Scope | None:
        """What the values that answer a push may change, None for everything."""
        if exchange.contents.trailer.publishes:
            return None
        return self._buffers.scope_of(exchange.optimizer)

    def _resume(self) -> PushResult | None:
        """Settles what an earlier call has left open.

        Returns:
            What became of it, for a step that only asks for that: the script has gone
            backward no more. None if there is nothing, or another gradient to push.
        """
        if self._lost is not None:
            return self._lose(self._unfinished)
        if self._unfinished is not None:
            self._settle_unfinished(self._unfinished)
        result, self._settled = self._settled, None
        if result is None or self._spent.has_new(self._store.tensors):
            return None
        return result

    def _catch_up(self) -> None:
        """Ends what is pushed for this worker before its first step; pulls the values.

        A gradient that was begun before is thrown away by the next step: it is of
        values that are too old.

        Raises:
            StepTimeoutError: The clock that is open is not complete in time.
        """
        late = self._late_joiner
        if late is None:
            return  # nothing comes, and what the script has edited is to be seen
        self._arrive()
        late.pull_missed(Pull(self.generation, self.clock), self._timeout_s)
        self._late_joiner = None
        self._guard.note()
        self._buffers.note_written(self._store)

    @property
    def has_gradient(self) -> bool:
        """Whether a gradient was begun that no step has taken yet."""
        return self._spent.has_others(self._store.tensors)

    def note_zeroed(self) -> None:
        """What was behind gradients that were zeroed has no weight."""
        if self.pending.has_trained and not self.has_gradient:
            self.pending.throw_away()

    def _arrive(self) -> None:
        late = self._late_joiner
        if late is not None and late.arrive(self._timeout_s):
            self._has_stale_gradient = self.has_gradient

    def _taken_back(self) -> ValueStore:
        """The user's tensors, with the values that were kept back from them."""
        if self._shadow is not None:
            self._store.take_from(self._shadow)
            self._shadow = None
        return self._store

    def _begin(self, contents: StepContents) -> PushExchange:
        """The next push.

        Raises:
            EvictedError: The newest record has no place for this worker.
        """
        place = self._session.core.next_push()
        header = self._header_of(place, contents.optimizer, contents.value_entries)
        # By the same record as the clock: a newer one may come at any moment.
        trailer = replace(contents.trailer, is_of_longest=place.is_of_longest)
        return self._sending.begin(header, replace(contents, trailer=trailer))

    def _header_of(
        self, place: NextPush, optimizer: str, value_entries: bytes
    ) -> PushHeader:
        session = self._session
        return place.header(
            session.settings.job_id, session.worker, optimizer, value_entries
        )

    def _without_gradient(self, wanted: OptimizerStep) -> StepContents:
        """A push of weight 0, without a gradient and without data."""
        trailer = PushTrailer(
            weight=0.0,
            groups=wanted.groups,
            is_finite=True,
            ranges=(),
            optimizer_digest=wanted.spec_digest,
            loads_state=wanted.load is not None,
            scheduler_steps=wanted.scheduler_steps,
        )
        return StepContents(
            optimizer=wanted.spec.name,
            tensors=[None] * len(self._store.tensors),
            value_entries=self._buffers.value_entries,
            trailer=trailer,
            on_loaded=None if wanted.load is None else wanted.load.on_loaded,
        )

    def _delivery_of(self, exchange: PushExchange) -> Delivery:
        """What brings a push to all shards, and their answers back.

        The first attempt goes on with what was sent ahead.
        """
        return lambda receiver: self._session.shards.push(
            exchange.pushes,
            receiver,
            timeout_s=self._timeout_s,
            ahead=exchange.take_ahead(),
            asks_first=exchange.asks_first,
        )

    def _conclude(
        self, exchange: PushExchange, *, is_awaited: bool
    ) -> PushResult | None:
        """Does what is left of a step whose push has begun."""
        store = self._taken_back()
        is_seen = self._hooks is not None and self._hooks.sees_reads
        if is_awaited or not is_seen:
            return self._finish(exchange, store)
        delivery, scope = self._delivery_of(exchange), self._scope_of(exchange)
        if not self._sending.leave(exchange, delivery, scope):
            return self._finish(exchange, store)
        exchange.is_left = True
        return None

    def _finish(self, exchange: PushExchange, store: ValueStore) -> PushResult:
        self._unfinished = exchange
        exchange.has_timed_out = False
        deadline = time.monotonic() + self._timeout_s
        try:
            store.narrow(self._scope_of(exchange))
            try:
                replies = exchange.replies or exchange.run(
                    self._loop,
                    self._delivery_of(exchange),
                    store,
                )
            finally:
                store.narrow(None)
            concluded = self._session.core.conclude(exchange.sequence, replies)
            self._notices.note_differences(replies)
            if isinstance(concluded, Missed):
                pull = catch_up(self._loop, self._session, concluded, deadline)
                pulled = pull_values(self._loop, self._session, store, pull, deadline)
                result = replace(combine(pulled), outcome="dropped")
            else:
                result = concluded.result
            if store.base.is_lost:
                pull_lost(self._loop, self._session, store, result, deadline)
        except (StepTimeoutError, CorruptionError):
            exchange.has_timed_out = True
            raise
        except EvictedError:
            return self._lose(exchange)
        except PsError as error:
            # Of two workers that are out of step each shard refuses the second to come.
            # Others may have taken this push by then, so that its number is used up:
            # the next call goes on with it, once the other worker has left.
            may_stand = error.reason is ErrorReason.OPTIMIZER_OUT_OF_PHASE
            if may_stand and len(exchange.pushes) > 1:
                exchange.has_timed_out = True
            else:
                # Decided, or the job is over: nothing to go on with.
                self._unfinished = None
            raise
        self._is_late = False
        self._guard.note()
        self._buffers.note_written(self._store)
        result = exchange.end(result)
        # Whatever interrupts it, the push is unfinished until all that it changes here
        # is changed, and doing that twice is doing it once.
        self._session.core.acknowledge(exchange.sequence)
        self.last_push = result
        ranges, exchange.ranges = exchange.ranges, ()
        self.pending.unreported.note(ranges, is_dropped=result.dropped)
        self._notices.note_result(result, is_discarded=exchange.contents.is_discarded)
        self._unfinished = None
        return result

    def _lose(self, exchange: PushExchange | None) -> PushResult:
        """Joins again as a new start, and says what became of the push under way.

        An error leaves everything so that the next call goes on with it.
        """
        self._sending.drop()
        if exchange is not None:
            exchange.cancel()
        self._sending.end_writing()
        if self._lost is None:
            pushes = exchange.pushes if exchange is not None else ()
            self._lost = LostStart(self._session.worker, pushes)
        drawn = self.pending.take()
        if drawn.sample_count is not None:
            self._has_stale_gradient |= self.has_gradient
        self.pending.start_over()
        self._abandon_late()
        self._look()
        self._store.narrow(None)
        joined, result = self._joining.rejoin(self._lost, self._timeout_s)
        self._lost = None
        self._unfinished = None
        self._shadow = None
        self._guard.note()
        self._buffers.note_written(self._store)
        self.member = joined.member
        self._late_joiner = joined.late_joiner
        self.rejoin_count += 1
        if exchange is not None:
            result = exchange.end(result)
        self.last_push = result
        return result
