"""The protocol of one shard: pushes in, chunks to apply and answers out.

Pure; see the package. Values are the owner's: the core says when a chunk may be
applied and with which contributions, and hears when that has happened, so that a
chunk's state in its push changes together with its values.

Invariant: a push is part of a clock of BSP or applied by itself, as records say, and
never both; see `docs/decisions/0005-modes-by-sequence.md`.
"""

from collections.abc import Collection, Mapping

from psserver.shard.core.apply_orders import trailers_of
from psserver.shard.core.clock_table import admitted_member, check_clock
from psserver.shard.core.core_image import CoreImage
from psserver.shard.core.effects import CommitSeed, DiscardSeed, ShardEffect
from psserver.shard.core.push import PushEntry, PushId, Reply, StagedChunk, Trailer
from psserver.shard.core.push_progress import DonePush
from psserver.shard.core.shard_fence import Cut, PendingCut
from psserver.shard.core.shard_progress import ShardProgress
from psserver.shard.core.shard_state import ShardRules, ShardState
from pswire.awaited import Awaited
from pswire.membership import ClockChoice, FenceKind, Outcome, Record, WorkerKey
from pswire.reasons import ErrorReason, Refusal


class ShardCore:
    """State of one shard of a job.

    Attributes:
        state: Where the shard stands; owners only read it.
        clocks: Members and progress.
        on_shard: What is kept for each worker.
    """

    def __init__(
        self, chunk_indexes: Collection[int], rules: ShardRules | None = None
    ) -> None:
        self.state = ShardState(frozenset(chunk_indexes), rules or ShardRules())
        self._progress = ShardProgress(self.state)
        self._fence = self.state.fence
        self.clocks = self.state.clocks
        self.on_shard = self.state.on_shard

    @property
    def staleness_counts(self) -> tuple[int, ...]:
        """Pushes by staleness, from 0; the last count is for all above, too."""
        return tuple(self._progress.pushes.staleness.counts)

    @property
    def queued_push_count(self) -> int:
        """Pushes that have begun to arrive and are not done."""
        return sum(
            self.on_shard.window_of(member.worker).next_entry is not None
            for member in self.clocks.senders
        )

    def done_sequences(self) -> tuple[tuple[WorkerKey, int], ...]:
        """Of each member, its last push that is done."""
        return tuple(
            (m.worker, self.clocks.done_of(m.worker)) for m in self.clocks.members
        )

    def closed_sequence(self, worker: WorkerKey) -> int:
        """A worker's last push that is done; of one that has ended, that counts."""
        ended = self.clocks.departure_of(worker)
        return self.clocks.done_of(worker) if ended is None else ended.last_sequence

    def take_effects(self) -> list[ShardEffect]:
        """Effects since the last call, in order."""
        return self.state.take_effects()

    # Pushes

    def check_push(
        self, push: PushId, clock: int, now_ms: int, *, generation: int
    ) -> None:
        """Admits a push whose chunks come ahead of its trailer, as `open_push` would.

        Nothing of it is kept before the trailer, and its worker does not count as one
        that has data: it may yet wait for some.

        Raises:
            Refusal: As `open_push`; no state changed.
        """
        self._admitted(push, clock, generation)
        known = self.on_shard.of(push.worker)
        known.window.check_sequence(push.sequence)
        known.heard_ms = self.state.now_ms = now_ms

    def open_push(
        self,
        push: PushId,
        clock: int,
        now_ms: int,
        *,
        generation: int,
        is_last: bool = False,
    ) -> PushEntry | None:
        """Admits a push, new or sent again.

        Args:
            push: Its id.
            clock: Clock the sender thinks it completes.
            now_ms: Monotonic time.
            generation: Newest generation that the sender knows. Under an older one
                its clocks may have had other numbers.
            is_last: Whether its worker has no data for another one; see `Trailer`.

        Returns:
            Its entry, or None when it is done and was acknowledged.

        Raises:
            Refusal: `RECOVERING`, `WORKER_INCARNATION_STALE`, `MALFORMED_MESSAGE` or
                `SEQUENCE_GAP`; no state changed.
        """
        self._admitted(push, clock, generation)
        known = self.on_shard.of(push.worker)
        entry = known.window.open(push.sequence)
        self.state.now_ms = now_ms
        known.note_push(push.sequence, now_ms)
        if is_last:
            known.begin_last(now_ms)
        else:
            known.end_last(now_ms)
        self._progress.send_again(push)
        return entry

    def add_trailer(self, push: PushId, entry: PushEntry, trailer: Trailer) -> None:
        """Takes a push's trailer.

        Raises:
            Refusal: `PUSH_CONFLICT`, `CHUNK_INVALID` or `OPTIMIZER_OUT_OF_PHASE`; no
                state changed.
        """
        self._check_trailer(push, entry, trailer)
        if entry.add_trailer(trailer):
            self._progress.pump()

    def add_push(
        self,
        push: PushId,
        entry: PushEntry,
        trailer: Trailer,
        chunks: Mapping[int, StagedChunk],
    ) -> None:
        """Takes a push's trailer, and with it the chunks that went ahead of it.

        Those that the trailer leaves out were withdrawn by their sender.

        Raises:
            Refusal: `PUSH_CONFLICT`, `CHUNK_INVALID` or `OPTIMIZER_OUT_OF_PHASE`; no
                state changed.
        """
        self._check_trailer(push, entry, trailer)
        is_resend = entry.trailer is not None
        new = entry.add_push(trailer, chunks)
        for chunk_index in new if is_resend else ():
            self._progress.note_chunk(push, entry, chunk_index)
        if not is_resend:
            self._progress.pump()

    def add_chunk(
        self, push: PushId, entry: PushEntry, chunk_index: int, chunk: StagedChunk
    ) -> None:
        """Takes a chunk of a push.

        Raises:
            Refusal: `PUSH_CONFLICT` or `CHUNK_INVALID`; no state changed.
        """
        if chunk_index not in self.state.chunk_indexes:
            raise Refusal(
                ErrorReason.CHUNK_INVALID, f"chunk {chunk_index} is not on this shard"
            )
        if entry.add_chunk(chunk_index, chunk):
            self._progress.note_chunk(push, entry, chunk_index)

    def acknowledge(self, worker: WorkerKey, sequence_unacknowledged_min: int) -> None:
        """The worker has the answers to all pushes below this sequence."""
        self.on_shard.of(worker).window.acknowledge(sequence_unacknowledged_min)

    def reply_to(self, push: PushId) -> Reply | None:
        """The answer to a push that is done, None while it or its answer waits."""
        window = self.on_shard.window_of(push.worker)
        if push.sequence > window.done_sequence:
            return None
        entry = window.entries.get(push.sequence)
        outcome = window.outcome_of(push.sequence)
        if outcome not in (Outcome.DROPPED, Outcome.SKIPPED):
            outcome = Outcome.DUPLICATE
        nonfinite = entry.nonfinite_worker_ids if entry is not None else ()
        if not self._progress.admits_answer(push, DonePush(outcome, 0, nonfinite)):
            return None
        self._progress.pushes.note_values(push.worker)
        return self.state.reply(push, outcome, nonfinite=nonfinite)

    def applied_chunks(self, push: PushId) -> frozenset[int]:
        """Chunks whose values already hold this push, or its clock's update."""
        return self._progress.applied_chunks(push)

    def pushes_of(self, clock: int) -> tuple[PushId, ...]:
        """The pushes that a clock of BSP consists of, in the order of worker ids."""
        return self._progress.clocks.counted_pushes_of(clock)

    def chunk_applied(
        self, chunk_index: int, torn_worker_ids: Collection[str] = ()
    ) -> None:
        """The owner has applied a chunk; its values and this change are one."""
        self._progress.chunk_applied(chunk_index, torn_worker_ids)

    def clock_measured(
        self,
        choice: ClockChoice,
        sum_of_squares: float,
        products: tuple[float, ...] = (),
    ) -> None:
        """The owner has measured a clock; others may contribute to it by now."""
        measure = self._progress.clocks.commits.measure
        measure.note(choice, sum_of_squares, products)
        self._progress.pump()

    # Two-phase steps

    def commit(self, worker: WorkerKey, choice: ClockChoice) -> bool:
        """A driver says that every shard holds all of a clock. Not while frozen.

        Returns:
            Whether it is committed; False when its contributors have changed, which
            then hear `staged` again.

        Raises:
            Refusal: `WORKER_INCARNATION_STALE`, `RECOVERING`, or `MALFORMED_MESSAGE`
                for a gradient scale that can't be; no state changed.
        """
        assert not self.is_frozen
        member = admitted_member(self.clocks, worker)
        is_committed = self._progress.commit(member, choice)
        self._progress.pump()
        return is_committed

    def ready(self, worker: WorkerKey, sequence: int, now_ms: int) -> None:
        """Every shard holds all of a worker's push, where not all may count.

        Raises:
            Refusal: `WORKER_INCARNATION_STALE` or `RECOVERING`; no state changed.
        """
        admitted_member(self.clocks, worker)
        self.state.now_ms = now_ms
        self._progress.clocks.commits.note_ready(worker, sequence)
        self._progress.pump()

    def wake(self, now_ms: int) -> None:
        """The time has come for which `WakeAt` has asked."""
        self.state.now_ms = now_ms
        self._progress.clocks.commits.wake()
        self._progress.pump()

    def choice_for(self, worker: WorkerKey, sequence: int) -> ClockChoice | None:
        """Whose pushes count for the clock of a push; None while not chosen.

        Without contributors when the clock is closed already, or needs everybody: the
        mode may have changed since the worker has asked.
        """
        member = admitted_member(self.clocks, worker)
        clock = member.clock_of(sequence)
        chosen = self._progress.clocks.commits.chosen
        if chosen is not None and chosen.clock == clock:
            return chosen
        is_done = sequence <= self.on_shard.window_of(worker).done_sequence
        if is_done or not self.state.closes_early(clock):
            return ClockChoice(clock, ())
        return None

    # Values

    def admits_pull(self, worker: WorkerKey, clock: int) -> bool:
        """Whether values may be sent to a member at a clock now."""
        return self._progress.pushes.admits_pull(clock)

    def pull_reply(
        self, worker: WorkerKey, clock: int, *, is_part: bool = False
    ) -> Reply:
        """The answer to a pull: the worker is sent the values as they are now.

        Args:
            worker: Who pulls.
            clock: Clock that they have reached.
            is_part: Whether it is sent a few, which an earlier answer has named:
                staleness goes on counting from that.
        """
        if not is_part:
            self._progress.pushes.note_values(worker)
        return self.state.answer(clock, Outcome.APPLIED)

    def admits_values(self, push: PushId) -> bool:
        """Whether values may be sent before a push in SSP or ASP is done.

        If so they are: staleness counts from the first of them.
        """
        member = self.clocks.member_of(push.worker)
        if member is None or not self.clocks.is_streamed(member, push.sequence):
            return False
        pushes = self._progress.pushes
        is_admitted = pushes.admits_pull(member.clock_of(push.sequence))
        if is_admitted and push.sequence > self.clocks.done_of(push.worker):
            pushes.staleness.note_first_values(push.worker)
        return is_admitted

    # Waiting

    def await_contribution(self, worker: WorkerKey, sequence: int, now_ms: int) -> None:
        """A worker has no data for its next push; see `ContributionAwaited`.

        Raises:
            Refusal: `WORKER_INCARNATION_STALE` or `RECOVERING`; no state changed.
        """
        admitted_member(self.clocks, worker)
        known = self.on_shard.of(worker)
        known.heard_ms, known.idle_sequence = now_ms, sequence
        self.state.now_ms = now_ms
        self._progress.pump()

    def withdraw_awaiting(self, worker: WorkerKey) -> None:
        """The worker's call has ended."""
        self.on_shard.of(worker).idle_sequence = 0

    def note_done(self, worker: WorkerKey, now_ms: int) -> None:
        """A push of the worker is done, so that it goes on with its next step."""
        if self.clocks.member_of(worker) is not None:
            self.on_shard.of(worker).heard_ms = now_ms

    def note_lost(self, lost_ms: Mapping[WorkerKey, int], now_ms: int) -> None:
        """The coordinator says of which members it has no sign of life.

        Args:
            lost_ms: Time since the last one, `NOT_KNOWN` if it can't say. All others
                are alive.
            now_ms: Monotonic time.
        """
        self.on_shard.note_lost(lost_ms, now_ms)

    def awaited(self, now_ms: int) -> list[Awaited]:
        """Whom this shard waits for.

        Who has no data waits itself for others, and is named only among its like.
        """
        members = self._progress.awaited()
        busy = [m for m in members if not self.on_shard.of(m.worker).idle_sequence]
        return [
            Awaited(
                member.worker.worker_id,
                self.clocks.clock_of(member),
                self.on_shard.of(member.worker).step_ms(now_ms),
                self.on_shard.lost_ms(member.worker, now_ms),
            )
            for member in busy or members
        ]

    @property
    def is_frozen(self) -> bool:
        """Whether applying, committing and acknowledging must wait."""
        return self._fence.is_frozen

    @property
    def waiting_reason(self) -> str:
        """Why nothing is applied although contributions may be complete."""
        return self._fence.waits_for or self._progress.waits_for

    # Fences

    def prepare_fence(
        self,
        fence_number: int,
        kind: FenceKind,
        seeder: WorkerKey | None = None,
        evicting: Collection[WorkerKey] = (),
        *,
        loads: bool = False,
    ) -> None:
        """Stops applying and reports, for a start when the seed is complete.

        Args:
            fence_number: Number of the fence.
            kind: What it is for.
            seeder: For a start, whose values count.
            evicting: Workers whose data is to be reported.
            loads: Whether the values of a start are those of a checkpoint.
        """
        if self._fence.prepare(
            fence_number, kind, seeder=seeder, evicting=tuple(evicting), loads=loads
        ):
            if kind is FenceKind.START:
                self.state.effects.append(DiscardSeed())
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

    def is_open(self, fence_number: int) -> bool:
        """Whether this fence is open here."""
        fence = self._fence.open
        return fence is not None and fence.fence_number == fence_number

    def core_loaded(self, fence_number: int, image: CoreImage) -> None:
        """The owner has what goes with the values of a checkpoint."""
        if self._fence.open is not None and self.is_open(fence_number):
            self._fence.open.core = image
            self._progress.pump()

    def fail_load(self, fence_number: int, reason: str) -> None:
        """The owner can't load a checkpoint."""
        if self._fence.open is not None and self.is_open(fence_number):
            self._fence.open.failure = reason
            self._progress.pump()

    def take_measure_key(self, key: bytes) -> None:
        """Proves by this key, from now on, what is measured here."""
        self.state.measure_key = key

    def install_record(self, record: Record) -> None:
        """Goes on under a record; older ones change nothing."""
        known = self.clocks.record
        if known is None or record.generation > known.generation:
            if known is None and record.kind is FenceKind.START:
                self.state.effects.append(CommitSeed())
                if self._fence.open is not None and self._fence.open.core is not None:
                    self.state.resume(self._fence.open.core)
            self._progress.install(record)
        self._fence.close(record.fence_number)
        self._progress.pump()

    def abort_fence(
        self, fence_number: int, batch_floors: Mapping[WorkerKey, int] | None = None
    ) -> None:
        """Goes on as before, but for pushes that begin a batch beyond these floors."""
        ended = self._fence.close(fence_number)
        if ended is not None:
            self._fence.batch_floors = batch_floors or {}
        if ended is not None and ended.kind is FenceKind.START:
            self.state.effects.append(DiscardSeed())
        self._progress.pump()

    def decide_cut(self, fence_number: int, cut: Cut) -> None:
        """Has the state copied when all that is in the cut is applied, and no more."""
        pending = PendingCut(cut, is_streamed=not self.clocks.is_clocked)
        if self._fence.decide_cut(fence_number, pending):
            self._progress.pump()

    def withdraw_cut(self, snapshot_id: int) -> None:
        """Nobody wants the image of a cut any more."""
        if self._fence.withdraw_cut(snapshot_id):
            self._progress.pump()

    def coordinator_lost(self) -> None:
        """Whoever waits for all to be between two batches may be gone."""
        if self._fence.batch_floors:
            self._fence.batch_floors = {}
            self._progress.pump()

    def set_orphaned(self, is_orphaned: bool) -> None:
        """The coordinator has been silent for a lease, or is heard again."""
        if self._fence.is_orphaned is not is_orphaned:
            self._fence.is_orphaned = is_orphaned
            self._progress.pump()

    # Inside

    def _admitted(self, push: PushId, clock: int, generation: int) -> None:
        member = admitted_member(self.clocks, push.worker, push.sequence)
        self._progress.check_answerable(push, member)
        record = self.clocks.record
        if record is not None and generation == record.generation:
            check_clock(member, push, clock)

    def _check_trailer(self, push: PushId, entry: PushEntry, trailer: Trailer) -> None:
        extra = trailer.chunk_indexes - self.state.chunk_indexes
        if extra:
            raise Refusal(
                ErrorReason.CHUNK_INVALID, f"chunk {min(extra)} is not on this shard"
            )
        member = admitted_member(self.clocks, push.worker, push.sequence)
        is_streamed = self.clocks.is_streamed(member, push.sequence)
        if entry.trailer is None and entry.outcome is None and not is_streamed:
            clock = member.clock_of(push.sequence)
            others = trailers_of(self._progress.clocks.entries(clock))
            # It is not known who jumped; or most say what the clock does, and nobody
            # who says another thing ends the scripts of the others.
            is_robust = self.state.rules.update.aggregation.is_robust
            is_open = is_robust or self.state.closes_early(clock)
            in_phase = () if is_open else self.clocks.in_phase(member, clock)
            check_phase(push, trailer, others, in_phase)


