"""Who joins, leaves and is evicted with the next record.

A lost worker stays a member, so that no clock closes without it, until a fence may take
it out: with `CONTINUE` as soon as those left are at least the floor, with `WAIT` only
together with a replacement under the same worker id.
"""

from psserver.coordinator.core.fence import MembershipChange, floor_of
from psserver.coordinator.core.roster import PRESENT, Roster, WorkerEntry
from psserver.coordinator.core.shard_map import ShardMap
from pswire.awaited import NOT_KNOWN, Awaited
from pswire.job_settings import JobSettings
from pswire.membership import Departure, LossPolicy, Record, WorkerKey, WorkerState


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
