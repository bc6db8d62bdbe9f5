"""Members, records, clocks and their data <-> their messages."""

import re
from collections.abc import Collection, Iterable
from dataclasses import replace
from enum import Enum
from typing import TypedDict, TypeVar

from pswire.aggregation import MEAN, Aggregation, BadGradientPolicy
from pswire.job_settings import JobSettings
from pswire.leased_data import DataRange, DataReport, EpochReport, RecordedSplit
from pswire.membership import (
    ClockChoice,
    Departure,
    FenceKind,
    LossPolicy,
    Member,
    MixedClock,
    Mode,
    Record,
    StepAtomicity,
    WorkerKey,
)
from pswire.reasons import ErrorReason, Refusal
from pswire.v1 import coordinator_service_pb2, push_pb2
from pswire.v1 import membership_pb2 as messages

Kind = TypeVar("Kind", bound=Enum)

RANGE_COUNT_MAX = 65_536
"""Data ranges of one call: 4 MiB of empty ones would take 200 MiB here."""


def known(kind: type[Kind], value: int | str) -> Kind:
    """Reads a value of an enumeration.

    Raises:
        Refusal: `MALFORMED_MESSAGE` for one that only another release knows.
    """
    try:
        return kind(value)
    except ValueError:
        what = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", kind.__name__).lower()
        raise Refusal(
            ErrorReason.MALFORMED_MESSAGE,
            f"{what} {value} is not one this release knows",
        ) from None


def identity_message(worker: WorkerKey) -> messages.WorkerIdentity:
    return messages.WorkerIdentity(
        worker_id=worker.worker_id, incarnation=worker.incarnation
    )


def settings_message(settings: JobSettings) -> messages.JobSettings:
    return messages.JobSettings(
        job_id=settings.job_id,
        shard_count=settings.shard_count,
        mode=messages.Mode.ValueType(settings.mode),
        staleness_bound=settings.staleness_bound,
        quorum=settings.quorum,
        grace_window_ms=settings.grace_window_ms,
        workers_min=settings.workers_min,
        lease_ttl_ms=settings.lease_ttl_ms,
        worker_loss_policy=messages.WorkerLossPolicy.ValueType(
            settings.worker_loss_policy
        ),
        step_atomicity=messages.StepAtomicity.ValueType(settings.step_atomicity),
        backup_worker_count=settings.backup_worker_count,
        staleness_scaling=settings.is_staleness_scaled,
        delay_compensation=settings.delay_compensation,
        chunk_bytes=settings.chunk_bytes,
        aggregation=str(settings.aggregation),
        gradient_norm_max=settings.gradient_norm_max,
        bad_gradient_policy=messages.BadGradientPolicy.ValueType(
            settings.bad_gradient_policy
        ),
    )


def read_settings(message: messages.JobSettings) -> JobSettings:
    return JobSettings(
        job_id=message.job_id,
        shard_count=message.shard_count,
        mode=known(Mode, message.mode),
        staleness_bound=message.staleness_bound,
        quorum=message.quorum,
        grace_window_ms=message.grace_window_ms,
        workers_min=message.workers_min,
        lease_ttl_ms=message.lease_ttl_ms,
        worker_loss_policy=known(LossPolicy, message.worker_loss_policy),
        step_atomicity=known(StepAtomicity, message.step_atomicity),
        backup_worker_count=message.backup_worker_count,
        is_staleness_scaled=message.staleness_scaling,
        delay_compensation=message.delay_compensation,
        chunk_bytes=message.chunk_bytes,
        aggregation=_read_aggregation(message.aggregation or str(MEAN)),
        gradient_norm_max=message.gradient_norm_max,
        bad_gradient_policy=known(BadGradientPolicy, message.bad_gradient_policy)
        if message.bad_gradient_policy
        else BadGradientPolicy.SKIP,
    )


def _read_aggregation(text: str) -> Aggregation:
    try:
        return Aggregation.parse(text)
    except ValueError as error:
        raise Refusal(ErrorReason.MALFORMED_MESSAGE, str(error)) from None


