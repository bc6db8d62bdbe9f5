"""What a shard holds, as it tells the coordinator at a fence."""

from psserver.edge.fence_report import FenceReport, WorkerHolding
from psserver.shard.core.clock_progress import ClockProgress
from psserver.shard.core.shard_fence import OpenFence
from psserver.shard.core.shard_state import ShardState
from pswire.membership import Member


def report_of(
    fence: OpenFence, state: ShardState, progress: ClockProgress
) -> FenceReport:
    """One report for all kinds of fences; nothing is being applied meanwhile."""
    clocks = state.clocks
    applied = clocks.applied_clock
    begun = [
        member.clock_of(window.done_sequence + 1)
        for member in clocks.senders
        if (window := state.of(member.worker).window).next_entry is not None
        and window.next_entry.trailer is not None
    ]
    # A shard that has the verdict has skipped the clock when all were in, while
    # another may still lack the worker that is evicted now. Before that the verdict
    # says nothing: whoever counts brings it to every shard.
    is_skipped = applied > 0 and progress.skipped_clock == applied
    touched = applied + bool(progress.open is not None and progress.open.applied)
    number = clocks.next_clock
    contributors = () if number is None else clocks.contributors(number)
    return FenceReport(
        fence_number=fence.fence_number,
        holdings=tuple(_holding(state, m, fence) for m in clocks.members),
        # A joiner must not contribute to a clock that was begun without it, even when
        # whoever had begun it is gone and so are the trailers.
        trailer_clock_max=max([touched, *begun]),
        touched_clock_max=touched,
        applied_clock=applied,
        skip_clocks=(applied,) if is_skipped else (),
        mixed_clocks=progress.mixed_clocks,
        frontier=clocks.frontier,
        committed=state.committed,
        chosen=progress.commits.chosen,
        is_settled=clocks.is_settled,
        measured=(
            progress.commits.measured(number, contributors)
            if number is not None and contributors
            else None
        ),
    )


def _holding(state: ShardState, member: Member, fence: OpenFence) -> WorkerHolding:
    window = state.of(member.worker).window
    is_evicting = member.worker in fence.evicting
    return WorkerHolding(
        worker=member.worker,
        complete_sequence=window.complete_sequence,
        trailer_sequence=window.trailer_sequence,
        touched_sequence=window.touched_sequence,
        ranges=window.ranges_known() if is_evicting else (),
    )
