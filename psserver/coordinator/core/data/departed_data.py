"""What becomes of the data of a worker that a record ends."""

from psserver.coordinator.core.data.ledger import DataLedger
from psserver.coordinator.core.fence import holding_of
from psserver.edge.fence_report import FenceReport
from pswire.membership import ClockChoice, Departure, WorkerKey


def settle_data(
    ledger: DataLedger,
    end: Departure,
    reports: tuple[FenceReport, ...],
    commit: ClockChoice | None,
    *,
    heir: WorkerKey | None = None,
) -> None:
    """Accounts for all that a departed worker held, by what the shards hold of it.

    Data of pushes that count is consumed, whatever the worker itself had reported.
    When some shard has applied of the push after them, that push is torn: its data is
    counted as such and not dealt again. All the rest is, also that of a push of the
    clock that the record commits without it.

    Args:
        ledger: Data of all epochs.
        end: How the worker ended.
        reports: What the shards hold of it.
        commit: The clock that the record commits.
        heir: Who takes over its open clock, and with it what it held: the run then goes
            on as if nothing had happened, bit by bit.
    """
    worker = end.member.worker
    left_out = 0
    if commit is not None and worker not in commit.workers:
        left_out = end.member.sequence_of(commit.clock)
    holdings = [holding_of(report, worker) for report in reports]
    pushed = {pair for holding in holdings for pair in holding.ranges}
    is_torn = any(h.touched_sequence > end.last_sequence for h in holdings)
    for sequence, piece in sorted(pushed):
        if sequence == left_out:
            continue
        if sequence <= end.last_sequence:
            ledger.consume(worker, (piece,))
        elif is_torn and sequence == end.last_sequence + 1:
            ledger.tear(worker, (piece,))
    if heir is not None:
        ledger.inherit(worker, heir)
    ledger.retire(worker)
