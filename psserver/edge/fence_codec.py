"""A shard's answer to a fence <-> its message."""

from psserver.edge.fence_report import FenceReport, WorkerHolding
from pswire.membership_codec import (
    choice_message,
    identity_message,
    mixed_messages,
    range_messages,
    read_choice,
    read_identity,
    read_mixed,
    read_ranges,
)
from pswire.v1 import coordinator_service_pb2 as messages


def fence_request(report: FenceReport) -> messages.ReportFenceRequest:
    """Writes a report; whose it is, its sender says."""
    chosen, committed, measured = report.chosen, report.committed, report.measured
    return messages.ReportFenceRequest(
        fence_number=report.fence_number,
        workers=[holding_message(holding) for holding in report.holdings],
        trailer_clock_max=report.trailer_clock_max,
        touched_clock_max=report.touched_clock_max,
        applied_clock=report.applied_clock,
        skip_clocks=report.skip_clocks,
        mixed_clocks=mixed_messages(report.mixed_clocks),
        frontier=report.frontier,
        committed=None if committed is None else choice_message(committed),
        chosen=None if chosen is None else choice_message(chosen),
        settled=report.is_settled,
        measured=None if measured is None else choice_message(measured),
        failure=report.failure,
    )


def read_fence_report(message: messages.ReportFenceRequest) -> FenceReport:
    """Reads a report.

    Raises:
        Refusal: `MALFORMED_MESSAGE` or `LIMIT_EXCEEDED` for data ranges that are none.
    """
    return FenceReport(
        fence_number=message.fence_number,
        holdings=tuple(read_holding(holding) for holding in message.workers),
        trailer_clock_max=message.trailer_clock_max,
        touched_clock_max=message.touched_clock_max,
        applied_clock=message.applied_clock,
        skip_clocks=tuple(message.skip_clocks),
        mixed_clocks=read_mixed(message.mixed_clocks),
        frontier=message.frontier,
        committed=(
            read_choice(message.committed) if message.HasField("committed") else None
        ),
        chosen=read_choice(message.chosen) if message.HasField("chosen") else None,
        is_settled=message.settled,
        measured=(
            read_choice(message.measured) if message.HasField("measured") else None
        ),
        failure=message.failure,
    )


def holding_message(holding: WorkerHolding) -> messages.WorkerReport:
    sequences = [sequence for sequence, _ in holding.ranges]
    pieces = [piece for _, piece in holding.ranges]
    return messages.WorkerReport(
        worker=identity_message(holding.worker),
        complete_sequence=holding.complete_sequence,
        trailer_sequence=holding.trailer_sequence,
        touched_sequence=holding.touched_sequence,
        ranges=[
            messages.PushedRange(sequence=sequence, range=piece)
            for sequence, piece in zip(sequences, range_messages(pieces), strict=True)
        ],
        batch_sequence=holding.batch_sequence,
        between_batches=holding.is_between_batches,
        steps_again=holding.steps_again,
    )


def read_holding(message: messages.WorkerReport) -> WorkerHolding:
    ranges = read_ranges([pushed.range for pushed in message.ranges])
    sequences = [pushed.sequence for pushed in message.ranges]
    return WorkerHolding(
        worker=read_identity(message.worker),
        complete_sequence=message.complete_sequence,
        trailer_sequence=message.trailer_sequence,
        touched_sequence=message.touched_sequence,
        ranges=tuple(zip(sequences, ranges, strict=True)),
        batch_sequence=message.batch_sequence,
        is_between_batches=message.between_batches,
        steps_again=message.steps_again,
    )
