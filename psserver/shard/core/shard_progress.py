"""Both ways of applying pushes on one shard, and what ends one for the other.

Which one a push belongs to is said by the clock table, from records.
"""

from collections.abc import Collection

from psserver.edge.fence_report import FenceReport, WorkerHolding, newest_ranges
from psserver.shard.core.clock_commits import check_repeated
from psserver.shard.core.clock_progress import ClockProgress
from psserver.shard.core.clock_table import closed_refusal
from psserver.shard.core.core_image import CoreImage
from psserver.shard.core.effects import CopyImage, RefusePush, Staged
from psserver.shard.core.push import PushEntry, PushId
from psserver.shard.core.push_progress import DonePush, PushProgress
from psserver.shard.core.shard_fence import OpenFence
from psserver.shard.core.shard_state import ShardState
from pswire.membership import (
    ClockChoice,
    CutPurpose,
    Departure,
    FenceKind,
    Member,
    Outcome,
    Record,
)


class ShardProgress:
    """What a shard does next.

    Attributes:
        clocks: BSP.
        pushes: SSP and ASP.
    """

    def __init__(self, state: ShardState) -> None:
        self._state = state
        self._table = state.clocks
        self._fence = state.fence
        self.clocks = ClockProgress(state)
        self.pushes = PushProgress(state)
        self._is_staleness_due = False

    def pump(self) -> None:
        """Does all that has become possible."""
        self._report_if_quiet()
        while not self._fence.is_frozen:
            if self._is_cut_due:
                self._take_cut()
            elif not (self.clocks.advance() or self.pushes.advance()):
                return
            elif not self._table.is_clocked and self._table.is_settled:
                self._begin_staleness()

    def note_chunk(self, push: PushId, entry: PushEntry, chunk_index: int) -> None:
        """A chunk was staged."""
        member = self._state.known_member(push.worker)
        assert member is not None
        is_streamed = self._table.is_streamed(member, push.sequence)
        state = self._state
        if state.rules.has_two_phase_pushes or (
            not is_streamed and state.is_two_phase(member.clock_of(push.sequence))
        ):
            if entry.is_complete:
                self.pump()
        elif is_streamed:
            self.pushes.note_chunk(push, chunk_index)
        else:
            self.clocks.note_chunk(push, chunk_index)

    def chunk_applied(self, chunk_index: int, torn_worker_ids: Collection[str]) -> None:
        """The owner has applied a chunk."""
        machine = self.pushes if self.pushes.owns_chunk(chunk_index) else self.clocks
        is_done = machine.chunk_applied(chunk_index, torn_worker_ids)
        # Before its end a clock has nothing new to release: chunks were released as
        # their last contributions came. Nor has a push.
        if is_done or self._fence.is_frozen:
            self.pump()

    def check_answerable(self, push: PushId, member: Member) -> None:
        """Refuses a push that is done and whose worker has ended, in SSP and ASP.

        It counts; no value may be sent, since nobody keeps to the bound for one that
        has ended. A push that was dropped, in a mode before, is said to be: no values
        go with that.

        Raises:
            Refusal: `WORKER_INCARNATION_STALE`.
        """
        ended = self._table.departure_of(push.worker)
        if ended is None or not self._table.is_streamed(member, push.sequence):
            return
        window = self._state.on_shard.window_of(push.worker)
        if window.outcome_of(push.sequence) is Outcome.DROPPED:
            return
        if push.sequence <= self._table.done_of(push.worker):
            raise closed_refusal(ended)

    def applied_chunks(self, push: PushId) -> frozenset[int]:
        """Chunks whose values already hold this push, or its clock's update."""
        window = self._state.on_shard.window_of(push.worker)
        if push.sequence <= window.done_sequence:
            is_dropped = window.outcome_of(push.sequence) is Outcome.DROPPED
            if is_dropped or self._is_held(push):
                return frozenset()
            return self._state.chunk_indexes
        return self.clocks.applied_chunks(push)

    def admits_answer(self, push: PushId, done: DonePush) -> bool:
        """Whether a push that is done may be answered now; else it will be.

        The answer may have been lost, and a mode begun since that demands newer
        values than those it was sent with.
        """
        if self.pushes.is_blocked(push):
            return False
        if done.outcome is not Outcome.DROPPED and self._is_held(push):
            self.pushes.block(push, done)
            return False
        return True

    def commit(self, member: Member, choice: ClockChoice) -> bool:
        """A driver says that every shard holds all of a clock, or of its push."""
        sequence = self.pushes.sequence_of(member, choice.clock)
        if self._table.is_streamed(member, sequence):
            return self.pushes.commit(member.worker, sequence)
        clock = choice.clock
        check_repeated(self._state.committed, choice)
        if clock <= self._table.applied_clock:
            return True
        if clock != self._table.next_clock:
            return False
        return self.clocks.commits.commit(choice, self._table.contributors(clock))

    def send_again(self, push: PushId) -> None:
        """The push's call is a new one: it may not have heard `staged`.

        Of a push that is done, too: whoever has committed it here may have been lost
        before it did so on the other shards, which wait for the next driver.
        """
        if not self._state.has_two_phase_clocks:
            return
        member = self._table.member_of(push.worker)
        if push.sequence > self._table.done_of(push.worker):
            self.pushes.send_again(push)
            self.clocks.commits.send_again(push.worker)
            self.pump()
        elif member is not None:
            clock = member.clock_of(push.sequence)
            if self._table.is_streamed(member, push.sequence):
                choice = ClockChoice(clock, (push.worker,))
                self._state.effects.append(Staged(push=push, choice=choice))
            else:
                self.clocks.commits.say_committed(push, clock)

    def install(self, record: Record) -> None:
        """Goes on under a newer record."""
        was_clocked = self._table.is_clocked
        self._table.install(record)
        for departure in record.departures:
            self._settle(departure)
        self._table.note_progress()
        self.clocks.follow(record)
        if was_clocked and not self._table.is_clocked:
            self._is_staleness_due = True
            if self._table.is_settled:
                self._begin_staleness()

    def awaited(self) -> tuple[Member, ...]:
        """Members that something waits for."""
        number = self._table.next_clock
        if number is None:
            return self.pushes.laggards() or self._owing_to_cut()
        contributors = self._table.contributors(number)
        lacking = tuple(m for m in contributors if not self._is_complete(m, number))
        # A shard that has everything waits for somebody to drive the commit.
        if self._state.is_two_phase(number):
            members = tuple(m for m in contributors if self._table.member_of(m.worker))
            return lacking or members
        return lacking

    @property
    def waits_for(self) -> str:
        """What is waited for, in words."""
        number = self._table.next_clock
        if number is not None:
            contributors = self._table.contributors(number)
            has_all = all(self._is_complete(m, number) for m in contributors)
            is_two_phase = self._state.is_two_phase(number)
            is_staged = is_two_phase and has_all and contributors
            return f"clock {number} to be {'committed' if is_staged else 'complete'}"
        if not self._table.is_settled:
            return "the pushes of the mode before to be applied"
        if self._owing_to_cut() and not self.pushes.laggards():
            return "the last push of a snapshot to be complete"
        return "slower workers to come within the staleness bound"

    # Inside

    def _begin_staleness(self) -> None:
        if self._is_staleness_due:
            self._is_staleness_due = False
            self.pushes.staleness.begin()

    def _is_held(self, push: PushId) -> bool:
        """Whether values are not new enough for the answer to a push that is done."""
        member = self._table.member_of(push.worker)
        return self.pushes.is_blocked(push) or (
            member is not None
            and not self.pushes.admits_pull(member.clock_of(push.sequence))
        )

    def _is_complete(self, member: Member, clock: int) -> bool:
        entry = self._state.entry_of(PushId(member.worker, member.sequence_of(clock)))
        return entry is not None and entry.is_complete

    @property
    def _is_cut_due(self) -> bool:
        """Whether all that is in a decided cut is applied."""
        pending = self._fence.pending
        if pending is None or not self._table.is_settled:
            return False
        if not pending.is_streamed:
            return self._table.applied_clock >= pending.cut.clock
        return not any(self._table.unfinished) and all(
            self._table.done_of(worker) >= sequence
            for worker, sequence in pending.cut.sequences.items()
        )

    def _owing_to_cut(self) -> tuple[Member, ...]:
        """Members whose pushes a decided cut waits for, in SSP and ASP."""
        pending = self._fence.pending
        if pending is None or not pending.is_streamed:
            return ()
        last = pending.cut.sequences
        return tuple(
            member
            for member in self._table.members
            if self._table.done_of(member.worker) < last.get(member.worker, 0)
        )

    def _take_cut(self) -> None:
        """Has the image made; what follows in the order of effects is not in it."""
        pending, self._fence.pending = self._fence.pending, None
        assert pending is not None
        clock = pending.cut.clock if pending.is_streamed else self._table.applied_clock
        state, core = self._state, None
        if pending.cut.purpose is CutPurpose.CHECKPOINT:
            core = CoreImage.of(
                state.clocks, state.on_shard, state.settings_of_next(), state.paces
            )
        state.effects.append(CopyImage(cut=pending.cut, clock=clock, core=core))

    def _settle(self, departure: Departure) -> None:
        """Throws away what a member sent beyond its last push that counts."""
        worker = departure.member.worker
        window = self._state.of(worker).window
        for sequence, entry in window.discard_after(departure.last_sequence).items():
            push = PushId(worker, sequence)
            if entry.applied:
                self._state.torn_step_count += 1
            if entry.outcome is None or self.pushes.is_blocked(push):
                refusal = closed_refusal(departure)
                self._state.effects.append(RefusePush(push=push, refusal=refusal))
            self.pushes.discard(push)

    def _report_if_quiet(self) -> None:
        """Reports to the open fence when nothing is being applied any more."""
        fence = self._fence.open
        if fence is None or fence.reported:
            return
        is_open = self.clocks.open is not None and bool(self.clocks.open.applying)
        if is_open or self.pushes.is_applying:
            return
        if fence.kind is FenceKind.START and not fence.is_seeded(
            self._state.chunk_indexes
        ):
            return
        if self.clocks.commits.measure.is_under_way:
            # A clock that nobody is left to commit may need what comes out of it.
            return
        fence.reported = True
        self._state.effects.append(self._report(fence))

    def _report(self, fence: OpenFence) -> FenceReport:
        """One report for all kinds of fences; nothing is being applied meanwhile."""
        state, progress, clocks = self._state, self.clocks, self._table
        applied = clocks.applied_clock
        begun = [
            member.clock_of(window.done_sequence + 1)
            for member in clocks.senders
            if (window := state.of(member.worker).window).next_entry is not None
            and window.next_entry.trailer is not None
        ]
        # A shard that has the verdict has skipped the clock when all were in, while
        # another may still lack the worker that is evicted now. Before that the verdict
        # says nothing: whoever counts brings it to every shard.
        is_skipped = applied > 0 and progress.skipped_clock == applied
        touched = applied + bool(progress.open is not None and progress.open.applied)
        number = clocks.next_clock
        contributors = () if number is None else clocks.contributors(number)
        return FenceReport(
            fence_number=fence.fence_number,
            holdings=tuple(self._holding(m, fence) for m in clocks.members),
            # A joiner must not contribute to a clock that was begun without it, even
            # when whoever had begun it has ended and so have the trailers.
            trailer_clock_max=max([touched, *begun]),
            touched_clock_max=touched,
            applied_clock=applied,
            skip_clocks=(applied,) if is_skipped else (),
            mixed_clocks=progress.mixed_clocks,
            frontier=clocks.frontier,
            committed=state.committed,
            chosen=progress.commits.chosen,
            is_settled=clocks.is_settled,
            measured=(
                progress.commits.measured(number, contributors)
                if number is not None and contributors
                else None
            ),
            failure=fence.failure,
        )

    def _holding(self, member: Member, fence: OpenFence) -> WorkerHolding:
        window = self._state.of(member.worker).window
        next_push = PushId(member.worker, window.done_sequence + 1)
        entry = window.next_entry
        begins_batch = (
            entry is not None
            and entry.trailer is not None
            and not (entry.trailer.continues_batch or entry.applied)
            and not self.pushes.is_begun(next_push)
        )
        is_idle = entry is None and self._state.on_shard.is_idle(next_push)
        is_evicting = member.worker in fence.evicting
        return WorkerHolding(
            worker=member.worker,
            complete_sequence=window.complete_sequence,
            trailer_sequence=window.trailer_sequence,
            touched_sequence=window.touched_sequence,
            ranges=(
                newest_ranges(window.ranges_known(), len(fence.evicting))
                if is_evicting
                else ()
            ),
            batch_sequence=(
                window.done_sequence if begins_batch else window.trailer_sequence
            ),
            is_between_batches=begins_batch or is_idle,
            steps_again=window.steps_again,
        )
