"""The fence: the one way in which membership, mode or a cut changes.

Fences are numbered and run one at a time. The coordinator prepares fence n on every
shard, collects one report from each, decides, and writes the record before it is
announced. No answer in time and no record written: abort, name the shard, queue
again.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from psserver.core.effects import FenceReport
from psserver.core.record import Departure, FenceKind, Member, Record, WorkerKey


@dataclass(frozen=True, slots=True)
class MembershipChange:
    """What one membership fence carries.

    Attributes:
        joins: Workers that come in.
        leaves: Workers that leave, each with the last push it had acknowledged.
        evictions: Workers that are taken out.
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
        seeder: For a start, whose values count.
        starters: For a start, the first members, in the order of ranks.
        reports: Reports by shard index.
    """

    number: int
    kind: FenceKind
    opened_ms: int
    change: MembershipChange = field(default_factory=MembershipChange)
    seeder: WorkerKey | None = None
    starters: tuple[WorkerKey, ...] = ()
    reports: dict[int, FenceReport] = field(default_factory=dict)

    def silent_shards(self, shard_count: int) -> list[int]:
        """Shards that have not reported."""
        return [index for index in range(shard_count) if index not in self.reports]

    def brings_in(self, worker: WorkerKey) -> bool:
        """Whether its record would make this worker a member."""
        return worker in self.starters or worker in self.change.joins


def first_record(fence: ActiveFence, template: Record) -> Record:
    """The record of a start: everybody at clock 0, in the order of worker ids."""
    members = tuple(
        Member(worker=worker, rank=rank, base_clock=0)
        for rank, worker in enumerate(fence.starters)
    )
    return Record(
        fence_number=fence.number,
        generation=template.generation + 1,
        kind=FenceKind.START,
        members=members,
        mode=template.mode,
        staleness_bound=template.staleness_bound,
    )


def membership_record(fence: ActiveFence, previous: Record) -> Record:
    """Decides a membership fence from the reports of all shards.

    A worker that leaves says itself which push was its last. Of one that is evicted
    every shard holds L or L+1 complete clocks; L, the minimum, counts. A joiner
    contributes from the clock after the highest of which any shard holds a trailer.
    Departures whose last clock is still open somewhere are told again, since the
    version of such a clock follows from the newest record alone.
    """
    reports = tuple(fence.reports.values())
    applied_min = min(report.applied_clock for report in reports)
    departures = _departures(fence.change, previous, reports)
    open_still = [e for e in previous.departures if e.last_clock > applied_min]
    gone = {end.member.worker for end in departures}
    staying = [m for m in previous.members if m.worker not in gone]
    members = _with_joiners(staying, fence.change.joins, reports)
    skipped = {clock for report in reports for clock in report.skip_clocks}
    return Record(
        fence_number=fence.number,
        generation=previous.generation + 1,
        kind=FenceKind.MEMBERSHIP,
        members=tuple(members),
        departures=(*open_still, *departures),
        departed_step_count=previous.departed_step_count
        + sum(end.step_count for end in departures),
        skipped_clocks=tuple(sorted(skipped)),
        mode=previous.mode,
        staleness_bound=previous.staleness_bound,
    )


def cut_clock(reports: Iterable[FenceReport]) -> int:
    """In BSP a cut is one number: the highest clock that any shard has touched."""
    return max(report.touched_clock_max for report in reports)


def _departures(
    change: MembershipChange, previous: Record, reports: tuple[FenceReport, ...]
) -> tuple[Departure, ...]:
    found = []
    for worker, sequence in change.leaves:
        member = previous.member_of(worker)
        if member is not None:
            # What was acknowledged is complete everywhere, and so may be a last push
            # whose answer was lost: once any shard has applied of it, it counts. More
            # than that would make the others wait for pushes that nobody will send.
            own = max(member.base_clock + sequence, cut_clock(reports))
            last = min(own, _held_clock(reports, member))
            found.append(Departure(member=member, last_clock=last, evicted=False))
    for worker in change.evictions:
        member = previous.member_of(worker)
        if member is not None:
            last = _held_clock(reports, member)
            found.append(Departure(member=member, last_clock=last, evicted=True))
    return tuple(found)


def _held_clock(reports: tuple[FenceReport, ...], member: Member) -> int:
    """Highest clock of a member that is complete on every shard."""
    return min(_complete_clock(report, member) for report in reports)


def _complete_clock(report: FenceReport, member: Member) -> int:
    for holding in report.holdings:
        if holding.worker == member.worker:
            return max(holding.complete_clock, member.base_clock)
    return member.base_clock


def _with_joiners(
    staying: list[Member],
    joins: tuple[WorkerKey, ...],
    reports: tuple[FenceReport, ...],
) -> list[Member]:
    base_clock = max((report.trailer_clock_max for report in reports), default=0)
    members = list(staying)
    for worker in sorted(joins):
        taken = {member.rank for member in members}
        rank = next(r for r in range(len(taken) + 1) if r not in taken)
        members.append(Member(worker=worker, rank=rank, base_clock=base_clock))
    return sorted(members, key=lambda member: member.rank)
