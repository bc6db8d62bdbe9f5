"""A change of mode while the job runs; see docs/decisions/0005-modes-by-sequence.md."""

from dataclasses import replace

from psserver.coordinator.core.fence import ActiveFence, following_record
from psserver.edge.fence_report import FenceReport
from pswire.limits import GRACE_WINDOW_MS_MAX, STALENESS_BOUND_MAX, WORKER_COUNT_MAX
from pswire.membership import FREE_MODES, Member, ModeTerms, Record
from pswire.reasons import ErrorReason, Refusal


def checked_terms(terms: ModeTerms) -> ModeTerms:
    """A mode that somebody asks for; the numbers of one without are left out.

    Raises:
        Refusal: `MALFORMED_MESSAGE` for a number that is out of range.
    """
    mode, bound, quorum, window_ms = terms
    if not 0 <= bound <= STALENESS_BOUND_MAX:
        raise Refusal(
            ErrorReason.MALFORMED_MESSAGE,
            f"staleness bound {bound} is not in 0 to {STALENESS_BOUND_MAX}; "
            f"{FREE_MODES} has no bound at all",
        )
    least = int(mode.rules.has_quorum)
    if not least <= quorum <= WORKER_COUNT_MAX:
        raise Refusal(
            ErrorReason.MALFORMED_MESSAGE,
            f"a quorum of {quorum} in {mode.label} is not in {least} to "
            f"{WORKER_COUNT_MAX}",
        )
    if not 0 <= window_ms <= GRACE_WINDOW_MS_MAX:
        raise Refusal(
            ErrorReason.MALFORMED_MESSAGE,
            f"a grace window of {window_ms} ms is not in 0 to {GRACE_WINDOW_MS_MAX}",
        )
    return ModeTerms.of(
        mode, staleness_bound=bound, quorum=quorum, grace_window_ms=window_ms
    )


def is_settled(fence: ActiveFence) -> bool:
    """Whether no shard has anything of an earlier mode left to apply."""
    return all(report.is_settled for report in fence.reports.values())


def mode_record(fence: ActiveFence, previous: Record) -> Record:
    """Decides a mode fence from the reports of all shards, which are settled.

    From BSP on, members keep their numbering: clocks up to the highest one of which
    any shard has a trailer are finished in BSP. From SSP or ASP on, all members meet
    at one clock, each with the last of its pushes that any shard knows of.

    Between modes with clocks the numbering goes on, and a clock that is open is closed
    as the new one has it: who asks for a quorum may do so since somebody does not come.
    Not one that some shard has begun to apply, or that somebody may be about to commit.
    """
    assert fence.target is not None
    shared = following_record(fence, previous)
    reports = tuple(fence.reports.values())
    reached = [previous.mode_clock, *(end.last_clock for end in shared.departures)]
    members = previous.members
    if shared.commit is not None:
        reached.append(shared.commit.clock)
    terms = fence.target
    if previous.mode.rules.is_clocked and terms.mode.rules.is_clocked:
        mode_clock = previous.mode_clock
        commit_clock = shared.commit.clock if shared.commit is not None else 0
        terms_clock = max(
            previous.terms_clock, commit_clock, _driven_clock(previous, reports)
        )
    elif previous.mode.rules.is_clocked:
        reached += [report.trailer_clock_max for report in reports]
        terms_clock = mode_clock = max(reached)
    else:
        lasts = [(member, last_sequence(member, reports)) for member in members]
        reached += [member.clock_of(sequence) for member, sequence in lasts]
        reached += [report.applied_clock for report in reports]
        reached += [report.frontier for report in reports]
        terms_clock = mode_clock = max(reached)
        members = tuple(
            replace(member, base_clock=mode_clock, base_sequence=sequence)
            for member, sequence in lasts
        )
    return replace(
        shared,
        members=members,
        mode=terms.mode,
        staleness_bound=terms.staleness_bound,
        quorum=terms.quorum,
        grace_window_ms=terms.grace_window_ms,
        mode_clock=mode_clock,
        terms_clock=terms_clock,
    )


def _driven_clock(record: Record, reports: tuple[FenceReport, ...]) -> int:
    """The highest clock that some shard has begun, or all shards have all of."""
    touched = max(report.touched_clock_max for report in reports)
    lacking = [
        member.clock_of(report.holding_of(member.worker).complete_sequence)
        for member in record.members
        for report in reports
    ]
    return max(touched, min(lacking, default=0))


def last_sequence(member: Member, reports: tuple[FenceReport, ...]) -> int:
    """In SSP and ASP, the last push of a member of which any shard has the trailer."""
    known = (report.holding_of(member.worker).trailer_sequence for report in reports)
    return max(member.base_sequence, *known)
