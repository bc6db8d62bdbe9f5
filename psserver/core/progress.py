"""The clocks of one shard, worked on one after the other.

Decides what is applied when, and answers what is complete. `ShardCore` feeds it.
"""

from collections.abc import Collection

from psserver.core.admission import admitted_member, closed_refusal
from psserver.core.aggregate import OpenClock
from psserver.core.attendance import Attendance
from psserver.core.clock_table import ClockTable
from psserver.core.dedupe import DedupeTable, PushEntry
from psserver.core.effects import (
    ChunkTorn,
    ContributionAwaited,
    CopyImage,
    Finish,
    RefusePush,
    ShardEffect,
)
from psserver.core.hyperparameters import HyperparameterComparison, source_of
from psserver.core.push import Outcome, PushId, Reply, Trailer
from psserver.core.record import Departure, FenceKind, Member, Record, WorkerKey
from psserver.core.release import orders_to_apply, trailers_of
from psserver.core.shard_fence import ShardFence
from psserver.core.shard_report import report_of


class ClockProgress:
    """Where a shard stands.

    Attributes:
        clocks: Members and progress.
        dedupe: What is remembered of pushes.
        attendance: Who was heard, and who has no data.
        fence: Fences as this shard sees them.
        effects: What the owner is to do, in order.
        chunk_indexes: Chunks of this shard.
        torn_step_count: Steps of evicted workers of which a part was applied.
        torn_chunk_count: Chunks that contradicted their worker's verdict.
    """

    def __init__(self, chunk_indexes: Collection[int]) -> None:
        self.clocks = ClockTable()
        self.dedupe = DedupeTable()
        self.attendance = Attendance()
        self.fence = ShardFence()
        self.effects: list[ShardEffect] = []
        self.chunk_indexes = frozenset(chunk_indexes)
        self.torn_step_count = 0
        self.torn_chunk_count = 0
        self._open: OpenClock | None = None
        self._forced_skips: set[int] = set()
        self._skipped_clock = 0
        self._comparison = HyperparameterComparison()

    def take_effects(self) -> list[ShardEffect]:
        """Effects since the last call, in order."""
        taken, self.effects = self.effects, []
        return taken

    def pushes_of(self, clock: int) -> tuple[PushId, ...]:
        """The pushes that a clock consists of, in the order of worker ids."""
        return tuple(
            PushId(member.worker, clock - member.base_clock)
            for member in self.clocks.contributors(clock)
        )

    def entry_of(self, member: Member, clock: int) -> PushEntry | None:
        """A member's push of a clock, if anything of it is here."""
        window = self.dedupe.window_of(member.worker)
        return window.entries.get(clock - member.base_clock)

    def entries(self, clock: int) -> dict[WorkerKey, PushEntry]:
        """Entries of the contributors that have sent anything, in their order."""
        found = {}
        for member in self.clocks.contributors(clock):
            entry = self.entry_of(member, clock)
            if entry is not None:
                found[member.worker] = entry
        return found

    def applied_chunks(self, push: PushId) -> frozenset[int]:
        """Chunks whose values already hold this push, or its clock's update."""
        if push.sequence <= self.dedupe.window_of(push.worker).done_sequence:
            return self.chunk_indexes
        if self._open is not None and push in self.pushes_of(self._open.clock):
            return frozenset(self._open.applied)
        return frozenset()

    def reply(
        self, push: PushId, outcome: Outcome, nonfinite: tuple[str, ...] = ()
    ) -> Reply:
        """The answer to a push, as this shard stands now."""
        record = self.clocks.record
        assert record is not None
        member = admitted_member(self.clocks, push.worker, push.sequence)
        return Reply(
            outcome=outcome,
            generation=record.generation,
            version=self.clocks.version,
            frontier=self.clocks.frontier,
            clock=member.base_clock + push.sequence,
            nonfinite_worker_ids=nonfinite,
        )

    def note_chunk(self, push: PushId, chunk_index: int) -> None:
        """A chunk was staged: it may be the last one that an open clock needs."""
        clock = self._open
        if clock is not None and push in self.pushes_of(clock.clock):
            clock.note_chunk(push.worker, chunk_index)
            self._release(clock, (chunk_index,))

    def chunk_applied(self, chunk_index: int, torn_worker_ids: Collection[str]) -> None:
        """The owner has applied a chunk; its values and this change are one."""
        clock = self._open
        assert clock is not None
        assert chunk_index in clock.applying
        clock.applying.discard(chunk_index)
        clock.applied.add(chunk_index)
        if torn_worker_ids:
            self.torn_chunk_count += len(torn_worker_ids)
            clock.torn.update(torn_worker_ids)
            self.effects.append(
                ChunkTorn(
                    clock=clock.clock,
                    chunk_index=chunk_index,
                    worker_ids=tuple(torn_worker_ids),
                )
            )
        for entry in self.entries(clock.clock).values():
            if entry.staged.pop(chunk_index, None) is not None:
                entry.applied.add(chunk_index)
        # Before its end a clock has nothing new to release: chunks were released as
        # their last contributions came.
        if clock.is_done or self.fence.is_frozen:
            self.pump()

    def install(self, record: Record) -> None:
        """Goes on under a newer record."""
        self.clocks.install(record)
        for departure in record.departures:
            self._settle(departure)
        self._force_skips(record.skipped_clocks)
        if self._open is not None:
            self._open.disarm()

    def pump(self) -> None:
        """Does all that has become possible."""
        self._report_if_quiet()
        while not self.fence.is_frozen:
            cut = self.fence.cut
            if cut is not None and self.clocks.applied_clock >= cut.clock:
                cut.is_copying = True
                self.effects.append(
                    CopyImage(
                        snapshot_id=cut.snapshot_id, clock=self.clocks.applied_clock
                    )
                )
            elif not self._advance():
                return

    # Inside

    def _advance(self) -> bool:
        """Works on the next clock; returns whether it is complete now."""
        number = self.clocks.applied_clock + 1
        if self.clocks.is_empty(number, self.fence.cut_clock):
            self._complete(number, Outcome.APPLIED)
            return True
        contributors = self.clocks.contributors(number)
        if not contributors:
            return False
        entries = self.entries(number)
        trailers = trailers_of(entries)
        lacking = [m.worker for m in contributors if m.worker not in trailers]
        if lacking:
            self._tell_idle(number, lacking, trailers)
            return False
        is_finite = all(trailer.finite for trailer in trailers.values())
        if number in self._forced_skips or not is_finite:
            self._complete(number, Outcome.SKIPPED)
            return True
        clock = self._opened(number, entries)
        self._release(clock)
        if not clock.is_done:
            return False
        self._complete(number, Outcome.APPLIED)
        return True

    def _opened(self, number: int, entries: dict[WorkerKey, PushEntry]) -> OpenClock:
        """The clock that all trailers are in for, ready to release chunks."""
        if self._open is None:
            self._open = OpenClock(number)
        if not self._open.is_armed:
            self._open.arm(entries, self.chunk_indexes)
            trailers = trailers_of(entries)
            used = source_of(self.clocks.contributors(number), trailers)
            self.effects += self._comparison.differences(number, used, trailers)
        return self._open

    def _tell_idle(
        self, clock: int, lacking: list[WorkerKey], trailers: dict[WorkerKey, Trailer]
    ) -> None:
        """Asks workers without data for their part of a clock that needs only them.

        Somebody must have pushed: workers that are all idle do not spin, since an idle
        one pushes only when it is asked.
        """
        if not trailers or not self.attendance.are_idle(lacking, clock):
            return
        first = max(trailers.values(), key=lambda trailer: trailer.weight > 0)
        for worker in lacking:
            self.attendance.withdraw(worker)
            self.effects.append(
                ContributionAwaited(
                    worker=worker, clock=clock, optimizer=first.optimizer
                )
            )

    def _release(self, clock: OpenClock, among: tuple[int, ...] | None = None) -> None:
        """Orders the chunks that are ready to be applied."""
        if not clock.is_armed or not self.fence.admits_clock(clock.clock):
            return
        ready = clock.take_ready(among)
        if not ready:
            return
        entries = self.entries(clock.clock)
        trailers = trailers_of(entries)
        source = source_of(self.clocks.contributors(clock.clock), trailers)
        self.effects += orders_to_apply(
            clock.clock, ready, entries, source=trailers[source]
        )

    def _complete(self, clock: int, outcome: Outcome) -> None:
        pushes = self.pushes_of(clock)
        trailers = trailers_of(self.entries(clock))
        nonfinite = tuple(
            worker.worker_id
            for worker, trailer in trailers.items()
            if not trailer.finite
        )
        self.clocks.complete(clock)
        self._open = None
        self._forced_skips.discard(clock)
        if outcome is Outcome.SKIPPED:
            self._skipped_clock = clock
        for push in pushes:
            self.dedupe.finish(push.worker, push.sequence, outcome, nonfinite)
            reply = self.reply(push, outcome, nonfinite)
            self.effects.append(Finish(push=push, reply=reply))

    def _settle(self, departure: Departure) -> None:
        """Throws away what a member sent beyond its last clock."""
        worker = departure.member.worker
        for sequence, entry in self.dedupe.discard_after(
            worker, departure.step_count
        ).items():
            if entry.applied:
                self.torn_step_count += 1
            if entry.outcome is None:
                refusal = closed_refusal(departure)
                self.effects.append(
                    RefusePush(push=PushId(worker, sequence), refusal=refusal)
                )
        self.attendance.forget(worker)

    def _force_skips(self, clocks: Collection[int]) -> None:
        """Skips clocks of which some shard has a verdict that is not finite.

        They still need the pushes of all that contribute, as any clock does: whoever
        leaves instead is not counted. Left out are those that are complete here, and
        those that nobody is left of: the next worker to join may contribute to them.
        """
        self._forced_skips.update(
            clock
            for clock in clocks
            if clock > self.clocks.applied_clock and self.clocks.contributors(clock)
        )

    def _report_if_quiet(self) -> None:
        """Reports to the open fence when nothing is being applied any more."""
        fence = self.fence.open
        if fence is None or fence.reported or self.fence.is_copying:
            return
        is_applying = self._open is not None and bool(self._open.applying)
        is_seeded = fence.seeded == self.chunk_indexes
        if is_applying or (fence.kind is FenceKind.START and not is_seeded):
            return
        fence.reported = True
        self.effects.append(
            report_of(
                fence.fence_number,
                self.clocks,
                self.dedupe,
                open_clock=self._open,
                skipped_clock=self._skipped_clock,
            )
        )
