"""What the control plane writes is read as what it was."""

from dataclasses import replace

import pytest

from psserver.coordinator.core.coordinator_effects import (
    DecideCut,
    Prepare,
    WriteCheckpoint,
)
from psserver.coordinator.rpc.watch_codec import shard_event
from psserver.edge.cut_codec import (
    cut_request,
    part_request,
    read_cut_report,
    read_part_report,
    read_place,
)
from psserver.edge.cut_report import CutReport, PartReport
from psserver.edge.decoding import decode
from psserver.edge.fence_codec import fence_request, read_fence_report
from psserver.edge.fence_report import RANGE_COUNT_MAX, FenceReport, WorkerHolding
from pswire.checkpoint.manifest import FilePart
from pswire.checkpoint.place import CheckpointPlace
from pswire.job_settings import JobSettings
from pswire.leased_data import DataRange
from pswire.limits import MESSAGE_BYTES_MAX, NAME_BYTES_MAX
from pswire.membership import (
    ClockChoice,
    CutPurpose,
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
from pswire.membership_codec import (
    read_identity,
    read_record,
    read_sequences,
    read_settings,
    record_message,
    settings_message,
)
from pswire.reasons import ErrorReason
from pswire.v1 import coordinator_service_pb2 as messages
from pswire.v1 import membership_pb2
from tests.refusals import refused

A, B = WorkerKey("a", 1), WorkerKey("b", 4)

RECORD = Record(
    fence_number=9,
    generation=5,
    kind=FenceKind.MODE,
    members=(
        Member(worker=A, rank=0, base_clock=40, base_sequence=31),
        Member(worker=B, rank=1, base_clock=40, base_sequence=7),
    ),
    departures=(
        Departure(
            member=Member(
                worker=WorkerKey("c", 2), rank=2, base_clock=3, base_sequence=1
            ),
            last_clock=12,
            evicted=True,
        ),
    ),
    departed_step_count=10,
    skipped_clocks=(41, 42),
    mixed_clocks=(MixedClock(41, publishes=True), MixedClock(42, publishes=False)),
    mode=Mode.SSP,
    staleness_bound=3,
    mode_clock=40,
    workers_floor=2,
    commit=ClockChoice(41, (A, B), 9.5, 1 / 3),
)

REPORT = FenceReport(
    fence_number=9,
    holdings=(
        WorkerHolding(
            worker=A,
            complete_sequence=7,
            trailer_sequence=8,
            touched_sequence=6,
            ranges=(
                (7, DataRange("loader", 0, 64, 96)),
                (8, DataRange("loader", 1, 0, 0)),
            ),
        ),
        WorkerHolding(worker=B, complete_sequence=0),
    ),
    trailer_clock_max=8,
    touched_clock_max=7,
    applied_clock=6,
    skip_clocks=(7,),
    mixed_clocks=(MixedClock(6, publishes=False), MixedClock(7, publishes=True)),
    frontier=5,
    committed=ClockChoice(7, (A,)),
    chosen=ClockChoice(8, (A, B)),
    is_settled=False,
    measured=ClockChoice(8, (A, B), 2.5),
)


def sent(report: FenceReport) -> messages.ReportFenceRequest:
    request = fence_request(report)
    return messages.ReportFenceRequest.FromString(request.SerializeToString())


def test_a_record_is_read_as_it_was_written() -> None:
    data = record_message(RECORD).SerializeToString()

    assert read_record(membership_pb2.Record.FromString(data)) == RECORD


def test_a_record_without_a_commit_has_none() -> None:
    plain = Record(fence_number=1, generation=1, kind=FenceKind.START, members=())

    assert read_record(record_message(plain)) == plain


def test_settings_are_read_as_they_were_written() -> None:
    settings = JobSettings(
        job_id="job",
        shard_count=3,
        mode=Mode.ASP,
        staleness_bound=4,
        workers_min=2,
        lease_ttl_ms=2_000,
        worker_loss_policy=LossPolicy.WAIT,
        step_atomicity=StepAtomicity.CLOCK,
        backup_worker_count=1,
        is_staleness_scaled=True,
        delay_compensation=0.04,
        chunk_bytes=1 << 18,
    )

    assert read_settings(settings_message(settings)) == settings


def test_a_mode_that_only_another_release_knows_is_refused() -> None:
    newer = record_message(RECORD)
    newer.mode = membership_pb2.Mode.ValueType(77)

    with refused(
        ErrorReason.MALFORMED_MESSAGE, "mode 77 is not one this release knows"
    ):
        read_record(newer)


@pytest.mark.parametrize(
    "report",
    [
        REPORT,
        FenceReport(
            fence_number=1,
            holdings=(),
            trailer_clock_max=0,
            touched_clock_max=0,
            applied_clock=0,
        ),
    ],
)
def test_a_report_is_read_as_it_was_written(report: FenceReport) -> None:
    request = sent(report)

    assert read_fence_report(request) == report


def test_a_report_of_data_that_is_none_is_refused() -> None:
    request = sent(REPORT)
    request.workers[0].ranges[0].range.stop = 1

    with refused(ErrorReason.MALFORMED_MESSAGE):
        read_fence_report(request)


def test_a_fence_names_those_that_may_be_taken_out() -> None:
    event = shard_event(
        Prepare(
            fence_number=4, kind=FenceKind.MEMBERSHIP, seeder=None, evicting=(A, B)
        ),
    )

    assert event is not None
    assert tuple(map(read_identity, event.prepare.evicting)) == (A, B)
    assert not event.prepare.HasField("seeder")


def test_a_cut_names_the_last_push_of_each_member() -> None:
    sequences = ((A, 12), (B, 0))

    event = shard_event(
        DecideCut(fence_number=4, snapshot_id=2, clock=3, sequences=sequences),
    )

    assert event is not None
    assert read_sequences(event.cut.sequences) == sequences


@pytest.mark.parametrize("purpose", list(CutPurpose))
def test_a_cut_says_what_it_is_for(purpose: CutPurpose) -> None:
    event = shard_event(
        DecideCut(fence_number=4, snapshot_id=2, clock=3, purpose=purpose)
    )

    assert event is not None
    assert CutPurpose(event.cut.purpose) is purpose


def test_what_a_copy_has_of_each_member_is_read_as_it_was_written() -> None:
    report = CutReport(7, holdings=REPORT.holdings)
    request = cut_request(report)

    assert read_cut_report(request) == report


def test_a_shard_is_sent_where_it_writes_a_checkpoint() -> None:
    place = CheckpointPlace("s3://bucket/run", "step-000000000500")
    event = shard_event(WriteCheckpoint(snapshot_id=7, place=place))

    assert event is not None
    assert event.write.snapshot_id == 7
    assert read_place(event.write.place) == place


@pytest.mark.parametrize(
    "report",
    [
        PartReport(7, FilePart("part", 100, "a" * 32)),
        PartReport(7, FilePart("part", 100, "a" * 32), is_finite=False),
        PartReport(7, failure="No space left on device"),
    ],
)
def test_a_part_of_a_checkpoint_is_read_as_it_was_written(report: PartReport) -> None:
    request = part_request(report)

    assert read_part_report(request) == report


def test_a_part_that_is_neither_written_nor_failed_is_refused() -> None:
    with refused(ErrorReason.MALFORMED_MESSAGE):
        read_part_report(messages.ReportCheckpointRequest(snapshot_id=7))


def test_the_longest_report_of_data_is_one_message_that_is_taken() -> None:
    name = "x" * NAME_BYTES_MAX
    pieces = [DataRange(name, 1 << 40, i << 20, (i + 1) << 20) for i in range(7_000)]
    holding = WorkerHolding(
        worker=A, complete_sequence=1, ranges=tuple(enumerate(pieces, start=1 << 40))
    )
    assert len(pieces) == RANGE_COUNT_MAX
    cut = CutReport(7, holdings=(holding,))
    fence = replace(REPORT, holdings=(holding,))

    data = cut_request(cut)
    assert data.ByteSize() <= MESSAGE_BYTES_MAX
    taken = decode(messages.ReportCutRequest, data.SerializeToString())
    assert read_cut_report(taken) == cut
    request = sent(fence)
    assert request.ByteSize() <= MESSAGE_BYTES_MAX
    taken_fence = decode(messages.ReportFenceRequest, request.SerializeToString())
    assert read_fence_report(taken_fence) == fence
