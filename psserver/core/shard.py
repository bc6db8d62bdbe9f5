"""The protocol of one shard: pushes in, chunks to apply and answers out.

Pure; see the package. Values are the owner's: the core says when a chunk may be
applied and with which contributions, and is told when that has happened, so that a
chunk's state in the dedupe table changes together with its values.

Invariant: clocks complete in order, one at a time; the update of a clock is over the
contributors that records name, summed in the order of worker ids.
"""

from collections.abc import Collection

from psserver.core.admission import (
    admitted_member,
    check_clock,
    check_phase,
    closed_refusal,
)
from psserver.core.aggregate import OpenClock
from psserver.core.attendance import Attendance
from psserver.core.clock_table import ClockTable
from psserver.core.dedupe import DedupeTable, PushEntry
from psserver.core.effects import (
    ChunkTorn,
    CommitSeed,
    ContributionAwaited,
    CopyImage,
    DiscardSeed,
    Finish,
    RefusePush,
    ShardEffect,
)
from psserver.core.hyperparameters import HyperparameterComparison, source_of
from psserver.core.push import Outcome, PushId, Reply, StagedChunk, Trailer
from psserver.core.record import Departure, FenceKind, Member, Record, WorkerKey
from psserver.core.release import orders_to_apply, trailers_of
from psserver.core.shard_fence import ShardFence
from psserver.core.shard_report import report_of
from pswire.reasons import ErrorReason, Refusal


