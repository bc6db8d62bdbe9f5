"""Membership, and the records that change it.

A record holds the whole membership, so that the newest one is all a process needs.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import Final, NamedTuple, Self

NAME_CHARACTERS_SHOWN: Final = 64
"""Of a name that somebody else chose, in a text for people."""


class WorkerKey(NamedTuple):
    """One start of one worker."""

    worker_id: str
    incarnation: int

    def __str__(self) -> str:
        """For logs and texts; escaped if a terminal would do more than print it."""
        name = self.worker_id
        shown = name if name.isprintable() else ascii(name)
        return f"{shown[:NAME_CHARACTERS_SHOWN]}/{self.incarnation}"


class LabelledEnum(IntEnum):
    """Values of an enumeration of the protocol, which users know by name."""

    @property
    def label(self) -> str:
        """As users write it."""
        return self.name.lower()

    @classmethod
    def labels(cls) -> tuple[str, ...]:
        """All of them, for a command line."""
        return tuple(each.label for each in cls)

    @classmethod
    def labelled(cls, label: str) -> Self:
        """The value of a label; `KeyError` without any."""
        return cls[label.upper()]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModeRules:
    """What a mode means, for all processes.

    Attributes:
        summary: How the workers keep together, for help.
        is_clocked: Pushes are applied clock by clock, as their mean, when all of a
            clock are there. Otherwise each is applied by itself.
        bounds_lag: A pull waits for workers that are too many clocks behind.
        takes_bound: How many those are is the user's staleness bound. Otherwise 0.
        deals_rounds: Data is dealt in rounds, a batch for each worker. Otherwise the
            workers take it on demand.
        has_quorum: A clock closes when a quorum of the workers has pushed for it. Who
            comes later pushes for the next one; nothing of it is lost.
    """

    summary: str
    is_clocked: bool
    bounds_lag: bool
    takes_bound: bool
    deals_rounds: bool
    has_quorum: bool = False

    def bound_of(self, staleness_bound: int) -> int:
        """The staleness bound, in clocks; 0 in a mode that takes none."""
        return staleness_bound if self.takes_bound else 0

    def lag_max(self, staleness_bound: int) -> int | None:
        """Clocks that values may lag behind their reader; None without a bound."""
        return self.bound_of(staleness_bound) if self.bounds_lag else None


class Mode(LabelledEnum):
    """How workers keep together; mirrors `pswire.v1.Mode`."""

    BSP = 1
    SSP = 2
    ASP = 3
    QUORUM = 4

    @property
    def rules(self) -> ModeRules:
        """What it means."""
        return _MODE_RULES[self]


_MODE_RULES = {
    Mode.BSP: ModeRules(
        summary="in lockstep",
        is_clocked=True,
        bounds_lag=True,
        takes_bound=False,
        deals_rounds=True,
    ),
    Mode.SSP: ModeRules(
        summary="a bounded number of clocks apart",
        is_clocked=False,
        bounds_lag=True,
        takes_bound=True,
        deals_rounds=False,
    ),
    Mode.ASP: ModeRules(
        summary="freely",
        is_clocked=False,
        bounds_lag=False,
        takes_bound=False,
        deals_rounds=False,
    ),
    Mode.QUORUM: ModeRules(
        summary="together with those that push first",
        is_clocked=True,
        bounds_lag=True,
        takes_bound=False,
        deals_rounds=False,
        has_quorum=True,
    ),
}


class ModeTerms(NamedTuple):
    """A mode with its numbers, each 0 in the modes that take none.

    Attributes:
        mode: How workers keep together.
        staleness_bound: Largest staleness in SSP, in clocks.
        quorum: In mode quorum, pushes with weight that close a clock.
        grace_window_ms: In mode quorum, how much longer a clock waits for more.
    """

    mode: Mode
    staleness_bound: int = 0
    quorum: int = 0
    grace_window_ms: int = 0

    @classmethod
    def of(
        cls,
        mode: Mode,
        *,
        staleness_bound: int = 0,
        quorum: int = 0,
        grace_window_ms: int = 0,
    ) -> Self:
        """A mode with those of these numbers that it takes."""
        has_quorum = mode.rules.has_quorum
        return cls(
            mode,
            mode.rules.bound_of(staleness_bound),
            quorum if has_quorum else 0,
            grace_window_ms if has_quorum else 0,
        )

    def __str__(self) -> str:
        """For people, such as `ssp, at most 3 clocks apart`."""
        label = self.mode.label
        if self.mode.rules.takes_bound:
            return f"{label}, at most {self.staleness_bound} clocks apart"
        if not self.mode.rules.has_quorum:
            return label
        text = f"{label} of {self.quorum}"
        if not self.grace_window_ms:
            return text
        return f"{text}, waiting up to {self.grace_window_ms / 1000:g} s for more"


def modes_that(holds: Callable[[ModeRules], bool], link: str = " or ") -> str:
    """Labels of the modes whose rules are so, for help and errors."""
    return link.join(mode.label for mode in Mode if holds(mode.rules))


FREE_MODES: Final = modes_that(lambda rules: not rules.bounds_lag)
BOUNDED_MODES: Final = modes_that(lambda rules: rules.takes_bound, " and ")
QUORUM_MODES: Final = modes_that(lambda rules: rules.has_quorum, " and ")
CLOCKED_MODES: Final = modes_that(lambda rules: rules.is_clocked, " and ")
UNCLOCKED_MODES: Final = modes_that(lambda rules: not rules.is_clocked, " and ")


class LossPolicy(LabelledEnum):
    """What to do when a worker is lost; mirrors `pswire.v1.WorkerLossPolicy`."""

    CONTINUE = 1
    WAIT = 2


class StepAtomicity(LabelledEnum):
    """When a push is applied; mirrors `pswire.v1.StepAtomicity`."""

    CHUNK = 1
    CLOCK = 2


class Outcome(LabelledEnum):
    """What became of a push; mirrors `pswire.v1.Outcome`."""

    APPLIED = 1
    STAGED = 2
    SKIPPED = 3
    DROPPED = 4
    DUPLICATE = 5


class FenceKind(LabelledEnum):
    """What a fence is for; mirrors `pswire.v1.FenceKind`."""

    START = 1
    MEMBERSHIP = 2
    MODE = 3
    CUT = 4

    @property
    def purpose(self) -> str:
        """What it is for, in words for users, who know of no fences."""
        return _PURPOSES[self]


_PURPOSES = {
    FenceKind.START: "the first values",
    FenceKind.MEMBERSHIP: "a change of the workers",
    FenceKind.MODE: "a change of the mode",
    FenceKind.CUT: "a snapshot",
}


class CutPurpose(IntEnum):
    """What a cut is for; mirrors `pswire.v1.CutPurpose`."""

    SNAPSHOT = 1
    CHECKPOINT = 2


class WorkerState(StrEnum):
    """Stage of one start of one worker."""

    REGISTERED = "registered"
    JOINING = "joining"
    MEMBER = "member"
    SUSPECT = "suspect"
    LOST = "lost"
    LEAVING = "leaving"
    LEFT = "left"
    EVICTED = "evicted"


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One member of a generation.

    Attributes:
        worker: Which start of which worker.
        rank: Dense index, as of joining.
        base_clock: Its push `base_sequence + n` is of clock `base_clock + n`.
        base_sequence: 0 at joining; set anew when the mode changes.
    """

    worker: WorkerKey
    rank: int
    base_clock: int
    base_sequence: int = 0

    @property
    def start_clock(self) -> int:
        """Clock at which its script began, as if it had pushed one for each since."""
        return self.base_clock - self.base_sequence

    def clock_of(self, sequence: int) -> int:
        """Clock that a push completes."""
        return self.base_clock + sequence - self.base_sequence

    def sequence_of(self, clock: int) -> int:
        """The push that completes a clock."""
        return self.base_sequence + clock - self.base_clock


