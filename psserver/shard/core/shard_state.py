"""What both ways of applying pushes share: members, pushes, fences, answers."""

from dataclasses import dataclass, field, replace

from psserver.shard.core.apply_orders import HyperparameterComparison
from psserver.shard.core.clock_table import ClockTable
from psserver.shard.core.core_image import CoreImage
from psserver.shard.core.effects import (
    ChunkTorn,
    Finish,
    LoadState,
    PushDone,
    ShardEffect,
)
from psserver.shard.core.member_on_shard import MemberOnShard, MembersOnShard
from psserver.shard.core.push import PushEntry, PushId, Reply, Trailer
from psserver.shard.core.shard_fence import ShardFence
from pswire.aggregation import UpdateRules
from pswire.membership import ClockChoice, Member, Outcome, StepAtomicity, WorkerKey

PACE_COUNT_MIN = 2
"""Pushes in a row with a step of a scheduler between them and the ones before, which
show that it is stepped with each push and not with each epoch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardRules:
    """Fixed for the life of a job.

    Attributes:
        step_atomicity: Whether a chunk is applied as soon as its contributions are
            complete, or only after a commit.
        backup_worker_count: In BSP, workers that a clock need not wait for. Needs
            two-phase steps.
        is_first: Whether this is shard 0, which chooses with backup workers.
        shard_index: Which shard this is.
        shard_count: Shards of the job.
        update: How pushes become updates. What a clock of BSP measures is known only
            when all of it is there, on every shard.
    """

    step_atomicity: StepAtomicity = StepAtomicity.CHUNK
    backup_worker_count: int = 0
    is_first: bool = False
    shard_index: int = 0
    shard_count: int = 1
    update: UpdateRules = field(default_factory=UpdateRules)

    @property
    def has_two_phase_clocks(self) -> bool:
        """Whether nothing of a clock of BSP is applied before a commit."""
        return self.update.is_measured or self.has_two_phase_pushes

    @property
    def has_two_phase_pushes(self) -> bool:
        """Whether, in SSP and ASP too, nothing is applied before a commit."""
        return self.step_atomicity is StepAtomicity.CLOCK

    @property
    def has_backups(self) -> bool:
        """Whether a clock may close without some of its contributors."""
        return self.backup_worker_count > 0


class ShardState:
    """Where a shard stands.

    Attributes:
        rules: When pushes are applied.
        chunk_indexes: Chunks of this shard.
        on_shard: What is kept for each worker.
        clocks: Members and progress.
        fence: Fences as this shard sees them.
        comparison: Workers whose hyperparameters differ.
        effects: What the owner is to do, in order.
        used: By optimizer, the trailer whose settings the newest update had.
        paces: By optimizer, of each scheduler how many pushes in a row had one step
            between them and the one before.
        committed: With two-phase steps, the newest clock or push that was committed.
        now_ms: Monotonic time, as of the newest event that came with one.
        measure_key: Key by which shards prove what they have measured.
        torn_step_count: Steps of evicted workers of which a part was applied.
    """

    def __init__(self, chunk_indexes: frozenset[int], rules: ShardRules) -> None:
        self.rules = rules
        self.chunk_indexes = chunk_indexes
        self.on_shard = MembersOnShard()
        self.clocks = ClockTable(self.on_shard)
        self.fence = ShardFence()
        self.comparison = HyperparameterComparison(self.on_shard)
        self.effects: list[ShardEffect] = []
        self.used: dict[str, Trailer] = {}
        self.paces: dict[str, tuple[int, ...]] = {}
        self._resumed: set[str] = set()
        self.committed: ClockChoice | None = None
        self.now_ms = 0
        self.measure_key = b""
        self.torn_step_count = 0

    def closes_early(self, clock: int) -> bool:
        """Whether a clock may close without some of its contributors."""
        has_quorum = self.clocks.has_quorum(clock)
        return has_quorum or self.rules.has_backups

    def is_two_phase(self, clock: int) -> bool:
        """Whether nothing of a clock is applied before a commit.

        Where it may close without some, since nothing that is applied of an open clock
        can be taken back.
        """
        return self.rules.has_two_phase_clocks or self.clocks.has_quorum(clock)

    @property
    def has_two_phase_clocks(self) -> bool:
        """Whether clocks that are open, or come, are so."""
        number = self.clocks.applied_clock + 1
        is_now = self.rules.has_two_phase_clocks or self.clocks.mode.rules.has_quorum
        return is_now or self.clocks.has_quorum(number)

    def take_effects(self) -> list[ShardEffect]:
        """Effects since the last call, in order."""
        taken, self.effects = self.effects, []
        return taken

    def known_member(self, worker: WorkerKey) -> Member | None:
        """A worker's place in the job, be it that it has ended."""
        member = self.clocks.member_of(worker)
        if member is not None:
            return member
        ended = self.clocks.departure_of(worker)
        return ended.member if ended is not None else None

    def of(self, worker: WorkerKey) -> MemberOnShard:
        """What is kept for a worker."""
        return self.on_shard.of(worker)

    def entry_of(self, push: PushId) -> PushEntry | None:
        """A push, if anything of it is here."""
        return self.on_shard.entry_of(push)

    def reply(
        self,
        push: PushId,
        outcome: Outcome,
        *,
        staleness: int = 0,
        nonfinite: tuple[str, ...] = (),
    ) -> Reply:
        """The answer to a push, as this shard stands now."""
        member = self.known_member(push.worker)
        assert member is not None
        clock = member.clock_of(push.sequence)
        if outcome is Outcome.DROPPED:
            clock = max(clock, self.clocks.applied_clock)
        entry = self.entry_of(push)
        return self.answer(
            clock,
            outcome,
            staleness=staleness,
            nonfinite=nonfinite,
            closed_sequence=self.clocks.done_of(push.worker),
            grad_norm=None if entry is None else entry.grad_norm,
            gradient_factor=1.0 if entry is None else entry.gradient_factor,
        )

    def answer(
        self,
        clock: int,
        outcome: Outcome,
        *,
        staleness: int = 0,
        nonfinite: tuple[str, ...] = (),
        closed_sequence: int = 0,
        grad_norm: float | None = None,
        gradient_factor: float = 1.0,
    ) -> Reply:
        """An answer to a member at a clock, as this shard stands now."""
        record = self.clocks.record
        assert record is not None
        return Reply(
            outcome=outcome,
            generation=record.generation,
            version=self.clocks.version,
            frontier=self.clocks.frontier,
            clock=clock,
            staleness=staleness,
            mode=record.mode,
            staleness_bound=record.mode.rules.bound_of(record.staleness_bound),
            nonfinite_worker_ids=nonfinite,
            closed_sequence=closed_sequence,
            grad_norm=grad_norm,
            gradient_factor=gradient_factor,
        )

    def settle(self, push: PushId, trailer: Trailer) -> None:
        """A push's trailer is the one whose settings an update has, or would have.

        State that it brings is loaded even when the update is skipped or empty, as in
        one process.
        """
        before = self.used.get(trailer.optimizer)
        self.used[trailer.optimizer] = trailer
        if trailer.scheduler_steps:
            self._note_pace(before, trailer)
        if trailer.loads_state:
            self.load(push, trailer)

    def settings_of_next(self) -> dict[str, Trailer]:
        """By optimizer, `used` with the steps of schedulers that its next push has.

        One more of each that is stepped with every push, as the last ones show. Of one
        that is stepped at the end of an epoch it is not known here whether that comes
        next.
        """
        found = dict(self.used)
        for name in self.used.keys() - self._resumed:
            trailer = self.used[name]
            paces = self.paces.get(name, (0,) * len(trailer.scheduler_steps))
            steps = zip(trailer.scheduler_steps, paces, strict=True)
            found[name] = replace(
                trailer,
                scheduler_steps=tuple(s + (p >= PACE_COUNT_MIN) for s, p in steps),
            )
        return found

    def resume(self, image: CoreImage) -> None:
        """Goes on from a checkpoint, whose settings are those of the next push."""
        self.used = dict(image.used)
        self.paces = dict(image.paces)
        self._resumed = set(image.used)

    def _note_pace(self, before: Trailer | None, trailer: Trailer) -> None:
        """Counts for each scheduler how many pushes in a row one step lies between.

        Before its first push one is taken to lie: then two pushes show it.
        """
        count, name = len(trailer.scheduler_steps), trailer.optimizer
        if before is None or len(before.scheduler_steps) != count:
            self.paces[name] = (1,) * count
            return
        paces = self.paces.get(name, (0,) * count)
        # What a checkpoint has is of this push, where its pace was known.
        known = [name in self._resumed and pace >= PACE_COUNT_MIN for pace in paces]
        self._resumed.discard(name)
        self.paces[name] = tuple(
            pace + 1 if new == old + (not is_known) else 0
            for new, old, pace, is_known in zip(
                trailer.scheduler_steps,
                before.scheduler_steps,
                paces,
                known,
                strict=True,
            )
        )

    def load(self, push: PushId, trailer: Trailer) -> None:
        """Orders that the state which a push brings be loaded."""
        self.effects.append(
            LoadState(
                push=push,
                optimizer=trailer.optimizer,
                spec_digest=trailer.spec_digest,
            )
        )

    def end(
        self, push: PushId, outcome: Outcome, nonfinite: tuple[str, ...] = ()
    ) -> None:
        """Everything of a push is done."""
        known = self.of(push.worker)
        known.window.finish(push.sequence, outcome, nonfinite)
        if outcome is not Outcome.DROPPED:
            known.end_last(self.now_ms)
        self.effects.append(PushDone(push=push, outcome=outcome))

    def note_factor(
        self, push: PushId, factor: float, *, is_left_out: bool = False
    ) -> None:
        """What a worker's gradient was multiplied by, for the answer and the counts."""
        if factor == 1.0 and not is_left_out:
            return
        known, entry = self.of(push.worker), self.entry_of(push)
        known.gradients = known.gradients.plus(factor, is_left_out=is_left_out)
        if entry is not None:
            entry.gradient_factor = 0.0 if is_left_out else factor

    def finish(self, push: PushId, reply: Reply, *, needs_all: bool = False) -> None:
        """Orders that a push be answered."""
        self.effects.append(Finish(push=push, reply=reply, needs_all=needs_all))

    def note_torn(self, clock: int, chunk_index: int, worker_ids: list[str]) -> None:
        """Workers were left out of a chunk, since its bytes are not finite."""
        self.effects.append(
            ChunkTorn(
                clock=clock, chunk_index=chunk_index, worker_ids=tuple(worker_ids)
            )
        )
