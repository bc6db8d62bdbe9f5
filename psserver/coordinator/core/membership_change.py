"""Who joins, leaves and is evicted with the next record.

A lost worker stays a member, so that no clock closes without it, until a fence may take
it out: with `CONTINUE` as soon as those left are at least the floor, in mode quorum a
quorum, with `WAIT` only together with a replacement under the same worker id.
"""

from collections.abc import Collection
from dataclasses import replace

from psserver.coordinator.core.fence import (
    ActiveFence,
    MembershipChange,
    following_record,
)
from psserver.coordinator.core.roster import PRESENT, Roster, WorkerEntry
from psserver.coordinator.core.shard_map import ShardMap
from psserver.edge.fence_report import FenceReport
from pswire.awaited import NOT_KNOWN, Awaited
from pswire.job_settings import JobSettings
from pswire.membership import (
    ClockChoice,
    Departure,
    LossPolicy,
    Member,
    Record,
    WorkerKey,
    WorkerState,
)


def is_deserted(roster: Roster, record: Record) -> bool:
    """Whether a job has members, and all of them are lost."""
    on_their_way = roster.in_state(
        WorkerState.MEMBER,
        WorkerState.SUSPECT,
        WorkerState.LEAVING,
        WorkerState.JOINING,
    )
    return bool(record.members) and not on_their_way