def longest_of(members: Iterable[Member]) -> Member:
    """The longest member, then of lowest id: its hyperparameters count.

    A base that was set anew lies the further behind, the more was pushed to it.
    """
    return min(members, key=lambda m: (m.start_clock, m.worker))


@dataclass(frozen=True, slots=True, kw_only=True)
class Departure:
    """A member that a record ends.

    Attributes:
        member: The member.
        last_clock: Its last clock that counts.
        evicted: Whether it was evicted rather than left.
    """

    member: Member
    last_clock: int
    evicted: bool

    @property
    def last_sequence(self) -> int:
        """Its last push that counts: so many steps it adds to the version for ever."""
        return max(0, self.member.sequence_of(self.last_clock))


class ClockChoice(NamedTuple):
    """A clock with those whose pushes it consists of, in the order of worker ids.

    When the job clips by the global norm, also with the sum of squares of its
    aggregate, on one shard until it is committed, then over all; and with what that
    gradient is multiplied by: 0 for contributors that stand while that is to follow.

    Where the gradient of each worker is measured, see `pswire.aggregation`:

    Attributes:
        factors: What each one's is multiplied by, 0 if it does not count. Empty for 1.
        left_out: Places among `workers` of those that the rule of aggregation has not
            taken, though they count.
        weights: On one shard, the weight of each.
        products: On one shard, the products of their parts: of each with itself, or
            of each with itself and those after it, in the order of workers.
        proof: On one shard, that it has measured this.
        parts: In a commit, what it follows from: what each shard has said.
    """

    clock: int
    workers: tuple[WorkerKey, ...]
    sum_of_squares: float = 0.0
    gradient_scale: float = 1.0
    factors: tuple[float, ...] = ()
    left_out: tuple[int, ...] = ()
    weights: tuple[float, ...] = ()
    products: tuple[float, ...] = ()
    proof: bytes = b""
    parts: tuple["ClockChoice", ...] = ()

    @property
    def is_scaled(self) -> bool:
        """Whether it can be committed."""
        return self.gradient_scale > 0

    @property
    def decision(self) -> tuple[object, ...]:
        """What is the same for all shards, without what each has measured."""
        return self[:6]

    def factor_of(self) -> dict[WorkerKey, float]:
        """What each worker's gradient is multiplied by; nothing where that is 1."""
        return dict(zip(self.workers, self.factors, strict=bool(self.factors)))

    def left_out_workers(self) -> frozenset[WorkerKey]:
        """Workers whose gradients the rule of aggregation has not taken."""
        return frozenset(self.workers[place] for place in self.left_out)

    def bad_workers(self) -> frozenset[WorkerKey]:
        """Workers whose gradients do not count, as they are not finite or too large."""
        return frozenset(w for w, factor in self.factor_of().items() if not factor)


