"""Commits of measured clocks that no driver is left for.

Each shard knows what its own part measures; what the gradients are multiplied by
follows from all of them. While a contributor is there it adds them up. When all have
ended, a record does, by what the shards have reported at its fence.
"""

from collections.abc import Collection

from psserver.edge.fence_report import FenceReport
from pswire.aggregation import UpdateRules
from pswire.membership import ClockChoice, Record


def measured_commit(
    reports: Collection[FenceReport], update: UpdateRules
) -> ClockChoice | None:
    """The open clock, if every shard has measured it with the same contributors.

    Args:
        reports: Of all shards, in the order of their indexes.
        update: How the pushes of a clock become an update.
    """
    parts = [report.measured for report in reports]
    known = [part for part in parts if part is not None]
    if not update.is_measured or len(known) < len(parts):
        return None
    if len({part[:2] for part in known}) > 1:
        return None
    return update.decided(known)


def orphaned_clock(record: Record) -> int:
    """The newest clock of BSP that may be open and that nobody is left to commit.

    Every shard holds all of it, since it counts; it may be complete by now.

    Returns:
        0 when there is none.
    """
    commit = record.commit
    if commit is not None and not commit.is_scaled:
        is_driven = any(record.member_of(worker) for worker in commit.workers)
        return 0 if is_driven else commit.clock
    commit_clock = commit.clock if commit is not None else 0
    bases = [member.base_clock for member in record.members]
    clocks = (
        end.last_clock
        for end in record.departures
        if end.last_clock > max(end.member.base_clock, commit_clock)
        and end.last_clock <= min(bases, default=end.last_clock)
        and is_of_bsp(record, end.last_clock)
    )
    return max(clocks, default=0)


def is_of_bsp(record: Record, clock: int) -> bool:
    """Whether a clock is one of BSP, and no number of pushes by themselves."""
    is_before = clock <= record.mode_clock
    return is_before is not record.mode.rules.is_clocked