def wanted_change(
    roster: Roster,
    record: Record,
    settings: JobSettings,
    *,
    is_resumed: bool = False,
    is_cut_stuck: bool = False,
) -> MembershipChange:
    """What the next record is to change, as things stand.

    When a cut waits for pushes of the dead and nobody lives who would go on, the floor
    keeps no place: what the shards have without those pushes is a cut.

    A joiner whose id belongs to a lost member waits until that one may be evicted: no
    id is a member twice. A joiner that can't reach a shard would hold up the others.
    """
    leaves = tuple(
        (entry.worker, entry.last_sequence)
        for entry in roster.in_state(WorkerState.LEAVING)
    )
    evictions = _evictions(
        roster, record, settings, is_resumed=is_resumed, leave_count=len(leaves)
    )
    is_given_up = is_cut_stuck and settings.worker_loss_policy is LossPolicy.CONTINUE
    if is_given_up and is_deserted(roster, record):
        evictions = tuple(sorted(member.worker for member in record.members))
    ended = {*evictions, *(worker for worker, _ in leaves)}
    staying = {m.worker.worker_id for m in record.members if m.worker not in ended}
    return MembershipChange(
        joins=tuple(
            entry.worker
            for entry in roster.in_state(WorkerState.JOINING)
            if entry.worker.worker_id not in staying and not entry.cut_off
        ),
        leaves=leaves,
        evictions=evictions,
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

    In mode quorum a lost one keeps no clock open where those left are a quorum: it is
    evicted, so that its data goes to them. Where they are fewer the job waits anyway.
    """
    floor = _kept_floor(record, settings, is_resumed=is_resumed)
    if record.mode.rules.has_quorum and not settings.aggregation.is_robust:
        return min(floor, record.quorum)
    return floor


def _kept_floor(record: Record, settings: JobSettings, *, is_resumed: bool) -> int:
    """The same whatever the mode, which may change.

    A coordinator that is started again with a lower `workers_min` goes on below the
    floor that was written.
    """
    floor = len(record.members) if is_resumed else record.workers_floor
    return min(floor, settings.workers_min)


def heir_of(end: Departure, record: Record, settings: JobSettings) -> WorkerKey | None:
    """Who takes over the open clock of one that was evicted, if anybody does."""
    if settings.worker_loss_policy is not LossPolicy.WAIT or not end.evicted:
        return None
    worker_id = end.member.worker.worker_id
    found = (m.worker for m in record.members if m.worker.worker_id == worker_id)
    return next(found, None)


def waiting_text(
    roster: Roster,
    record: Record,
    settings: JobSettings,
    shards: ShardMap,
    now_ms: int,
    *,
    is_resumed: bool,
) -> list[str]:
    """Lost workers that the job waits for: since when, and what would end it."""
    replaced = {e.worker.worker_id for e in roster.in_state(WorkerState.JOINING)}
    waits = _is_replaced(record, settings, is_resumed=is_resumed)
    floor = floor_of(record, settings, is_resumed=is_resumed)
    lacking = floor - len(_left(roster))
    found = []
    for entry in roster.in_state(WorkerState.LOST):
        member = record.member_of(entry.worker)
        if member is None:
            continue
        name = entry.worker.worker_id
        if waits and name not in replaced:
            cure = f"it comes back, or a new worker joins with --worker-id {name}"
        elif not waits and lacking > 0:
            cure = (
                f"it comes back, or {_joining_text(lacking)}: without it there would "
                f"be {len(_left(roster))}, the job wants {floor}"
            )
        else:
            cure = "the job goes on without it"
        lost_ms = max(1, now_ms - entry.heard_ms)
        awaited = Awaited(name, shards.clock_of(member), NOT_KNOWN, lost_ms)
        found.append(f"{awaited}, until {cure}")
    for entry in roster.in_state(WorkerState.MEMBER, WorkerState.SUSPECT):
        if entry.cut_off:
            cure = "until it can"
            if not waits and lacking > 0:
                cure += f", or {_joining_text(lacking)}"
            found.append(f"{entry.worker.worker_id}, which {entry.cut_off}, {cure}")
    return found


def _is_replaced(record: Record, settings: JobSettings, *, is_resumed: bool) -> bool:
    """Whether a lost worker stays until a replacement comes, as `WAIT` has it.

    Not one that joined a finished job, which has no open clock to be taken over.
    """
    is_finished = record.finished_step_count >= 0 and not is_resumed
    return settings.worker_loss_policy is LossPolicy.WAIT and not is_finished


def _joining_text(count: int) -> str:
    return "another worker joins" if count == 1 else f"{count} others join"


def _evictions(
    roster: Roster,
    record: Record,
    settings: JobSettings,
    *,
    is_resumed: bool,
    leave_count: int,
) -> tuple[WorkerKey, ...]:
    """Who is evicted: of those that the floor holds, all or nobody.

    Evicting one of two lost workers unblocks nothing while the other one holds every
    clock open, and costs the first its place if it is back a second later.
    """
    lost = roster.in_state(WorkerState.LOST)
    out = [entry for entry in roster.in_state(*PRESENT) if entry.is_condemned]
    waits = _is_replaced(record, settings, is_resumed=is_resumed)
    if not waits:
        out += lost
        out += [entry for entry in roster.in_state(*PRESENT) if entry.cut_off]
    floor = floor_of(record, settings, is_resumed=is_resumed)
    if leave_count:
        floor = min(floor, len(record.members) - leave_count)
        if not _left(roster):
            floor = 0  # as `_floor_after` has it
    if len(_left(roster)) < floor:
        out = []
    if waits:
        joining = {e.worker.worker_id for e in roster.in_state(WorkerState.JOINING)}
        out += [entry for entry in lost if entry.worker.worker_id in joining]
    workers = sorted({entry.worker for entry in out})
    return tuple(worker for worker in workers if record.member_of(worker))


def _left(roster: Roster) -> list[WorkerEntry]:
    """Those the job would go on with: members that are there, and who wants to join.

    Not one that is suspect: it may be lost in a moment, or back. Not one that is cut
    off from a shard.
    """
    members = roster.in_state(WorkerState.MEMBER)
    joining = roster.in_state(WorkerState.JOINING)
    return [
        *(e for e in members if not (e.is_condemned or e.cut_off)),
        *(entry for entry in joining if entry.is_watching and not entry.cut_off),
    ]


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
    found = max(report.holding_of(worker).touched_sequence for report in reports)
    clock = max(report.touched_clock_max for report in reports)
    if commit is not None and commit.clock >= clock:
        # With backup workers it may be of others alone.
        clock = commit.clock - (worker not in commit.workers)
    if previous.mode.rules.is_clocked or commit is not None:
        found = max(found, member.sequence_of(clock))
    return found


def _held_sequence(reports: Collection[FenceReport], worker: WorkerKey) -> int:
    """Highest push of a member that is complete on every shard."""
    return min(report.holding_of(worker).complete_sequence for report in reports)


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
        floor = _kept_floor(previous, settings, is_resumed=True)
    leave_count = sum(not end.evicted for end in departures)
    if leave_count:
        floor = min(floor, len(previous.members) - leave_count)
        if all(member.worker in fence.absent for member in members):
            floor = 0
    if bases:
        floor = max(floor, min(settings.workers_min, len(members)))
    return floor if members else min(floor, 1)
