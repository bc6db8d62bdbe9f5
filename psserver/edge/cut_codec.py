"""Reports of cuts, and where checkpoints are <-> their messages."""

from psserver.edge.cut_report import CutReport, PartReport
from psserver.edge.fence_codec import holding_message, read_holding
from pswire.checkpoint.manifest import FilePart
from pswire.checkpoint.place import CheckpointPlace
from pswire.reasons import ErrorReason, Refusal
from pswire.v1 import coordinator_service_pb2 as messages
from pswire.v1 import membership_pb2


def cut_request(report: CutReport) -> messages.ReportCutRequest:
    """Writes a report; whose it is, its sender says."""
    return messages.ReportCutRequest(
        snapshot_id=report.snapshot_id,
        failure=report.failure,
        workers=[holding_message(holding) for holding in report.holdings],
    )


def read_cut_report(message: messages.ReportCutRequest) -> CutReport:
    """Reads a report.

    Raises:
        Refusal: `MALFORMED_MESSAGE` or `LIMIT_EXCEEDED` for data ranges that are none.
    """
    return CutReport(
        message.snapshot_id,
        message.failure,
        tuple(read_holding(holding) for holding in message.workers),
    )


def part_request(report: PartReport) -> messages.ReportCheckpointRequest:
    """Writes a report; whose it is, its sender says."""
    part = report.part
    return messages.ReportCheckpointRequest(
        snapshot_id=report.snapshot_id,
        part=None
        if part is None
        else messages.CheckpointPart(
            name=part.name,
            byte_count=part.byte_count,
            digest=part.digest,
            finite=report.is_finite,
        ),
        failure=report.failure,
    )


def read_part_report(message: messages.ReportCheckpointRequest) -> PartReport:
    """Reads a report.

    Raises:
        Refusal: `MALFORMED_MESSAGE` when it has neither a file nor a reason.
    """
    part = message.part
    if message.failure:
        return PartReport(message.snapshot_id, failure=message.failure)
    if not message.HasField("part"):
        raise Refusal(
            ErrorReason.MALFORMED_MESSAGE,
            "a part of a checkpoint is neither written nor has it failed",
        )
    return PartReport(
        message.snapshot_id,
        FilePart(part.name, part.byte_count, part.digest),
        is_finite=part.finite,
    )


def place_message(place: CheckpointPlace) -> membership_pb2.CheckpointPlace:
    return membership_pb2.CheckpointPlace(url=place.url, name=place.name)


def read_place(message: membership_pb2.CheckpointPlace) -> CheckpointPlace:
    return CheckpointPlace(message.url, message.name)