def record_message(record: Record) -> messages.Record:
    return messages.Record(
        fence_number=record.fence_number,
        generation=record.generation,
        kind=messages.FenceKind.ValueType(record.kind),
        members=[_member_message(member) for member in record.members],
        departures=[
            messages.Departure(
                member=_member_message(end.member),
                last_clock=end.last_clock,
                evicted=end.evicted,
            )
            for end in record.departures
        ],
        departed_step_count=record.departed_step_count,
        skipped_clocks=record.skipped_clocks,
        mixed_clocks=mixed_messages(record.mixed_clocks),
        mode=messages.Mode.ValueType(record.mode),
        staleness_bound=record.staleness_bound,
        quorum=record.quorum,
        grace_window_ms=record.grace_window_ms,
        mode_clock=record.mode_clock,
        terms_clock=record.terms_clock,
        workers_floor=record.workers_floor,
        commit=None if record.commit is None else choice_message(record.commit),
    )


def read_record(message: messages.Record) -> Record:
    return Record(
        fence_number=message.fence_number,
        generation=message.generation,
        kind=known(FenceKind, message.kind),
        members=tuple(_read_member(member) for member in message.members),
        departures=tuple(
            Departure(
                member=_read_member(end.member),
                last_clock=end.last_clock,
                evicted=end.evicted,
            )
            for end in message.departures
        ),
        departed_step_count=message.departed_step_count,
        skipped_clocks=tuple(message.skipped_clocks),
        mixed_clocks=read_mixed(message.mixed_clocks),
        mode=known(Mode, message.mode),
        staleness_bound=message.staleness_bound,
        quorum=message.quorum,
        grace_window_ms=message.grace_window_ms,
        mode_clock=message.mode_clock,
        terms_clock=message.terms_clock,
        workers_floor=message.workers_floor,
        commit=read_choice(message.commit) if message.HasField("commit") else None,
    )


def choice_message(choice: ClockChoice) -> messages.ClockChoice:
    return messages.ClockChoice(
        clock=choice.clock,
        workers=[identity_message(each) for each in choice.workers],
        sum_of_squares=choice.sum_of_squares,
        gradient_scale=choice.gradient_scale,
        factors=choice.factors,
        left_out=choice.left_out,
        weights=choice.weights,
        products=choice.products,
        proof=choice.proof,
        parts=[
            messages.ClockPart(
                sum_of_squares=part.sum_of_squares,
                weights=part.weights,
                products=part.products,
                proof=part.proof,
            )
            for part in choice.parts
        ],
    )


def read_choice(message: messages.ClockChoice) -> ClockChoice:
    clock = ClockChoice(message.clock, tuple(map(read_identity, message.workers)))
    return clock._replace(
        sum_of_squares=message.sum_of_squares,
        gradient_scale=message.gradient_scale,
        factors=tuple(message.factors),
        left_out=tuple(message.left_out),
        weights=tuple(message.weights),
        products=tuple(message.products),
        proof=message.proof,
        parts=tuple(
            clock._replace(
                sum_of_squares=part.sum_of_squares,
                weights=tuple(part.weights),
                products=tuple(part.products),
                proof=part.proof,
            )
            for part in message.parts
        ),
    )


def mixed_messages(clocks: Iterable[MixedClock]) -> list[messages.MixedClock]:
    return [messages.MixedClock(clock=c, publishes=kind) for c, kind in clocks]


def read_mixed(clocks: Iterable[messages.MixedClock]) -> tuple[MixedClock, ...]:
    return tuple(MixedClock(each.clock, each.publishes) for each in clocks)


def sequence_messages(
    sequences: Iterable[tuple[WorkerKey, int]],
) -> list[messages.WorkerSequence]:
    """Writes workers' pushes up to one of each."""
    return [
        messages.WorkerSequence(worker=identity_message(worker), sequence=sequence)
        for worker, sequence in sequences
    ]


def read_sequences(
    sequences: Iterable[messages.WorkerSequence],
) -> tuple[tuple[WorkerKey, int], ...]:
    """Reads workers' pushes up to one of each."""
    return tuple((read_identity(each.worker), each.sequence) for each in sequences)


def read_identity(message: messages.WorkerIdentity) -> WorkerKey:
    """Reads an identity from a process of the job's own, which sends no wrong one."""
    return WorkerKey(message.worker_id, message.incarnation)


def _member_message(member: Member) -> messages.Member:
    return messages.Member(
        worker=identity_message(member.worker),
        rank=member.rank,
        base_clock=member.base_clock,
        base_sequence=member.base_sequence,
    )


def _read_member(message: messages.Member) -> Member:
    return Member(
        worker=read_identity(message.worker),
        rank=message.rank,
        base_clock=message.base_clock,
        base_sequence=message.base_sequence,
    )


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
