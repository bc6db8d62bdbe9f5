"""A change of mode while the job runs; see docs/decisions/0005-modes-by-sequence.md."""

from dataclasses import replace

from psserver.coordinator.core.fence import (
    ActiveFence,
    ModeTarget,
    following_record,
)
from psserver.edge.fence_report import FenceReport
from pswire.limits import STALENESS_BOUND_MAX
from pswire.membership import FREE_MODES, Member, Mode, Record
from pswire.reasons import ErrorReason, Refusal


def mode_target(mode: Mode, staleness_bound: int) -> ModeTarget:
    """A mode that somebody asks for; the bound of one without is left out.

    Raises:
        Refusal: `MALFORMED_MESSAGE` for a bound that is out of range.
    """
    if not 0 <= staleness_bound <= STALENESS_BOUND_MAX:
        raise Refusal(
            ErrorReason.MALFORMED_MESSAGE,
            f"staleness bound {staleness_bound} is not in 0 to {STALENESS_BOUND_MAX}; "
            f"{FREE_MODES} has no bound at all",
        )
    return ModeTarget(mode, mode.rules.bound_of(staleness_bound))


def target_of(record: Record) -> ModeTarget:
    return ModeTarget(record.mode, record.mode.rules.bound_of(record.staleness_bound))


def is_settled(fence: ActiveFence) -> bool:
    """Whether no shard has anything of an earlier mode left to apply."""
    return all(report.is_settled for report in fence.reports.values())


def mode_record(fence: ActiveFence, previous: Record) -> Record:
    """Decides a mode fence from the reports of all shards, which are settled.

    From BSP on, members keep their numbering: clocks up to the highest one of which
    any shard has a trailer are finished in BSP. From SSP or ASP on, all members meet
    at one clock, each with the last of its pushes that any shard knows of.
    """
    assert fence.target is not None
    shared = following_record(fence, previous)
    reports = tuple(fence.reports.values())
    reached = [previous.mode_clock, *(end.last_clock for end in shared.departures)]
    members = previous.members
    if shared.commit is not None:
        reached.append(shared.commit.clock)
    if previous.mode.rules.is_clocked:
        reached += [report.trailer_clock_max for report in reports]
        mode_clock = max(reached)
    else:
        lasts = [(member, last_sequence(member, reports)) for member in members]
        reached += [member.clock_of(sequence) for member, sequence in lasts]
        reached += [report.applied_clock for report in reports]
        reached += [report.frontier for report in reports]
        mode_clock = max(reached)
        members = tuple(
            replace(member, base_clock=mode_clock, base_sequence=sequence)
            for member, sequence in lasts
        )
    return replace(
        shared,
        members=members,
        mode=fence.target.mode,
        staleness_bound=fence.target.staleness_bound,
        mode_clock=mode_clock,
    )


def last_sequence(member: Member, reports: tuple[FenceReport, ...]) -> int:
    """In SSP and ASP, the last push of a member of which any shard has the trailer."""
    known = (report.holding_of(member.worker).trailer_sequence for report in reports)
    return max(member.base_sequence, *known)
