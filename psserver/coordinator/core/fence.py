"""The fence: the one way in which membership, mode or a cut changes.

Fences are numbered and run one at a time. The coordinator prepares fence n on every
shard, collects one report from each, decides, and writes the record before it is
announced. No answer in time and no record written: abort, name the shard, queue
again.
"""

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from psserver.coordinator.core.clip_commit import is_of_bsp, measured_commit
from psserver.edge.fence_report import FenceReport, WorkerHolding
from pswire.job_settings import JobSettings
from pswire.membership import (
    ClockChoice,
    Departure,
    FenceKind,
    LossPolicy,
    Member,
    Mode,
    Record,
    WorkerKey,
)


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


class ModeTarget(NamedTuple):
    """A mode with its staleness bound, 0 outside SSP."""

    mode: Mode
    staleness_bound: int


@dataclass(slots=True)
class ActiveFence:
    """A fence between its preparation and its end.

    Attributes:
        number: Its number.
        kind: What it is for.
        opened_ms: When it was prepared.
        change: For a membership fence, what it carries.
        target: For a mode fence, the mode from then on.
        seeder: For a start, whose values count.
        starters: For a start, the first members, in the order of ranks.
        reports: Reports by shard index.
        clip_grad_norm: Norm that the job clips gradients to, 0 for no clipping.
        absent: Members whose connection is broken as it is decided.
    """

    number: int
    kind: FenceKind
    opened_ms: int
    change: MembershipChange = field(default_factory=MembershipChange)
    target: ModeTarget | None = None
    seeder: WorkerKey | None = None
    starters: tuple[WorkerKey, ...] = ()
    reports: dict[int, FenceReport] = field(default_factory=dict)
    clip_grad_norm: float = 0.0
    absent: frozenset[WorkerKey] = frozenset()

    @property
    def evicting(self) -> tuple[WorkerKey, ...]:
        """Workers whose data the shards are to list: all that its record ends.

        Also those that leave: the answer to their last push may have been lost.
        """
        leaving = (worker for worker, _ in self.change.leaves)
        return (*self.change.evictions, *leaving)

    def silent_shards(self, shard_count: int) -> list[int]:
        """Shards that have not reported."""
        return [index for index in range(shard_count) if index not in self.reports]

    def brings_in(self, worker: WorkerKey) -> bool:
        """Whether its record would make this worker a member."""
        return worker in self.starters or worker in self.change.joins


def first_record(fence: ActiveFence, settings: JobSettings) -> Record:
    """The record of a start: everybody at clock 0, in the order of worker ids."""
    return Record(
        fence_number=fence.number,
        generation=1,
        kind=FenceKind.START,
        members=tuple(
            Member(worker=worker, rank=rank, base_clock=0)
            for rank, worker in enumerate(fence.starters)
        ),
        mode=settings.mode,
        staleness_bound=settings.staleness_bound,
        workers_floor=settings.workers_min,
    )


def membership_record(
    fence: ActiveFence, previous: Record, settings: JobSettings
) -> Record:
    """Decides a membership fence from the reports of all shards.

    A worker that leaves says itself which push was its last. Of one that is evicted
    every shard holds L or L+1 complete pushes; L, the minimum, counts. A joiner
    contributes from the clock after the highest of which any shard holds a trailer.
    """
    reports = tuple(fence.reports.values())
    shared = following_record(fence, previous)
    departures = _departures(fence.change, previous, reports, shared.commit)
    gone = {end.member.worker for end in departures}
    staying = [m for m in previous.members if m.worker not in gone]
    bases = _joiners_bases(fence.change.joins, shared, departures, reports, settings)
    members = _with_joiners(staying, bases, departures)
    floor = _floor_after(
        previous, departures, bases, settings, members=members, fence=fence
    )
    record = replace(
        shared,
        members=members,
        departures=(*shared.departures, *departures),
        departed_step_count=previous.departed_step_count
        + sum(end.last_sequence for end in departures),
        workers_floor=floor,
        finished_step_count=-1,
    )
    # With `WAIT` one that was lost before the last one left is to be replaced.
    is_awaited = settings.worker_loss_policy is LossPolicy.WAIT and bool(staying)
    if floor or (is_awaited and previous.finished_step_count < 0):
        return record
    return replace(record, finished_step_count=_step_count(record, reports))


