"""The protocol of one shard: pushes in, chunks to apply and answers out.

Pure; see the package. Values are the owner's: the core says when a chunk may be
applied and with which contributions, and is told when that has happened, so that a
chunk's state in the dedupe table changes together with its values.

Invariant: clocks complete in order, one at a time; the update of a clock is over the
contributors that records name, summed in the order of worker ids.
"""

from collections.abc import Collection

from psserver.core.aggregate import OpenClock
from psserver.core.clock_table import ClockTable
from psserver.core.dedupe import DedupeTable, PushEntry
from psserver.core.effects import (
    ApplyChunk,
    ChunkTorn,
    CommitSeed,
    ContributionAwaited,
    CopyImage,
    DiscardSeed,
    FenceReport,
    Finish,
    HyperparametersDiffer,
    ShardEffect,
    StagedContribution,
    WorkerHolding,
)
from psserver.core.push import Outcome, PushId, Reply, StagedChunk, Trailer
from psserver.core.record import FenceKind, Member, Record, WorkerKey
from psserver.core.shard_fence import ShardFence
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
        self._last_skip = 0
        self._idle: dict[WorkerKey, int] = {}
        self._heard_ms: dict[WorkerKey, int] = {}
        self._warned: set[tuple[WorkerKey, WorkerKey]] = set()
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
        member = self._admitted_member(push.worker, push.sequence)
        if clock != member.base_clock + push.sequence:
            raise Refusal(
                ErrorReason.MALFORMED_MESSAGE,
                f"push {push.sequence} of {push.worker} is of clock "
                f"{member.base_clock + push.sequence}, the header says {clock}",
            )
        entry = self.dedupe.open(push.worker, push.sequence)
        self._heard_ms[push.worker] = now_ms
        self._idle.pop(push.worker, None)
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
        if entry.trailer is None:
            self._check_phase(push, trailer)
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
        window = self.dedupe.window(push.worker)
        if push.sequence > window.done_sequence:
            return None
        return self._reply(push, Outcome.DUPLICATE)

    def applied_chunks(self, push: PushId) -> frozenset[int]:
        """Chunks whose values already hold this push, or its clock's update."""
        if push.sequence <= self.dedupe.window(push.worker).done_sequence:
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
        self._admitted_member(worker, None)
        self._heard_ms[worker] = now_ms
        self._idle[worker] = clock
        self._pump()

    def withdraw_awaiting(self, worker: WorkerKey) -> None:
        """The worker's call has ended."""
        self._idle.pop(worker, None)

    def awaited(self, now_ms: int) -> list[tuple[str, int, int]]:
        """Whom the next clock waits for: worker id, its clock, silent time in ms.

        The silent time is -1 for a worker that this shard has never heard.
        """
        clock = self.clocks.applied_clock + 1
        found = []
        for member in self.clocks.contributors(clock):
            entry = self._entry_of(member, clock)
            if entry is None or not entry.is_complete:
                heard = self._heard_ms.get(member.worker)
                silent = -1 if heard is None else now_ms - heard
                found.append((member.worker.worker_id, clock - 1, silent))
        return found

    @property
    def waiting_reason(self) -> str:
        """Why nothing is applied although contributions may be complete."""
        if self._fence.open is not None:
            kind = self._fence.open.kind.name.lower()
            return f"fence {self._fence.open.fence_number} ({kind}) to be decided"
        if self._fence.cut is not None and self._fence.cut.is_copying:
            return "a snapshot to be copied"
        return f"clock {self.clocks.applied_clock + 1} to be complete"

    # Fences

    def prepare_fence(
        self, fence_number: int, kind: FenceKind, seeder: WorkerKey | None = None
    ) -> None:
        """Stops applying and reports, for a start when the seed is complete."""
        if self._fence.cut is not None and not self._fence.cut.is_copying:
            self._fence.cut = None  # a cut yields to any other fence
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
        self._forced_skips.update(record.skipped_clocks)
        for departure in record.departures:
            self._settle(departure.member, departure.last_clock)
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

    def image_copied(self, snapshot_id: int) -> None:
        """The owner has copied the state."""
        if self._fence.cut is not None and self._fence.cut.snapshot_id == snapshot_id:
            self._fence.cut = None
            self._pump()

    # Inside

    def _admitted_member(self, worker: WorkerKey, sequence: int | None) -> Member:
        if self.clocks.record is None:
            raise Refusal(
                ErrorReason.RECOVERING, "the shard has no record to work under yet"
            )
        member = self.clocks.member_of(worker)
        if member is not None:
            return member
        departure = self.clocks.departure_of(worker)
        if departure is not None and sequence is not None:
            last = departure.last_clock - departure.member.base_clock
            if sequence <= last:
                return departure.member
            raise Refusal(
                ErrorReason.WORKER_INCARNATION_STALE,
                f"{worker} was closed at push {last}",
                sequence_closed=last,
            )
        raise Refusal(
            ErrorReason.WORKER_INCARNATION_STALE,
            f"{worker} is not a member of generation {self.clocks.record.generation}",
        )

    def _check_phase(self, push: PushId, trailer: Trailer) -> None:
        member = self._admitted_member(push.worker, push.sequence)
        if trailer.weight == 0:
            return
        for other, entry in self._entries(member.base_clock + push.sequence).items():
            mine = entry.trailer
            if mine and mine.weight > 0 and mine.optimizer != trailer.optimizer:
                raise Refusal(
                    ErrorReason.OPTIMIZER_OUT_OF_PHASE,
                    f"{push.worker} pushed for optimizer {trailer.optimizer[:64]!r} at "
                    f"clock {member.base_clock + push.sequence}, {other} for "
                    f"{mine.optimizer[:64]!r}",
                )

    def _entry_of(self, member: Member, clock: int) -> PushEntry | None:
        window = self.dedupe.window(member.worker)
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
        if self._report_if_quiet():
            return
        while not self._fence.is_frozen:
            cut = self._fence.cut
            if cut is not None and self.clocks.applied_clock >= cut.clock:
                if not self._is_applying:
                    cut.is_copying = True
                    self._effects.append(
                        CopyImage(
                            snapshot_id=cut.snapshot_id, clock=self.clocks.applied_clock
                        )
                    )
                return
            if not self._advance():
                return

    @property
    def _is_applying(self) -> bool:
        return self._open is not None and bool(self._open.applying)

    def _advance(self) -> bool:
        """Works on the next clock; returns whether it is complete now."""
        number = self.clocks.applied_clock + 1
        contributors = self.clocks.contributors(number)
        if not contributors or not self._fence.admits_clock(number):
            return False
        entries = self._entries(number)
        if number in self._forced_skips:
            self._complete(number, Outcome.SKIPPED)
            return True
        lacking = [
            m
            for m in contributors
            if m.worker not in entries or entries[m.worker].trailer is None
        ]
        if lacking:
            self._tell_idle(number, lacking, entries)
            return False
        if any(e.trailer and not e.trailer.finite for e in entries.values()):
            self._complete(number, Outcome.SKIPPED)
            return True
        if self._open is None:
            self._open = OpenClock(number)
        if not self._open.is_armed:
            self._open.arm(entries, self._chunk_indexes)
            self._warn_of_differences(number, contributors, entries)
        self._release(self._open)
        if not self._open.is_done:
            return False
        self._complete(number, Outcome.APPLIED)
        return True

    def _tell_idle(
        self, clock: int, lacking: list[Member], entries: dict[WorkerKey, PushEntry]
    ) -> None:
        weighty = [
            e.trailer for e in entries.values() if e.trailer and e.trailer.weight
        ]
        if not weighty:
            return
        if all(self._idle.get(member.worker) == clock for member in lacking):
            for member in lacking:
                del self._idle[member.worker]
                self._effects.append(
                    ContributionAwaited(
                        worker=member.worker,
                        clock=clock,
                        optimizer=weighty[0].optimizer,
                    )
                )

    def _release(self, clock: OpenClock, among: tuple[int, ...] | None = None) -> None:
        if not clock.is_armed or not self._fence.admits_clock(clock.clock):
            return
        ready = clock.take_ready(among)
        if not ready:
            return
        contributors = self.clocks.contributors(clock.clock)
        entries = self._entries(clock.clock)
        trailers = {
            worker: entry.trailer for worker, entry in entries.items() if entry.trailer
        }
        source = trailers[self._source(contributors, trailers)]
        total_weight = sum(trailer.weight for trailer in trailers.values())
        for index in ready:
            self._effects.append(
                ApplyChunk(
                    clock=clock.clock,
                    chunk_index=index,
                    optimizer=source.optimizer,
                    contributions=tuple(
                        StagedContribution(
                            worker_id=worker.worker_id,
                            weight=trailers[worker].weight,
                            presence=entry.staged[index].presence,
                            payload=entry.staged[index].payload,
                            loss_scale=trailers[worker].loss_scale,
                        )
                        for worker, entry in entries.items()
                        if trailers[worker].weight > 0 and index in entry.staged
                    ),
                    total_weight=total_weight,
                    hyperparameters=source.hyperparameters,
                )
            )

    def _source(
        self, contributors: tuple[Member, ...], trailers: dict[WorkerKey, Trailer]
    ) -> WorkerKey:
        """Whose hyperparameters count: the longest contributor that has weight."""
        weighty = tuple(m for m in contributors if trailers[m.worker].weight > 0)
        return self.clocks.longest(weighty or contributors).worker

    def _warn_of_differences(
        self,
        clock: int,
        contributors: tuple[Member, ...],
        entries: dict[WorkerKey, PushEntry],
    ) -> None:
        trailers = {w: e.trailer for w, e in entries.items() if e.trailer}
        used = self._source(contributors, trailers)
        for other, trailer in trailers.items():
            if trailer.weight == 0 or (used, other) in self._warned:
                continue
            pairs = zip(
                trailers[used].hyperparameters, trailer.hyperparameters, strict=False
            )
            for group, (mine, theirs) in enumerate(pairs):
                if mine != theirs:
                    self._warned.add((used, other))
                    self._effects.append(
                        HyperparametersDiffer(
                            clock=clock,
                            used=used,
                            other=other,
                            group=group,
                            values=(mine, theirs),
                        )
                    )
                    break

    def _complete(self, clock: int, outcome: Outcome) -> None:
        pushes = self.pushes_of(clock)
        nonfinite = tuple(
            worker.worker_id
            for worker, entry in self._entries(clock).items()
            if entry.trailer and not entry.trailer.finite
        )
        self.clocks.applied_clock = clock
        self._open = None
        self._forced_skips.discard(clock)
        if outcome is Outcome.SKIPPED:
            self._last_skip = clock
        for push in pushes:
            self.dedupe.finish(push.worker, push.sequence, outcome)
            reply = self._reply(push, outcome, nonfinite)
            self._effects.append(Finish(push=push, reply=reply))

    def _reply(
        self, push: PushId, outcome: Outcome, nonfinite: tuple[str, ...] = ()
    ) -> Reply:
        record = self.clocks.record
        assert record is not None
        member = self._admitted_member(push.worker, push.sequence)
        return Reply(
            outcome=outcome,
            generation=record.generation,
            version=self.clocks.version,
            frontier=self.clocks.frontier,
            clock=member.base_clock + push.sequence,
            nonfinite_worker_ids=nonfinite,
        )

    def _settle(self, member: Member, last_clock: int) -> None:
        """Throws away what a member sent beyond its last clock."""
        window = self.dedupe.window(member.worker)
        for sequence in list(window.entries):
            if member.base_clock + sequence > last_clock:
                entry = window.entries.pop(sequence)
                if entry.applied:
                    self.torn_step_count += 1
        self._idle.pop(member.worker, None)

    def _report_if_quiet(self) -> bool:
        """Reports to the open fence when nothing is being applied any more."""
        fence = self._fence.open
        if fence is None:
            return False
        copying = self._fence.cut is not None and self._fence.cut.is_copying
        seeding = fence.kind is FenceKind.START and fence.seeded != self._chunk_indexes
        if not fence.reported and not self._is_applying and not copying and not seeding:
            fence.reported = True
            self._effects.append(self._report(fence.fence_number))
        return True

    def _report(self, fence_number: int) -> FenceReport:
        record = self.clocks.record
        members = record.members if record is not None else ()
        applied = self.clocks.applied_clock
        trailer_max = touched_max = applied
        skips = {self._last_skip} if self._last_skip == applied and applied else set()
        holdings = []
        for member in members:
            window = self.dedupe.window(member.worker)
            complete = member.base_clock + window.done_sequence
            for sequence, entry in window.entries.items():
                clock = member.base_clock + sequence
                if sequence <= window.done_sequence or entry.trailer is None:
                    continue
                trailer_max = max(trailer_max, clock)
                if entry.applied:
                    touched_max = max(touched_max, clock)
                if entry.is_complete:
                    complete = max(complete, clock)
                if not entry.trailer.finite:
                    skips.add(clock)
            holdings.append(
                WorkerHolding(worker=member.worker, complete_clock=complete)
            )
        return FenceReport(
            fence_number=fence_number,
            holdings=tuple(holdings),
            trailer_clock_max=trailer_max,
            touched_clock_max=touched_max,
            applied_clock=applied,
            skip_clocks=tuple(sorted(skips)),
        )