def check_phase(
    push: PushId,
    trailer: Trailer,
    others: Mapping[WorkerKey, Trailer],
    in_phase: Collection[WorkerKey],
) -> None:
    """Checks that all pushes of a clock that have weight are of one kind.

    They name one optimizer, and all are steps of it or all publish values. What a
    worker pushes at another place of its script is left out when the clock is applied.

    Args:
        push: Whose trailer it is.
        trailer: What has come.
        others: Trailers of the clock that are in.
        in_phase: Workers that are at the same place of the script as its own.

    Raises:
        Refusal: `OPTIMIZER_OUT_OF_PHASE`, with who pushed what.
    """
    if trailer.weight == 0:
        return
    for other, theirs in others.items():
        if theirs.weight > 0 and theirs.optimizer != trailer.optimizer:
            raise Refusal(
                ErrorReason.OPTIMIZER_OUT_OF_PHASE,
                f"{push.worker} pushed for optimizer {trailer.optimizer[:64]!r} in the "
                f"clock for which {other} pushed for {theirs.optimizer[:64]!r}",
            )
        is_other = theirs.publishes is not trailer.publishes
        if theirs.weight > 0 and is_other and other in in_phase:
            publisher, stepper = (
                (push.worker, other) if trailer.publishes else (other, push.worker)
            )
            raise Refusal(
                ErrorReason.OPTIMIZER_OUT_OF_PHASE,
                f"{publisher} publishes values in the clock in which {stepper} steps: "
                "all workers of a script publish at the same place",
            )