class ShardCore:
    """State of one shard of a BSP job.

    Attributes:
        clocks: Members and progress.
        dedupe: What is remembered of pushes.
        torn_step_count: Steps of evicted workers of which a part was applied.
        torn_chunk_count: Chunks that contradicted their worker's verdict.
    """

    def __init__(self, chunk_indexes: Collection[int]) -> None:
        self.clocks = ClockTable()
        self.dedupe = DedupeTable()
        self.torn_step_count = 0
        self.torn_chunk_count = 0
        self._chunk_indexes = frozenset(chunk_indexes)
        self._fence = ShardFence()
        self._open: OpenClock | None = None
        self._forced_skips: set[int] = set()
        self._skipped_clock = 0
        self._attendance = Attendance()
        self._comparison = HyperparameterComparison()
        self._effects: list[ShardEffect] = []

    def take_effects(self) -> list[ShardEffect]:
        """Effects since the last call, in order."""
        taken, self._effects = self._effects, []
        return taken

    # Pushes

    def open_push(self, push: PushId, clock: int, now_ms: int) -> PushEntry | None:
        """Admits a push, new or sent again.

        Args:
            push: Its id.
            clock: Clock the sender thinks it completes.
            now_ms: Monotonic time.

        Returns:
            Its entry, or None when it is done and was acknowledged.

        Raises:
            Refusal: `RECOVERING`, `WORKER_INCARNATION_STALE`, `MALFORMED_MESSAGE` or
                `SEQUENCE_GAP`; no state changed.
        """
        member = admitted_member(self.clocks, push.worker, push.sequence)
        check_clock(member, push, clock)
        entry = self.dedupe.open(push.worker, push.sequence)
        self._attendance.note_push(push.worker, now_ms)
        return entry

    def add_trailer(self, push: PushId, entry: PushEntry, trailer: Trailer) -> None:
        """Takes a push's trailer.

        Raises:
            Refusal: `PUSH_CONFLICT`, `CHUNK_INVALID` or `OPTIMIZER_OUT_OF_PHASE`; no
                state changed.
        """
        extra = trailer.chunk_indexes - self._chunk_indexes
        if extra:
            raise Refusal(
                ErrorReason.CHUNK_INVALID, f"chunk {min(extra)} is not on this shard"
            )
        member = admitted_member(self.clocks, push.worker, push.sequence)
        if entry.trailer is None and entry.outcome is None:
            others = trailers_of(self._entries(member.base_clock + push.sequence))
            check_phase(push, trailer, others)
        if self.dedupe.add_trailer(entry, trailer):
            self._pump()

    def add_chunk(
        self, push: PushId, entry: PushEntry, chunk_index: int, chunk: StagedChunk
    ) -> None:
        """Takes a chunk of a push.

        Raises:
            Refusal: `PUSH_CONFLICT` or `CHUNK_INVALID`; no state changed.
        """
        if chunk_index not in self._chunk_indexes:
            raise Refusal(
                ErrorReason.CHUNK_INVALID, f"chunk {chunk_index} is not on this shard"
            )
        if not self.dedupe.add_chunk(entry, chunk_index, chunk):
            return
        clock = self._open
        if clock is not None and self._is_of(push, clock.clock):
            clock.note_chunk(push.worker, chunk_index)
            self._release(clock, (chunk_index,))

    def acknowledge(self, worker: WorkerKey, sequence_unacknowledged_min: int) -> None:
        """The worker has the answers to all pushes below this sequence."""
        self.dedupe.acknowledge(worker, sequence_unacknowledged_min)

    def reply_to(self, push: PushId) -> Reply | None:
        """The answer to a push that is done, None while it is not."""
        window = self.dedupe.window_of(push.worker)
        if push.sequence > window.done_sequence:
            return None
        entry = window.entries.get(push.sequence)
        if entry is not None and entry.outcome is Outcome.SKIPPED:
            return self._reply(push, Outcome.SKIPPED, entry.nonfinite_worker_ids)
        return self._reply(push, Outcome.DUPLICATE)

    def applied_chunks(self, push: PushId) -> frozenset[int]:
        """Chunks whose values already hold this push, or its clock's update."""
        if push.sequence <= self.dedupe.window_of(push.worker).done_sequence:
            return self._chunk_indexes
        if self._open is not None and self._is_of(push, self._open.clock):
            return frozenset(self._open.applied)
        return frozenset()

    def pushes_of(self, clock: int) -> tuple[PushId, ...]:
        """The pushes that a clock consists of, in the order of worker ids."""
        return tuple(
            PushId(member.worker, clock - member.base_clock)
            for member in self.clocks.contributors(clock)
        )

    def chunk_applied(
        self,
        chunk_index: int,
        presence: tuple[bool, ...],
        torn_worker_ids: Collection[str] = (),
    ) -> None:
        """The owner has applied a chunk; its values and this change are one."""
        clock = self._open
        assert clock is not None
        assert chunk_index in clock.applying
        clock.applying.discard(chunk_index)
        clock.applied.add(chunk_index)
        if torn_worker_ids:
            self.torn_chunk_count += len(torn_worker_ids)
            clock.torn.update(torn_worker_ids)
            self._effects.append(
                ChunkTorn(
                    clock=clock.clock,
                    chunk_index=chunk_index,
                    worker_ids=tuple(torn_worker_ids),
                )
            )
        for entry in self._entries(clock.clock).values():
            if entry.staged.pop(chunk_index, None) is not None:
                entry.applied.add(chunk_index)
        self._pump()

    # Waiting

    def await_contribution(self, worker: WorkerKey, clock: int, now_ms: int) -> None:
        """A worker has no data for its next clock; see `ContributionAwaited`.

        Raises:
            Refusal: `WORKER_INCARNATION_STALE` or `RECOVERING`; no state changed.
        """
        admitted_member(self.clocks, worker)
        self._attendance.note_idle(worker, clock, now_ms)
        self._pump()

    def withdraw_awaiting(self, worker: WorkerKey) -> None:
        """The worker's call has ended."""
        self._attendance.withdraw(worker)

    def awaited(self, now_ms: int) -> list[tuple[str, int, int]]:
        """Whom the next clock waits for: worker id, its clock, silent time in ms.

        The silent time is -1 for a worker that this shard has never heard.
        """
        clock = self.clocks.applied_clock + 1
        found = []
        for member in self.clocks.contributors(clock):
            entry = self._entry_of(member, clock)
            if entry is None or not entry.is_complete:
                silent_ms = self._attendance.silent_ms(member.worker, now_ms)
                found.append((member.worker.worker_id, clock - 1, silent_ms))
        return found

    @property
    def waiting_reason(self) -> str:
        """Why nothing is applied although contributions may be complete."""
        clock = self.clocks.applied_clock + 1
        return self._fence.waits_for or f"clock {clock} to be complete"

    # Fences

    def prepare_fence(
        self, fence_number: int, kind: FenceKind, seeder: WorkerKey | None = None
    ) -> None:
        """Stops applying and reports, for a start when the seed is complete."""
        if self._fence.prepare(fence_number, kind, seeder):
            if kind is FenceKind.START:
                self._effects.append(DiscardSeed())
            self._pump()

    def is_seeding(self, fence_number: int) -> bool:
        """Whether this fence or a newer one is open here."""
        fence = self._fence.open
        return fence is not None and fence.fence_number >= fence_number

    def check_seeder(self, worker: WorkerKey, fence_number: int) -> None:
        """Admits a seed.

        Raises:
            Refusal: `WORKER_INCARNATION_STALE` when another worker or fence is on;
                no state changed.
        """
        fence = self._fence.open
        if (
            fence is None
            or fence.fence_number != fence_number
            or fence.seeder != worker
        ):
            raise Refusal(
                ErrorReason.WORKER_INCARNATION_STALE,
                f"{worker} is not the seeder of fence {fence_number}",
            )

    def seed_chunk_staged(self, chunk_index: int) -> None:
        """The owner has staged first values."""
        if self._fence.open is not None:
            self._fence.open.seeded.add(chunk_index)
            self._pump()

    def install_record(self, record: Record) -> None:
        """Goes on under a record; older ones change nothing."""
        known = self.clocks.record
        if known is not None and record.generation <= known.generation:
            self._fence.close(record.fence_number)
            self._pump()
            return
        if known is None and record.kind is FenceKind.START:
            self._effects.append(CommitSeed())
        self.clocks.install(record)
        for departure in record.departures:
            self._settle(departure)
        self._force_skips(record.skipped_clocks)
        self._fence.close(record.fence_number)
        if self._open is not None:
            self._open.disarm()
        self._pump()

    def abort_fence(self, fence_number: int) -> None:
        """Goes on as before."""
        ended = self._fence.close(fence_number)
        if ended is not None and ended.kind is FenceKind.START:
            self._effects.append(DiscardSeed())
        self._pump()

    def decide_cut(self, fence_number: int, snapshot_id: int, clock: int) -> None:
        """Copies the state when `clock` is complete, before anything later."""
        if self._fence.decide_cut(fence_number, snapshot_id, clock):
            self._pump()

    def withdraw_cut(self, snapshot_id: int) -> None:
        """Nobody wants the image of a cut any more."""
        if self._fence.withdraw_cut(snapshot_id):
            self._pump()

    def image_copied(self, snapshot_id: int) -> None:
        """The owner has copied the state."""
        if self._fence.cut is not None and self._fence.cut.snapshot_id == snapshot_id:
            self._fence.cut = None
            self._pump()

    # Inside

    def _entry_of(self, member: Member, clock: int) -> PushEntry | None:
        window = self.dedupe.window_of(member.worker)
        return window.entries.get(clock - member.base_clock)

    def _entries(self, clock: int) -> dict[WorkerKey, PushEntry]:
        """Entries of the contributors that have sent anything, in their order."""
        found = {}
        for member in self.clocks.contributors(clock):
            entry = self._entry_of(member, clock)
            if entry is not None:
                found[member.worker] = entry
        return found

    def _is_of(self, push: PushId, clock: int) -> bool:
        return push in self.pushes_of(clock)

    def _pump(self) -> None:
        """Does all that has become possible."""
        self._report_if_quiet()
        while not self._fence.is_frozen:
            cut = self._fence.cut
            if cut is not None and self.clocks.applied_clock >= cut.clock:
                cut.is_copying = True
                self._effects.append(
                    CopyImage(
                        snapshot_id=cut.snapshot_id, clock=self.clocks.applied_clock
                    )
                )
            elif not self._advance():
                return

    def _advance(self) -> bool:
        """Works on the next clock; returns whether it is complete now."""
        number = self.clocks.applied_clock + 1
        if self.clocks.is_empty(number, self._fence.cut_clock):
            self._complete(number, Outcome.APPLIED)
            return True
        contributors = self.clocks.contributors(number)
        if not contributors:
            return False
        entries = self._entries(number)
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
            self._open.arm(entries, self._chunk_indexes)
            trailers = trailers_of(entries)
            used = source_of(self.clocks.contributors(number), trailers)
            self._effects += self._comparison.differences(number, used, trailers)
        return self._open

    def _tell_idle(
        self, clock: int, lacking: list[WorkerKey], trailers: dict[WorkerKey, Trailer]
    ) -> None:
        """Asks workers without data for their part of a clock that needs only them."""
        weighty = [trailer for trailer in trailers.values() if trailer.weight > 0]
        if not weighty or not self._attendance.are_idle(lacking, clock):
            return
        for worker in lacking:
            self._attendance.withdraw(worker)
            self._effects.append(
                ContributionAwaited(
                    worker=worker, clock=clock, optimizer=weighty[0].optimizer
                )
            )

    def _release(self, clock: OpenClock, among: tuple[int, ...] | None = None) -> None:
        """Orders the chunks that are ready to be applied."""
        if not clock.is_armed or not self._fence.admits_clock(clock.clock):
            return
        ready = clock.take_ready(among)
        if not ready:
            return
        entries = self._entries(clock.clock)
        trailers = trailers_of(entries)
        source = source_of(self.clocks.contributors(clock.clock), trailers)
        self._effects += orders_to_apply(
            clock.clock, ready, entries, source=trailers[source]
        )

    def _complete(self, clock: int, outcome: Outcome) -> None:
        pushes = self.pushes_of(clock)
        trailers = trailers_of(self._entries(clock))
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
            reply = self._reply(push, outcome, nonfinite)
            self._effects.append(Finish(push=push, reply=reply))

    def _reply(
        self, push: PushId, outcome: Outcome, nonfinite: tuple[str, ...] = ()
    ) -> Reply:
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
                self._effects.append(
                    RefusePush(push=PushId(worker, sequence), refusal=refusal)
                )
        self._attendance.forget(worker)

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
        fence = self._fence.open
        if fence is None or fence.reported or self._fence.is_copying:
            return
        is_applying = self._open is not None and bool(self._open.applying)
        is_seeded = fence.seeded == self._chunk_indexes
        if is_applying or (fence.kind is FenceKind.START and not is_seeded):
            return
        fence.reported = True
        self._effects.append(
            report_of(
                fence.fence_number,
                self.clocks,
                self.dedupe,
                open_clock=self._open,
                skipped_clock=self._skipped_clock,
            )
        )