class MixedClock(NamedTuple):
    """A clock in which some step and some publish, with which of both counts."""

    clock: int
    publishes: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What a fence decided.

    Attributes:
        fence_number: Number of the fence.
        generation: Grows with every record.
        kind: What the fence was for.
        members: Members from now on.
        departures: Members that this record ends, and those of earlier records whose
            last clock was not complete on every shard.
        departed_step_count: Steps of all members that ever ended.
        skipped_clocks: Open clocks that every shard skips.
        mixed_clocks: Open clocks that some shard has begun with pushes of one kind, of
            two: on every shard those of that kind count, whoever is left.
        mode: Mode from now on.
        staleness_bound: Staleness bound from now on, in clocks.
        quorum: Pushes that close a clock of mode quorum from now on.
        grace_window_ms: How much longer it waits for more.
        mode_clock: Clock after which `mode` rules; up to it the mode before did. It
            stays what it was when one mode with clocks follows another.
        terms_clock: Clock after which what closes a clock is as `mode` has it: up to
            it, where a mode with clocks came before, as that one has it.
        workers_floor: Members below which no lost one is evicted.
        commit: With two-phase steps, a clock that every shard commits.
        finished_step_count: While the job is finished: steps of all workers ever,
            as far as every shard has them whole. Workers that join then keep no place
            before they push. Negative while the job is at work.
    """

    fence_number: int
    generation: int
    kind: FenceKind
    members: tuple[Member, ...]
    departures: tuple[Departure, ...] = ()
    departed_step_count: int = 0
    skipped_clocks: tuple[int, ...] = ()
    mixed_clocks: tuple[MixedClock, ...] = ()
    mode: Mode = Mode.BSP
    staleness_bound: int = 0
    quorum: int = 0
    grace_window_ms: int = 0
    mode_clock: int = 0
    terms_clock: int = 0
    workers_floor: int = 0
    commit: ClockChoice | None = None
    finished_step_count: int = -1

    @property
    def terms(self) -> ModeTerms:
        """The mode from now on, with its numbers."""
        return ModeTerms.of(
            self.mode,
            staleness_bound=self.staleness_bound,
            quorum=self.quorum,
            grace_window_ms=self.grace_window_ms,
        )

    @property
    def change_clock(self) -> int:
        """Clock after which the mode applies with its numbers: up to it others did."""
        # A record of a release without `terms_clock` has 0 there.
        return max(self.mode_clock, self.terms_clock)

    @property
    def is_start(self) -> bool:
        return self.kind is FenceKind.START

    def ranks_at(self, clock: int) -> tuple[int, ...]:
        """Ranks of the workers that take part in a clock, in their order.

        Where clocks are waited for, without those that join at a later one, and with
        those whose last one is not over: so a worker that has a newer record than
        another says the same, but of one that has left or was lost before the clock,
        of which the other has not heard.
        """
        if not self.mode.rules.is_clocked:
            return tuple(each.rank for each in self.members)
        staying = {each.rank for each in self.members if each.base_clock < clock}
        going = {e.member.rank for e in self.departures if e.last_clock >= clock}
        return tuple(sorted(staying | going))

    @property
    def longest(self) -> Member | None:
        """The longest member; None without any."""
        return longest_of(self.members) if self.members else None

    def has_longest(self, worker: WorkerKey) -> bool:
        """Whether this start of a worker is the longest member."""
        return self.longest is not None and self.longest.worker == worker

    def member_of(self, worker: WorkerKey) -> Member | None:
        """The member that is this start of this worker, if there is one."""
        return next((m for m in self.members if m.worker == worker), None)

    def version_at(self, clock: int) -> int:
        """Steps of all workers ever up to `clock`, in BSP.

        A departed member whose last clock is still ahead of `clock` counts with
        what it has in it, so that a version never runs ahead of its values.
        """
        ahead = sum(
            max(0, end.last_clock - max(clock, end.member.base_clock))
            for end in self.departures
        )
        present = sum(
            m.base_sequence + max(0, clock - m.base_clock) for m in self.members
        )
        return self.departed_step_count - ahead + present

    def version_of(self, sequences: Mapping[WorkerKey, int]) -> int:
        """Steps of all workers ever, with of each member its pushes up to one."""
        present = sum(sequences.get(m.worker, 0) for m in self.members)
        return self.departed_step_count + present
