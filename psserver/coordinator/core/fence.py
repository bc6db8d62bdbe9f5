"""The fence: the one way in which membership, mode or a cut changes.

Fences are numbered and run one at a time. The coordinator prepares fence n on every
shard, collects one report from each, decides, and writes the record before it is
announced. No answer in time and no record written: abort, name the shard, queue
again.
"""

from collections.abc import Collection
from dataclasses import dataclass, field, replace

from psserver.coordinator.core.orphaned_clock import is_of_bsp, measured_commit
from psserver.coordinator.core.start_point import StartPoint
from psserver.edge.fence_report import FenceReport
from pswire.aggregation import UpdateRules
from pswire.job_settings import JobSettings
from pswire.membership import (
    ClockChoice,
    Departure,
    FenceKind,
    Member,
    ModeTerms,
    Record,
    WorkerKey,
)

NUMBERS_PER_START = 1_000_000_000
"""Fences and snapshots that one start of the coordinator may number.

A cut writes no record, so a new process can't know the last number its predecessor
used, and a number must never come twice: shards ignore a fence that is not newer, and
an image that kept its name would be mixed with another.
"""


@dataclass(frozen=True, slots=True)
class MembershipChange:
    """What one membership fence carries.

    Attributes:
        joins: Workers that join.
        leaves: Workers that leave, each with the last push it had acknowledged.
        evictions: Workers to evict.
    """

    joins: tuple[WorkerKey, ...] = ()
    leaves: tuple[tuple[WorkerKey, int], ...] = ()
    evictions: tuple[WorkerKey, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.joins or self.leaves or self.evictions)


@dataclass(slots=True)
class ActiveFence:
    """A fence between its preparation and its end.

    Attributes:
        number: Its number.
        kind: What it is for.
        opened_ms: When it was prepared.
        change: For a membership fence, what it carries.
        target: For a mode fence, the mode from then on.
        seeder: For a start, whose values count; None for those of a checkpoint.
        starters: For a start, the first members, in the order of ranks.
        start_point: For a start, the checkpoint whose values count, if one's do.
        reports: Reports by shard index.
        update: How the pushes of a clock become an update.
        absent: Members whose connection is broken as it is decided.
    """

    number: int
    kind: FenceKind
    opened_ms: int
    change: MembershipChange = field(default_factory=MembershipChange)
    target: ModeTerms | None = None
    seeder: WorkerKey | None = None
    starters: tuple[WorkerKey, ...] = ()
    start_point: StartPoint | None = None
    reports: dict[int, FenceReport] = field(default_factory=dict)
    update: UpdateRules = field(default_factory=UpdateRules)
    absent: frozenset[WorkerKey] = frozenset()

    @property
    def evicting(self) -> tuple[WorkerKey, ...]:
        """Workers whose data the shards are to list: all that its record ends.

        Also those that leave: the answer to their last push may have been lost.
        """
        leaving = (worker for worker, _ in self.change.leaves)
        return (*self.change.evictions, *leaving)

    def silent_shards(self, shard_count: int) -> list[int]:
        return [index for index in range(shard_count) if index not in self.reports]

    def brings_in(self, worker: WorkerKey) -> bool:
        """Whether its record would make this worker a member."""
        return worker in self.starters or worker in self.change.joins


class FenceSeries:
    """The fence that is open, and the numbers of all others.

    Attributes:
        open: The fence that is open.
        closed_number: Newest fence that is over.
    """

    def __init__(self, start_count: int) -> None:
        self.open: ActiveFence | None = None
        self.closed_number = start_count * NUMBERS_PER_START
        self._next_number = self.closed_number + 1

    def begin(
        self,
        kind: FenceKind,
        now_ms: int,
        *,
        change: MembershipChange | None = None,
        target: ModeTerms | None = None,
        starters: tuple[WorkerKey, ...] = (),
        start_point: StartPoint | None = None,
    ) -> ActiveFence:
        """Opens the next fence; none is open."""
        assert self.open is None
        self.open = ActiveFence(
            number=self._next_number,
            kind=kind,
            opened_ms=now_ms,
            change=change or MembershipChange(),
            target=target,
            seeder=starters[0] if starters and start_point is None else None,
            starters=starters,
            start_point=start_point,
        )
        self._next_number += 1
        return self.open

    def end(self) -> ActiveFence:
        ended = self.open
        assert ended is not None
        self.open = None
        self.closed_number = ended.number
        return ended


