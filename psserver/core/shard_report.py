"""What a shard holds, as it tells the coordinator at a fence."""

from psserver.core.aggregate import OpenClock
from psserver.core.clock_table import ClockTable
from psserver.core.dedupe import DedupeTable, PushEntry
from psserver.core.effects import FenceReport, WorkerHolding
from psserver.core.record import Member


def report_of(
    fence_number: int,
    clocks: ClockTable,
    dedupe: DedupeTable,
    *,
    open_clock: OpenClock | None,
    skipped_clock: int,
) -> FenceReport:
    """One report for all kinds of fences; nothing is being applied meanwhile.

    Args:
        fence_number: The fence.
        clocks: Members and progress.
        dedupe: What is remembered of pushes.
        open_clock: The clock that is being worked on, if there is one.
        skipped_clock: Newest clock that was skipped.
    """
    applied = clocks.applied_clock
    pushed = [
        (member.base_clock + sequence, entry.trailer)
        for member in clocks.senders
        for sequence, entry in _unfinished(dedupe, member)
        if entry.trailer is not None
    ]
    skips = {clock for clock, trailer in pushed if not trailer.finite}
    # A shard that has the verdict has skipped the clock when all were in, while
    # another may still lack the worker that is evicted now.
    if applied and skipped_clock == applied:
        skips.add(applied)
    touched = applied + bool(open_clock is not None and open_clock.applied)
    members = clocks.record.members if clocks.record is not None else ()
    return FenceReport(
        fence_number=fence_number,
        holdings=tuple(
            WorkerHolding(
                worker=member.worker, complete_clock=_complete_clock(dedupe, member)
            )
            for member in members
        ),
        # A joiner must not contribute to a clock that was begun without it, even when
        # whoever had begun it is gone and so are the trailers.
        trailer_clock_max=max([touched, *(clock for clock, _ in pushed)]),
        touched_clock_max=touched,
        applied_clock=applied,
        skip_clocks=tuple(sorted(skips)),
    )


def _unfinished(dedupe: DedupeTable, member: Member) -> list[tuple[int, PushEntry]]:
    window = dedupe.window_of(member.worker)
    return [
        (sequence, entry)
        for sequence, entry in window.entries.items()
        if sequence > window.done_sequence
    ]


def _complete_clock(dedupe: DedupeTable, member: Member) -> int:
    window = dedupe.window_of(member.worker)
    following = window.entries.get(window.done_sequence + 1)
    is_complete = following is not None and following.is_complete
    return member.base_clock + window.done_sequence + is_complete
