"""The protocol of one shard: pushes in, chunks to apply and answers out.

Pure; see the package. Values are the owner's: the core says when a chunk may be
applied and with which contributions, and is told when that has happened, so that a
chunk's state in the dedupe table changes together with its values.

Invariant: clocks complete in order, one at a time; the update of a clock is over the
contributors that records name, summed in the order of worker ids.
"""

from collections.abc import Collection

from psserver.core.admission import admitted_member, check_clock, check_phase
from psserver.core.dedupe import PushEntry
from psserver.core.effects import CommitSeed, DiscardSeed, ShardEffect
from psserver.core.progress import ClockProgress
from psserver.core.push import Outcome, PushId, Reply, StagedChunk, Trailer
from psserver.core.record import FenceKind, Record, WorkerKey
from psserver.core.release import trailers_of
from pswire.reasons import ErrorReason, Refusal


class ShardCore:
    """State of one shard of a BSP job.

    Attributes:
        clocks: Members and progress.
        dedupe: What is remembered of pushes.
    """

    def __init__(self, chunk_indexes: Collection[int]) -> None:
        self._progress = ClockProgress(chunk_indexes)
        self._fence = self._progress.fence
        self._attendance = self._progress.attendance
        self.clocks = self._progress.clocks
        self.dedupe = self._progress.dedupe

    @property
    def torn_step_count(self) -> int:
        """Steps of evicted workers of which a part was applied."""
        return self._progress.torn_step_count

    @property
    def torn_chunk_count(self) -> int:
        """Chunks that contradicted their worker's verdict."""
        return self._progress.torn_chunk_count

    def take_effects(self) -> list[ShardEffect]:
        """Effects since the last call, in order."""
        return self._progress.take_effects()

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
        extra = trailer.chunk_indexes - self._progress.chunk_indexes
        if extra:
            raise Refusal(
                ErrorReason.CHUNK_INVALID, f"chunk {min(extra)} is not on this shard"
            )
        member = admitted_member(self.clocks, push.worker, push.sequence)
        if entry.trailer is None and entry.outcome is None:
            others = trailers_of(
                self._progress.entries(member.base_clock + push.sequence)
            )
            check_phase(push, trailer, others)
        if self.dedupe.add_trailer(entry, trailer):
            self._progress.pump()

    def add_chunk(
        self, push: PushId, entry: PushEntry, chunk_index: int, chunk: StagedChunk
    ) -> None:
        """Takes a chunk of a push.

        Raises:
            Refusal: `PUSH_CONFLICT` or `CHUNK_INVALID`; no state changed.
        """
        if chunk_index not in self._progress.chunk_indexes:
            raise Refusal(
                ErrorReason.CHUNK_INVALID, f"chunk {chunk_index} is not on this shard"
            )
        if self.dedupe.add_chunk(entry, chunk_index, chunk):
            self._progress.note_chunk(push, chunk_index)

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
            return self._progress.reply(
                push, Outcome.SKIPPED, entry.nonfinite_worker_ids
            )
        return self._progress.reply(push, Outcome.DUPLICATE)

    def applied_chunks(self, push: PushId) -> frozenset[int]:
        """Chunks whose values already hold this push, or its clock's update."""
        return self._progress.applied_chunks(push)

    def pushes_of(self, clock: int) -> tuple[PushId, ...]:
        """The pushes that a clock consists of, in the order of worker ids."""
        return self._progress.pushes_of(clock)

    def chunk_applied(
        self, chunk_index: int, torn_worker_ids: Collection[str] = ()
    ) -> None:
        """The owner has applied a chunk; its values and this change are one."""
        self._progress.chunk_applied(chunk_index, torn_worker_ids)

    # Waiting

    def await_contribution(self, worker: WorkerKey, clock: int, now_ms: int) -> None:
        """A worker has no data for its next clock; see `ContributionAwaited`.

        Raises:
            Refusal: `WORKER_INCARNATION_STALE` or `RECOVERING`; no state changed.
        """
        admitted_member(self.clocks, worker)
        self._attendance.note_idle(worker, clock, now_ms)
        self._progress.pump()

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
            entry = self._progress.entry_of(member, clock)
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
                self._progress.effects.append(DiscardSeed())
            self._progress.pump()

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
            self._progress.pump()

    def install_record(self, record: Record) -> None:
        """Goes on under a record; older ones change nothing."""
        known = self.clocks.record
        if known is not None and record.generation <= known.generation:
            self._fence.close(record.fence_number)
            self._progress.pump()
            return
        if known is None and record.kind is FenceKind.START:
            self._progress.effects.append(CommitSeed())
        self._progress.install(record)
        self._fence.close(record.fence_number)
        self._progress.pump()

    def abort_fence(self, fence_number: int) -> None:
        """Goes on as before."""
        ended = self._fence.close(fence_number)
        if ended is not None and ended.kind is FenceKind.START:
            self._progress.effects.append(DiscardSeed())
        self._progress.pump()

    def decide_cut(self, fence_number: int, snapshot_id: int, clock: int) -> None:
        """Copies the state when `clock` is complete, before anything later."""
        if self._fence.decide_cut(fence_number, snapshot_id, clock):
            self._progress.pump()

    def withdraw_cut(self, snapshot_id: int) -> None:
        """Nobody wants the image of a cut any more."""
        if self._fence.withdraw_cut(snapshot_id):
            self._progress.pump()

    def image_copied(self, snapshot_id: int) -> None:
        """The owner has copied the state."""
        if self._fence.cut is not None and self._fence.cut.snapshot_id == snapshot_id:
            self._fence.cut = None
            self._progress.pump()
