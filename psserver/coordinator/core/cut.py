"""Where a cut lies; see docs/decisions/0005-modes-by-sequence.md."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from psserver.coordinator.core.fence import begun_commit
from psserver.coordinator.core.mode_change import last_sequence
from psserver.edge.fence_report import FenceReport
from pswire.membership import Member, Record, WorkerKey

WorkerSequence = tuple[WorkerKey, int]
"""A push, as worker and sequence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A cut over all shards.

    Attributes:
        clock: In BSP, its clock; otherwise the smallest one, for people.
        sequences: Of each member, its last push that is in.
        version: Steps of all workers ever that are in.
    """

    clock: int
    sequences: tuple[WorkerSequence, ...]
    version: int


def cut_after(record: Record, reports: Collection[FenceReport]) -> Cut:
    """The first cut that no shard has gone beyond."""
    if record.mode.rules.is_clocked:
        return _cut_at_clock(record, reports)
    return _cut_at_pushes(
        record, reports, {m: last_sequence(m, tuple(reports)) for m in record.members}
    )


def cut_between_batches(record: Record, reports: Collection[FenceReport]) -> Cut:
    """As `cut_after`, but before pushes that begin a batch and are not begun."""
    if record.mode.rules.is_clocked:
        return _cut_at_clock(record, reports)
    lasts = {
        member: max(
            member.base_sequence,
            *(r.holding_of(member.worker).batch_sequence for r in reports),
        )
        for member in record.members
    }
    return _cut_at_pushes(record, reports, lasts)


def within_batches(cut: Cut, reports: Collection[FenceReport]) -> tuple[WorkerKey, ...]:
    """Workers whose next push after a cut may be a further step on their batch."""
    return tuple(
        worker
        for worker, sequence in cut.sequences
        if sequence
        and not any(
            holding.is_between_batches and holding.batch_sequence == sequence
            for holding in (report.holding_of(worker) for report in reports)
        )
    )


def batch_floors(cut: Cut, record: Record) -> tuple[WorkerSequence, ...]:
    """Of each member, the push from which on it may be held to the end of its batch.

    With a bound on how far apart they are nobody is held before all have come as far
    as the first: its answer may wait for that, and only then does it go on.
    """
    if record.mode.rules.lag_max(record.staleness_bound) is None:
        return cut.sequences
    lasts = dict(cut.sequences)
    reached = max((m.clock_of(lasts[m.worker]) for m in record.members), default=0)
    return tuple(
        (m.worker, max(lasts[m.worker], m.sequence_of(reached))) for m in record.members
    )


def open_pushes(
    cut: Cut, reports: Collection[FenceReport], *, is_two_phase: bool
) -> tuple[WorkerSequence, ...]:
    """Pushes of the cut of which some shard has not all, and only their senders do.

    With two-phase steps a push is open until its sender has committed it, and those
    that were skipped count as open too: a report can't tell them apart.
    """
    found = []
    for worker, sequence in cut.sequences:
        holdings = [report.holding_of(worker) for report in reports]
        reached = min(
            min(h.touched_sequence, h.complete_sequence)
            if is_two_phase
            else h.complete_sequence
            for h in holdings
        )
        if reached < sequence:
            found.append((worker, sequence))
    return tuple(found)


def is_premature(cut: Cut, record: Record, reports: Collection[FenceReport]) -> bool:
    """Whether the data ledger as of now is ahead of the cut, or behind it.

    In BSP it has settled what a departed worker has pushed for clocks beyond the cut.
    In SSP and ASP a clock that BSP owned before is in the cut, be it that a worker
    pushes for it, and is leased the data, only later.
    """
    if record.mode.rules.is_clocked:
        return any(
            end.last_clock > max(cut.clock, end.member.base_clock)
            for end in record.departures
        )
    lasts = {m.worker: last_sequence(m, tuple(reports)) for m in record.members}
    return any(sequence > lasts[worker] for worker, sequence in cut.sequences)


def _cut_at_clock(record: Record, reports: Collection[FenceReport]) -> Cut:
    """In BSP one clock, of which some shard may have applied or committed."""
    commit = begun_commit(record, reports)
    clock = max(
        record.mode_clock,
        commit.clock if commit is not None else 0,
        *(report.touched_clock_max for report in reports),
    )
    return Cut(
        clock=clock,
        sequences=tuple(
            (m.worker, m.base_sequence + max(0, clock - m.base_clock))
            for m in record.members
        ),
        version=record.version_at(clock),
    )


def _cut_at_pushes(
    record: Record, reports: Collection[FenceReport], known: Mapping[Member, int]
) -> Cut:
    """In SSP and ASP, of each member its last push that is known, be it elsewhere.

    Clocks that BSP owned before are in: part of one may be applied already. So are the
    pushes of all that have departed.
    """
    lasts = [
        (
            member,
            max(
                member.base_sequence + max(0, record.mode_clock - member.base_clock),
                known[member],
            ),
        )
        for member in record.members
    ]
    # With nobody there, as far as the last ones came.
    reached = max(record.mode_clock, *(report.frontier for report in reports))
    clocks = (member.clock_of(sequence) for member, sequence in lasts)
    return Cut(
        clock=min(clocks, default=reached),
        sequences=tuple((member.worker, sequence) for member, sequence in lasts),
        version=record.version_of({member.worker: last for member, last in lasts}),
    )
