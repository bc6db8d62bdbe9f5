"""The pushes of a member: sequence numbers, clocks, what was acknowledged.

In the user's thread only. One push is under way at a time. What it ends with, an
answer of all shards, a jump over clocks that closed without it, or an eviction, is
settled before the next one begins.
"""

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Final, TypeVar

from pswire.activity import Activity
from pswire.membership import Member
from pswire.reasons import ErrorReason
from pswire.schema import OptimizerSpec
from psworker.data.pending import PendingData
from psworker.errors import (
    FORKED_TEXT,
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
from psworker.member.script_state import Rewind
from psworker.optim.gradients import SpentGradients
from psworker.optim.optimizer_state import States
from psworker.optim.push_result import PushResult, combine
from psworker.optim.step_contents import OptimizerStep, StepContents
from psworker.optim.user_calls import UserCalls
from psworker.steps.notices import Notices
from psworker.steps.sending import Sending
from psworker.steps.state_exchange import StateExchange
from psworker.tensors.value_store import Scope, ValueStore
from psworker.transport.values import (
    OptimizerSettings,
    PushHeader,
    PushTrailer,
)

T = TypeVar("T")

READING: Final = "reading the model"
_NEXT: Final = "next(loader)"


class MemberPushes:
    """Pushes of a worker.

    Attributes:
        pending: Data that was drawn and not yet pushed or reported.
        first_epochs: By loader, the first epoch that was not over when it joined.
        new_epochs: Those of these of which nothing was trained when it joined first.
        member: This worker's place in the job, as of joining.
        last_push: What became of the newest push, `None` before the first.
        rejoin_count: How often the worker was evicted and has joined again.
        overlaps: Whether a step may return before its values are there.
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
            calls: The calls of the script, by default its own.
        """
        loop, session, tensors = sending.loop, sending.session, sending.tensors
        self._loop = loop
        self.calls = calls or UserCalls(timeout_s)
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
        self.overlaps = sending.overlaps
        self._unfinished: PushExchange | None = None
        self._lost: LostStart | None = None
        # Of an unfinished push that was settled between two steps.
        self._settled: PushResult | None = None
        self._spent = SpentGradients(len(store.tensors))
        self._has_stale_gradient = False
        self._shadow: ValueStore | None = None
        self._is_closed = False
        # Until its first push: others have trained before it came.
        self._is_late = joined.late_joiner is not None
        self._notices = Notices()
        self.pending = pending
        self.first_epochs = joined.epochs
        self.new_epochs = joined.new_epochs
        self.member = joined.member
        self._late_joiner = joined.late_joiner
        self.last_push: PushResult | None = None
        self.rejoin_count = 0

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

    @property
    def _place(self) -> Member:
        """The place in the newest record, in the last one known of if it has none."""
        record = self._session.membership.record
        place = record.member_of(self._session.worker) if record else None
        return place or self.member

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

    @property
    def _is_settled(self) -> bool:
        """Whether no step is under way, nor was left so by an error of the script's."""
        return not (self._sending.is_open or self._is_interrupted)

    def settle(self) -> None:
        """Completes a step that was left under way.

        Raises:
            ConfigurationError: It is under way in a call that this one interrupts.
            StepTimeoutError: Some worker or shard did not come in time.
        """
        if not self._is_settled:
            self._refuse_forked()
            self.calls.run(READING, self._settle)

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

    def _settle_unfinished(self, exchange: PushExchange) -> None:
        """Completes a push between two steps; the next one may report it."""
        is_behind = self.has_gradient
        result = self._finish(exchange, self._taken_back())
        if exchange.contents.trailer.publishes and not result.rejoined:
            return  # it was no step
        # A gradient that is there already is of values before it, or of some of both.
        self._has_stale_gradient |= is_behind
        self._settled = result

    def optimizer_state(self, optimizer: str, spec_digest: str) -> States:
        """The state of an optimizer after all that this worker has pushed.

        Raises:
            StepTimeoutError: What was pushed is not complete in time.
            WaitTimeoutError: The state did not come in time.
        """
        return self._as_member(
            lambda clock: self._states.pull(optimizer, clock, spec_digest)
        )

    def settings_used(self, optimizer: str) -> OptimizerSettings:
        """What the newest update of an optimizer was made with."""
        return self._as_member(
            lambda clock: self._states.pull_settings(optimizer, clock)
        )

    def declare(self, spec: OptimizerSpec) -> None:
        """Sends other groups, or another optimizer, for pushes to come.

        Returns when every shard knows, so that no push waits for that.

        Raises:
            OptimizerUnsupportedError: Shards can't run it.
            LimitError: Too much was declared already.
            WaitTimeoutError: The shards did not hear of it in time.
        """
        self._as_member(lambda clock: self._states.declare(spec, clock))
        self._sending.declare(spec)
        held = spec.entry_indexes
        self._declared.hold(held)
        self._buffers.hold(held)
        self._buffers.declare(spec)

    def _as_member(self, work: Callable[[int], T]) -> T:
        """Does work as a member, again as a new start if it was evicted meanwhile.

        Args:
            work: Called with this worker's clock.
        """
        while True:
            self._refuse_closed()
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

    def rejoin(self, rejoin_count: int) -> None:
        """Joins again after an eviction that was noticed between two steps.

        A gradient that was begun with data of the start before is thrown away by the
        next step: that data went back to the others.

        Args:
            rejoin_count: That of the start that was evicted. Nothing is done if a push
                beside the script has joined again since.
        """

        def rejoin() -> None:
            if rejoin_count == self.rejoin_count:
                self._rejoin()

        self.calls.run(_NEXT, rejoin)

    def _rejoin(self) -> None:
        self._refuse_closed()
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
        self._sending.drop()
        self._is_closed = True
        self._abandon_late()
        if self._unfinished is not None:
            self._unfinished.cancel()
        self._sending.close()

    def refuse_out(self) -> None:
        """Checks that this worker is in the job, as far as it knows.

        Raises:
            ClosedError: The connection is closed.
            EvictedError: It was evicted, and has not joined again.
        """
        self._refuse_closed()
        if self._lost is not None:
            raise EvictedError(
                f"worker {self._lost.worker.worker_id} was evicted and has not joined "
                "again yet"
            )

    def refuse_closed(self) -> None:
        """Raises a `ClosedError` once the connection is closed, and in a fork."""
        if self.calls.is_forked:
            raise ClosedError(FORKED_TEXT)
        self._refuse_closed()

    def catch_up(self) -> bool:
        """The script is there, and computes from what is in the tensors now.

        Ends what is pushed for it before its first step, and pulls what that missed.

        Returns:
            Whether there may be newer values in the tensors.

        Raises:
            StepTimeoutError: A clock that is open is not complete in time.
        """
        is_late = self._late_joiner is not None
        self.calls.run(_NEXT, self._as_member, lambda clock: None)
        return is_late

    def pull(self) -> None:
        """Pulls the newest values, of a worker that does not push meanwhile.

        Raises:
            StepTimeoutError: They did not come in time.
        """
        self.calls.run(_NEXT, self._as_member, self._pull)

    def _pull(self, clock: int) -> None:
        deadline = time.monotonic() + self._timeout_s
        pull = Pull(self.generation, clock)
        pull_values(self._loop, self._session, self._store, pull, deadline)
        self._guard.note()
        self._buffers.note_written(self._store)

    def _refuse_closed(self) -> None:
        refuse_closed(is_closed=self._is_closed)

    def _abandon_late(self) -> None:
        if self._late_joiner is not None:
            self._late_joiner.abandon()
            self._late_joiner = None

    def _open(self, wanted: OptimizerStep, *, takes_data: bool) -> PushResult | None:
        """What a call that pushes begins with.

        Args:
            wanted: What goes with the push; state that it loads is sent here.
            takes_data: Whether the gradient is of the data drawn since the last one.

        Returns:
            What the call ends with, where it only settles an earlier push, or the
            worker had to join again.
        """
        self._refuse_closed()
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

    def _begin(
        self, contents: StepContents, place: NextPush | None = None
    ) -> PushExchange:
        """The next push.

        Args:
            contents: What it carries.
            place: Where it belongs; by default as the newest record has it.

        Raises:
            EvictedError: The newest record has no place for this worker.
        """
        place = place or self._session.core.next_push()
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
        of_round = wanted.of_round
        trailer = PushTrailer(
            weight=0.0,
            groups=wanted.groups,
            is_finite=True,
            ranges=(),
            optimizer_digest=wanted.spec_digest,
            loads_state=wanted.load is not None,
            scheduler_steps=wanted.scheduler_steps,
            slack_ms=None if of_round is None else of_round.slack_ms,
            is_last=of_round is not None and of_round.is_last,
        )
        return StepContents(
            optimizer=wanted.spec.name,
            tensors=[None] * len(self._store.tensors),
            value_entries=self._buffers.value_entries,
            trailer=trailer,
            on_loaded=None if wanted.load is None else wanted.load.on_loaded,
            is_of_round=of_round is not None,
        )

    def _scope_of(self, exchange: PushExchange) -> Scope | None:
        """What the values that answer a push may change, None for everything."""
        if exchange.contents.trailer.publishes:
            return None
        return self._buffers.scope_of(exchange.optimizer)

    def _delivery_of(self, exchange: PushExchange) -> Delivery:
        """What brings a push to all shards, and their answers back.

        The first attempt goes on with what was sent ahead.
        """
        return lambda receiver: self._session.shards.push(
            exchange.pushes,
            receiver,
            timeout_s=self._timeout_s,
            ahead=exchange.take_ahead(),
            asks_first=exchange.asks_first or self._session.core.has_quorum,
        )

    def _finish(self, exchange: PushExchange, store: ValueStore) -> PushResult:
        self._unfinished = exchange
        exchange.has_timed_out = False
        deadline = time.monotonic() + self._timeout_s
        before = self._session.work.enter(Activity.SENDING)
        try:
            result = self._exchanged(exchange, store, deadline)
            late_count = 0
            while result.dropped and self._is_due_again(exchange, result):
                late_count += 1
                self._notices.note_late(result.clock, late_count, self._timeout_s)
                exchange.readdress(self._session.core.next_push())
                result = self._exchanged(exchange, store, deadline)
            is_late = result.dropped and self._counts_later(exchange)
            if is_late and exchange.contents.is_of_round:
                result = replace(result, outcome="missed")
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
        finally:
            self._session.work.enter(before)
        self._is_late = False
        self._guard.note()
        self._buffers.note_written(self._store)
        result = exchange.end(result)
        # Whatever interrupts it, the push is unfinished until all that it changes here
        # is changed, and doing that twice is doing it once.
        self._session.core.acknowledge(exchange.sequence)
        self.last_push = result
        ranges, exchange.ranges = exchange.ranges, ()
        if not result.missed:
            self.pending.unreported.note(ranges, is_dropped=result.dropped)
        self._notices.note_result(result, is_discarded=exchange.contents.is_discarded)
        self._unfinished = None
        return result

    def _exchanged(
        self, exchange: PushExchange, store: ValueStore, deadline: float
    ) -> PushResult:
        """What all shards say of a push, with the newest values in its store."""
        store.narrow(self._scope_of(exchange))
        try:
            replies = exchange.replies or exchange.run(
                self._loop, self._delivery_of(exchange), store, self._session.work
            )
        finally:
            store.narrow(None)
        concluded = self._session.core.conclude(exchange.sequence, replies)
        self._notices.note_differences(replies)
        if not isinstance(concluded, Missed):
            return concluded.result
        pull = catch_up(self._loop, self._session, concluded, deadline)
        pulled = pull_values(self._loop, self._session, store, pull, deadline)
        return replace(
            combine(pulled),
            outcome="dropped",
            gradient_factor=combine(replies).gradient_factor,
        )

    def _is_due_again(self, exchange: PushExchange, dropped: PushResult) -> bool:
        """Whether a push that came too late for its clock is one for the next.

        Not one that the shards have rejected, nor what is of no use later: weight 0,
        values that were published, and what goes with state that was sent for it.
        """
        trailer = exchange.contents.trailer
        return (
            self._counts_later(exchange)
            and dropped.gradient_factor > 0
            and trailer.weight > 0
            and not (trailer.publishes or trailer.loads_state)
            and not exchange.contents.is_of_round
        )

    def _counts_later(self, exchange: PushExchange) -> bool:
        return self._session.core.counts_later(exchange.pushes[0].header.clock)

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
            generation = self._session.membership.generation
            worker = self._session.worker
            self._lost = LostStart(worker, generation, self.clock, pushes)
        drawn = self.pending.take()
        if drawn.sample_count is not None:
            self._has_stale_gradient |= self.has_gradient
        self.pending.start_over()
        self._abandon_late()
        self._look()
        self._store.narrow(None)
        joined, result = self._joining.rejoin(self._lost, self._timeout_s)
        lost_clock, self._lost = self._lost.clock, None
        self._unfinished = None
        self._shadow = None
        self._guard.note()
        self._buffers.note_written(self._store)
        self.member = joined.member
        self._late_joiner = joined.late_joiner
        self.first_epochs = joined.epochs
        if joined.returned_to:
            self._begin_rewind(joined, lost_clock)
        self.rejoin_count += 1
        if exchange is not None:
            result = exchange.end(result)
        self.last_push = result
        return result

    def _begin_rewind(self, joined: Joined, from_clock: int) -> None:
        """Has the script set back when it goes on: the job is at a checkpoint again."""
        script_state = self._session.script_state
        rewind = Rewind(
            checkpoint=joined.returned_to,
            from_clock=from_clock,
            to_clock=joined.member.base_clock,
            from_epoch=script_state.epoch,
            to_epoch=joined.epochs.get(script_state.loader, script_state.epoch),
        )
        self._session.rewinds.begin(rewind, joined.state)