def first_record(fence: ActiveFence, settings: JobSettings) -> Record:
    """The record of a start: everybody at one clock, in the order of worker ids.

    At clock 0, or at that of the checkpoint: its steps are as those of workers that
    have ended, and its mode rules from there on.
    """
    point = fence.start_point
    terms = settings.terms if point is None else point.terms
    return Record(
        fence_number=fence.number,
        generation=1 if point is None else point.generation + 1,
        kind=FenceKind.START,
        members=tuple(
            Member(worker=worker, rank=rank, base_clock=point.clock if point else 0)
            for rank, worker in enumerate(fence.starters)
        ),
        departed_step_count=point.version if point else 0,
        mode=terms.mode,
        staleness_bound=terms.staleness_bound,
        quorum=terms.quorum,
        grace_window_ms=terms.grace_window_ms,
        mode_clock=point.clock if point else 0,
        terms_clock=point.clock if point else 0,
        workers_floor=settings.workers_min,
    )


def following_record(fence: ActiveFence, previous: Record) -> Record:
    """What the record of any fence has in common with all others after the start.

    Departures whose last clock is still open somewhere are in it again, since the
    version of such a clock follows from the newest record alone.
    """
    reports = tuple(fence.reports.values())
    skipped = {clock for report in reports for clock in report.skip_clocks}
    mixed = {clock for report in reports for clock in report.mixed_clocks}
    applied_min = min((report.applied_clock for report in reports), default=0)
    return replace(
        previous,
        fence_number=fence.number,
        generation=previous.generation + 1,
        kind=fence.kind,
        departures=tuple(
            e for e in previous.departures if _is_open(e, previous, reports)
        ),
        skipped_clocks=tuple(sorted(skipped)),
        mixed_clocks=tuple(sorted(m for m in mixed if m.clock > applied_min)),
        commit=_commit(fence, previous),
    )


def begun_commit(
    record: Record, reports: Collection[FenceReport]
) -> ClockChoice | None:
    """With two-phase steps, the newest clock of BSP whose end must not hang.

    Some shard has committed it, or shard 0 has chosen for it, and some shard is not
    there yet: everything of it is on every shard, since a driver knew so. In SSP and
    ASP a commit is of one push: its worker drives it, and when that one is gone every
    shard knows by itself that the push is complete everywhere.
    """
    applied_min = min(report.applied_clock for report in reports)
    choices = (choice for r in reports for choice in (r.committed, r.chosen))
    begun = [
        choice
        for choice in choices
        if choice is not None
        and choice.clock > applied_min
        and is_of_bsp(record, choice.clock)
    ]
    return max(begun, key=lambda choice: (choice.clock, choice.is_scaled), default=None)


def _commit(fence: ActiveFence, previous: Record) -> ClockChoice | None:
    """The clock that a record commits, or whose contributors it names."""
    reports = [fence.reports[index] for index in sorted(fence.reports)]
    begun = begun_commit(previous, reports)
    if begun is not None and begun.is_scaled:
        return begun
    return measured_commit(reports, fence.update) or begun


def _is_open(end: Departure, record: Record, reports: Collection[FenceReport]) -> bool:
    """Whether some shard may still lack pushes of a departed member that count."""
    if record.mode.rules.is_clocked or end.last_clock <= record.mode_clock:
        return end.last_clock > min(report.applied_clock for report in reports)
    # Pushed by itself: each shard had all of it, and applies it without delay.
    return not all(report.is_settled for report in reports)