def has_resumed(record: Record, reports: Collection[FenceReport]) -> bool:
    """Whether a worker has pushed since the job was finished."""
    finished = record.finished_step_count
    return finished >= 0 and _step_count(record, reports) > finished


def floor_of(record: Record, settings: JobSettings, *, is_resumed: bool) -> int:
    """Members below which no lost one is evicted.

    A coordinator that is started again with a lower `workers_min` goes on below the
    floor that was written.

    Args:
        record: The newest record.
        settings: The job's settings.
        is_resumed: Whether it is known that the record's job is at work again.
    """
    floor = len(record.members) if is_resumed else record.workers_floor
    return min(floor, settings.workers_min)


def following_record(fence: ActiveFence, previous: Record) -> Record:
    """What the record of any fence has in common with all others after the start.

    Departures whose last clock is still open somewhere are told again, since the
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


def holding_of(report: FenceReport, worker: WorkerKey) -> WorkerHolding:
    """What a shard holds of a member; nothing when it has not heard of it."""
    return next(
        (holding for holding in report.holdings if holding.worker == worker),
        WorkerHolding(worker=worker, complete_sequence=0),
    )


def _commit(fence: ActiveFence, previous: Record) -> ClockChoice | None:
    """The clock that a record commits, or whose contributors it tells."""
    reports = [fence.reports[index] for index in sorted(fence.reports)]
    begun = begun_commit(previous, reports)
    if begun is not None and begun.is_scaled:
        return begun
    return measured_commit(reports, fence.clip_grad_norm) or begun


def _is_open(end: Departure, record: Record, reports: Collection[FenceReport]) -> bool:
    """Whether some shard may still lack pushes of a departed member that count."""
    if record.mode.rules.is_clocked or end.last_clock <= record.mode_clock:
        return end.last_clock > min(report.applied_clock for report in reports)
    # Pushed by itself: each shard had all of it, and applies it without delay.
    return not all(report.is_settled for report in reports)


def _departures(
    change: MembershipChange,
    previous: Record,
    reports: tuple[FenceReport, ...],
    commit: ClockChoice | None,
) -> tuple[Departure, ...]:
    found = []
    for worker, sequence in change.leaves:
        member = previous.member_of(worker)
        if member is not None:
            # What was acknowledged is complete everywhere, and so may be a last push
            # whose answer was lost: once any shard has applied of it, it counts. More
            # than that would make the others wait for pushes that nobody will send.
            own = max(sequence, _begun_sequence(member, previous, reports, commit))
            last = min(own, _held_sequence(reports, worker))
            found.append(_departure(member, last, evicted=False))
    for worker in change.evictions:
        member = previous.member_of(worker)
        if member is not None:
            last = _held_sequence(reports, worker)
            found.append(_departure(member, last, evicted=True))
    return tuple(found)


def _departure(member: Member, sequence: int, *, evicted: bool) -> Departure:
    last_clock = member.clock_of(sequence)
    return Departure(member=member, last_clock=last_clock, evicted=evicted)


def _begun_sequence(
    member: Member,
    previous: Record,
    reports: tuple[FenceReport, ...],
    commit: ClockChoice | None,
) -> int:
    """Highest push of a member that some shard has applied of, or must."""
    worker = member.worker
    found = max(holding_of(report, worker).touched_sequence for report in reports)
    clock = max(report.touched_clock_max for report in reports)
    if commit is not None and commit.clock >= clock:
        # With backup workers it may be of others alone.
        clock = commit.clock - (worker not in commit.workers)
    if previous.mode.rules.is_clocked or commit is not None:
        found = max(found, member.sequence_of(clock))
    return found


def _held_sequence(reports: Collection[FenceReport], worker: WorkerKey) -> int:
    """Highest push of a member that is complete on every shard."""
    return min(holding_of(report, worker).complete_sequence for report in reports)


def _joiners_bases(
    joins: tuple[WorkerKey, ...],
    record: Record,
    departures: tuple[Departure, ...],
    reports: tuple[FenceReport, ...],
    settings: JobSettings,
) -> dict[WorkerKey, int]:
    """Base clock of each joiner, in the order of worker ids.

    With `WAIT` a replacement takes over the clock that its predecessor left open, if
    no shard has closed it, for want of a finite gradient or with backup workers.
    """
    replaced = {}
    if settings.worker_loss_policy is LossPolicy.WAIT:
        closed = max(report.touched_clock_max for report in reports)
        if record.commit is not None:
            closed = max(closed, record.commit.clock)
        if record.mode.rules.is_clocked:
            closed = max(closed, record.mode_clock)
        replaced = {
            end.member.worker.worker_id: max(
                end.last_clock, end.member.base_clock, closed
            )
            for end in departures
            if end.evicted
        }
    if record.mode.rules.is_clocked:
        begun = max(report.trailer_clock_max for report in reports)
    else:
        begun = max(report.frontier for report in reports)
    common = max(begun, record.mode_clock)
    return {worker: replaced.get(worker.worker_id, common) for worker in sorted(joins)}


def _with_joiners(
    staying: list[Member],
    bases: dict[WorkerKey, int],
    departures: tuple[Departure, ...],
) -> tuple[Member, ...]:
    """Members with ranks: a joiner has that of who went under its id, or a free one.

    Data is dealt by rank, so a replacement goes on where its predecessor was.
    """
    members = list(staying)
    left = {end.member.worker.worker_id: end.member.rank for end in departures}
    kept = {left[worker.worker_id] for worker in bases if worker.worker_id in left}
    for worker, base_clock in bases.items():
        taken = {member.rank for member in members} | kept
        free = next(r for r in range(len(taken) + 1) if r not in taken)
        rank = left.get(worker.worker_id, free)
        members.append(Member(worker=worker, rank=rank, base_clock=base_clock))
    return tuple(sorted(members, key=lambda member: member.rank))


def _step_count(record: Record, reports: Collection[FenceReport]) -> int:
    """Steps of all workers ever, as far as every shard has them whole."""
    held = (_held_sequence(reports, member.worker) for member in record.members)
    return record.departed_step_count + sum(held)


def _floor_after(
    previous: Record,
    departures: tuple[Departure, ...],
    bases: dict[WorkerKey, int],
    settings: JobSettings,
    *,
    members: tuple[Member, ...],
    fence: ActiveFence,
) -> int:
    """The floor, lowered by those that leave and raised again by those that come.

    When the last one that is there leaves, whose work is done, nobody goes on: who has
    died before keeps no place for the job to wait for. Nor does who joins then, before
    it has pushed: a script that is refused ends, and the job is finished as before.

    When all are given up together, whose deaths no cut could wait for, the job goes on
    with whoever comes next, were it one: it is not held by the number there once was.
    """
    floor = previous.workers_floor
    if previous.finished_step_count >= 0:
        if not has_resumed(previous, fence.reports.values()):
            return 0
        floor = floor_of(previous, settings, is_resumed=True)
    leave_count = sum(not end.evicted for end in departures)
    if leave_count:
        floor = min(floor, len(previous.members) - leave_count)
        if all(member.worker in fence.absent for member in members):
            floor = 0
    if bases:
        floor = max(floor, min(settings.workers_min, len(members)))
    return floor if members else min(floor, 1)
