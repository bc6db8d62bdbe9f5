"""Data ranges, reports and splits <-> their messages."""

from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import TypedDict

from pswire.leased_data import DataRange, DataReport, EpochReport
from pswire.reasons import ErrorReason, Refusal
from pswire.recorded_split import RecordedSplit
from pswire.v1 import coordinator_service_pb2, push_pb2

RANGE_COUNT_MAX = 65_536
"""Data ranges of one call: 4 MiB of empty ones would take 200 MiB here."""


class ReportFields(TypedDict):
    """Fields that every request with a data report has."""

    consumed: list[push_pb2.DataRange]
    dropped: list[push_pb2.DataRange]
    skipped: list[push_pb2.DataRange]


def range_messages(ranges: Iterable[DataRange]) -> list[push_pb2.DataRange]:
    return [
        push_pb2.DataRange(
            loader=each.loader, epoch=each.epoch, start=each.start, stop=each.stop
        )
        for each in ranges
    ]


def read_ranges(
    ranges: Collection[push_pb2.DataRange],
) -> tuple[DataRange, ...]:
    """Reads data ranges.

    Raises:
        Refusal: `MALFORMED_MESSAGE` or `LIMIT_EXCEEDED`.
    """
    if len(ranges) > RANGE_COUNT_MAX:
        raise Refusal(
            ErrorReason.LIMIT_EXCEEDED,
            f"{len(ranges)} data ranges in one call, the limit is {RANGE_COUNT_MAX}",
        )
    found = tuple(
        DataRange(piece.loader, piece.epoch, piece.start, piece.stop)
        for piece in ranges
    )
    for piece in found:
        if not 0 <= piece.start <= piece.stop or piece.epoch < 0:
            raise Refusal(
                ErrorReason.MALFORMED_MESSAGE,
                f"data range [{piece.start}, {piece.stop}) of epoch {piece.epoch} is "
                "none",
            )
    return found


def report_fields(report: DataReport) -> ReportFields:
    """Writes what became of data, for any request that has the fields."""
    return {
        "consumed": range_messages(report.consumed),
        "dropped": range_messages(report.dropped),
        "skipped": range_messages(report.skipped),
    }


def read_report(
    request: coordinator_service_pb2.OpenEpochRequest
    | coordinator_service_pb2.LeaseDataRequest
    | coordinator_service_pb2.LeaveRequest,
) -> DataReport:
    """Reads what became of data, of any request that has the fields.

    Raises:
        Refusal: `MALFORMED_MESSAGE` or `LIMIT_EXCEEDED`.
    """
    return DataReport(
        consumed=read_ranges(request.consumed),
        dropped=read_ranges(request.dropped),
        skipped=read_ranges(request.skipped),
    )


def epoch_message(report: EpochReport) -> coordinator_service_pb2.EpochAccount:
    return coordinator_service_pb2.EpochAccount(
        loader=report.loader,
        epoch=report.epoch,
        position_count=report.count,
        left_out_count=report.left_out,
        seen_once_count=report.seen_once,
        seen_again_count=report.seen_again,
        torn_count=report.torn,
        dropped_count=report.dropped,
        skipped_count=report.skipped,
        never_count=report.never,
        closed=report.is_over,
        held_count=report.held,
    )


def read_epoch(message: coordinator_service_pb2.EpochAccount) -> EpochReport:
    return EpochReport(
        loader=message.loader,
        epoch=message.epoch,
        count=message.position_count,
        seen_once=message.seen_once_count,
        seen_again=message.seen_again_count,
        torn=message.torn_count,
        dropped=message.dropped_count,
        skipped=message.skipped_count,
        never=message.never_count,
        left_out=message.left_out_count,
        is_over=message.closed,
        held=message.held_count,
    )


def split_message(split: RecordedSplit) -> coordinator_service_pb2.SplitRecord:
    return coordinator_service_pb2.SplitRecord(
        name=split.name,
        recipe=split.recipe,
        digest=split.digest,
        item_count=split.item_count,
        recorder=split.recorder,
    )


def split_messages(
    splits: Iterable[RecordedSplit],
) -> list[coordinator_service_pb2.SplitRecord]:
    """Writes a list of splits, without recipes: all of them may not fit one message."""
    return [split_message(replace(split, recipe="")) for split in splits]


def read_split(message: coordinator_service_pb2.SplitRecord) -> RecordedSplit:
    return RecordedSplit(
        name=message.name,
        recipe=message.recipe,
        digest=message.digest,
        item_count=message.item_count,
        recorder=message.recorder,
    )
