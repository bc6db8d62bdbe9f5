"""Asks for the state of a job and for changes of it, for psctl. Without torch."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, cast

from pswire.aggregation import NO_COUNTS, GradientCounts
from pswire.channels import ChannelKind, aio_channel
from pswire.data_codec import read_epoch, read_split
from pswire.job_settings import JobSettings
from pswire.leased_data import EpochReport
from pswire.limits import PROTOCOL_VERSION
from pswire.membership import Mode, WorkerState
from pswire.membership_codec import known, read_settings
from pswire.recorded_split import RecordedSplit
from pswire.span_log import Span
from pswire.status_document import (
    Document,
    event_document,
    history_document,
    phase_name,
    status_document,
)
from pswire.v1 import coordinator_service_pb2 as pb
from pswire.v1 import membership_pb2
from pswire.v1.coordinator_service_pb2_grpc import CoordinatorServiceStub
from psworker.transport import messages
from psworker.transport.call_error import CallError, calling, translated
from psworker.transport.values import Waiting

if TYPE_CHECKING:
    from pswire.v1.coordinator_service_pb2_grpc import CoordinatorServiceAsyncStub

ANSWER_MARGIN_S: Final = 2.0
"""What a call's deadline leaves the coordinator above its own wait, to say why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStatus:
    """One worker; rank, `silent_ms` and `step_ms` are -1 where there is none."""

    worker_id: str
    incarnation: int
    rank: int
    state: WorkerState
    clock: int
    lead: int
    silent_ms: int
    step_ms: int
    address: str
    shared_memory_shard_count: int = 0
    brought_other: tuple[str, ...] = ()
    unreached_shards: tuple[int, ...] = ()
    gradients: GradientCounts = NO_COUNTS

    @property
    def is_member(self) -> bool:
        """Whether it takes part, so that it has a clock."""
        return self.rank >= 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardStatus:
    """One shard; `silent_ms` is -1 if it was never heard of."""

    shard_index: int
    incarnation: int
    state: str
    address: str
    silent_ms: int
    parameter_bytes: int
    optimizer_bytes: int
    clock: int
    frontier: int
    version: int
    queued_push_count: int
    torn_step_count: int
    staleness_counts: tuple[int, ...]
    waiting: Waiting | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedCheckpoint:
    """A checkpoint that is complete; `url` is without the password of its own."""

    url: str
    name: str
    version: int
    clock: int
    byte_count: int
    age_ms: int


@dataclass(frozen=True, slots=True)
class CheckpointReturn:
    """What a return to a checkpoint means.

    Attributes:
        saved: The checkpoint.
        lost_step_count: Steps of all workers that are trained again.
        undone: Names of checkpoints that do not count any more.
    """

    saved: SavedCheckpoint
    lost_step_count: int
    undone: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointStatus:
    """Where the making of checkpoints stands.

    Attributes:
        url: Folder of all of them.
        interval: How often one is made, such as `10min`.
        newest: The newest one, None before the first.
        failure: Why the last try has failed, empty when it has not.
    """

    url: str
    interval: str
    newest: SavedCheckpoint | None
    failure: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PrivacyStatus:
    """What is promised about samples, and how much of it is spent.

    Attributes:
        noise_multiplier: See `pswire.privacy.Privacy`.
        max_grad_norm: Likewise.
        delta: Likewise.
        participation_count: How often a sample may have taken part, at most.
        participation_max: How often one may.
        epsilon: The bound by now; infinite where it is more than is known.
        epsilon_max: The bound that the job ends at.
    """

    noise_multiplier: float
    max_grad_norm: float
    delta: float
    participation_count: int
    participation_max: int
    epsilon: float
    epsilon_max: float


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStatus:
    """Where a job stands.

    Attributes:
        settings: What is fixed when the coordinator starts.
        mode: How workers keep together now.
        staleness_bound: Largest lead in SSP, in clocks.
        mode_clock: Clock after which the mode rules.
        phase: `waiting`, `seeding`, `running`, `finished` or `failed`.
        generation: Newest generation.
        workers_floor: Members below which no lost one is evicted.
        evicted_count: Workers that were ever evicted.
        workers: All workers that have not left or been evicted.
        shards: All shards.
        waiting_for: Whom the job waits for, in words.
        snapshot_version: Version of the newest snapshot, -1 if none.
        tensor_count: Tensors of the job, 0 before the first worker.
        parameter_bytes: Bytes of parameters over all shards.
        failure: Why the job failed, else empty.
        clip_grad_norm: Norm that gradients are clipped to, 0 for no clipping.
        compression: How gradients and values are sent, empty for as they are.
        splits: Splits of data that were recorded, without their recipes.
        epochs: Data of the epochs that were opened last, the newest first.
        checkpoints: Its checkpoints; None for a job that makes none.
        privacy: What is promised about samples; None for nothing.
        diagnosis: What it is doing and why it is slow or waits, in a sentence.
        steps_per_s: Steps of all workers lately; None where that is not known.
        samples_per_s: Samples behind these; None where none are counted.
        metrics: What scripts have logged last, a mean over the workers.
    """

    settings: JobSettings
    mode: Mode
    staleness_bound: int
    mode_clock: int
    phase: str
    generation: int
    workers_floor: int
    evicted_count: int
    workers: tuple[WorkerStatus, ...]
    shards: tuple[ShardStatus, ...]
    waiting_for: str
    snapshot_version: int
    tensor_count: int
    parameter_bytes: int
    failure: str
    clip_grad_norm: float = 0.0
    compression: str = ""
    splits: tuple[RecordedSplit, ...] = ()
    epochs: tuple[EpochReport, ...] = ()
    checkpoints: CheckpointStatus | None = None
    privacy: PrivacyStatus | None = None
    diagnosis: str = ""
    steps_per_s: float | None = None
    samples_per_s: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ModeChange:
    """The record that changed the mode: its generation, and after which clock."""

    generation: int
    mode_clock: int


async def fetch_status(address: str, *, timeout_s: float) -> JobStatus:
    """Asks the coordinator where its job stands.

    Raises:
        CallError: It gave no answer, or refused.
        Refusal: The answer can't be read.
    """
    return status_of(await _fetch(address, timeout_s))


async def fetch_document(
    address: str, *, timeout_s: float
) -> tuple[JobStatus, Document]:
    """As `fetch_status`, with the document for programs."""
    response = await _fetch(address, timeout_s)
    return status_of(response), status_document(response, address)


async def poll_documents(
    address: str, *, interval_s: float, timeout_s: float
) -> AsyncGenerator[Document | CallError]:
    """Asks again and again on one connection; what it yields may be a failure."""
    async with aio_channel(address, ChannelKind.CONTROL) as channel:
        stub = cast("CoordinatorServiceAsyncStub", CoordinatorServiceStub(channel))
        request = pb.GetStatusRequest(protocol_version=PROTOCOL_VERSION)
        while True:
            try:
                with translated(f"the coordinator at {address}"):
                    response = await stub.GetStatus(request, timeout=timeout_s)
                    document = status_document(response, address)
            except CallError as error:
                yield error
            else:
                yield document
            await asyncio.sleep(interval_s)


async def fetch_history(address: str, *, timeout_s: float) -> Document:
    """Asks how the job has trained over time.

    Raises:
        CallError: It gave no answer, or refused.
    """
    async with _coordinator(address) as stub:
        response = await stub.GetHistory(
            pb.GetHistoryRequest(protocol_version=PROTOCOL_VERSION), timeout=timeout_s
        )
    return history_document(response)


async def watch_events(
    address: str, *, after: int, follow: bool
) -> AsyncGenerator[Document]:
    """Yields what has happened to a job after an event.

    Args:
        address: Of the coordinator.
        after: Number of the last event that is known, 0 for none.
        follow: Whether to go on with what happens.

    Raises:
        CallError: It gave no answer, refused, or answers no more.
    """
    request = pb.WatchEventsRequest(
        protocol_version=PROTOCOL_VERSION, after=after, follow=follow
    )
    async with (
        aio_channel(address, ChannelKind.CONTROL) as channel,
        calling(
            f"the coordinator at {address}",
            lambda: cast(
                "CoordinatorServiceAsyncStub", CoordinatorServiceStub(channel)
            ).WatchEvents(request),
        ) as call,
    ):
        async for message in call:
            for event in message.events:
                yield event_document(event)


async def _fetch(address: str, timeout_s: float) -> pb.GetStatusResponse:
    async with _coordinator(address) as stub:
        return await stub.GetStatus(
            pb.GetStatusRequest(protocol_version=PROTOCOL_VERSION), timeout=timeout_s
        )


async def change_mode(
    address: str, mode: Mode, staleness_bound: int, *, timeout_s: float
) -> ModeChange:
    """Changes the mode of a running job; returns when the record is written.

    Args:
        address: Of the coordinator.
        mode: The new mode.
        staleness_bound: In SSP, the largest lead, in clocks; else 0.
        timeout_s: Longest wait for the record.

    Raises:
        CallError: It gave no answer, or refused.
    """
    async with _coordinator(address) as stub:
        response = await stub.SetMode(
            pb.SetModeRequest(
                protocol_version=PROTOCOL_VERSION,
                mode=membership_pb2.Mode.ValueType(mode),
                staleness_bound=staleness_bound,
                timeout_ms=round(timeout_s * 1000),
            ),
            timeout=timeout_s + ANSWER_MARGIN_S,
        )
    return ModeChange(response.generation, response.mode_clock)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedProcess:
    """What one process has done in some steps.

    Attributes:
        name: Of the process, such as `worker w0` or `shard 1`.
        spans: In microseconds since 1970, by the coordinator's clock.
        clock_error_us: By how much they may be wrong there; None if it is not known.
        is_complete: Whether all steps are there.
        left_out_count: Spans that there was no room for.
    """

    name: str
    spans: tuple[Span, ...]
    clock_error_us: int | None
    is_complete: bool
    left_out_count: int


async def record_trace(
    address: str, step_count: int, *, timeout_s: float
) -> list[RecordedProcess]:
    """Has all workers and shards record their next steps; what each has recorded.

    Raises:
        CallError: It gave no answer, or refused.
    """
    request = pb.RecordTraceRequest(
        protocol_version=PROTOCOL_VERSION,
        step_count=step_count,
        timeout_ms=round(timeout_s * 1000),
    )
    deadline_s = timeout_s + ANSWER_MARGIN_S
    async with _coordinator(address) as stub:
        answer = await stub.RecordTrace(request, timeout=deadline_s)
    offset_us = answer.unix_offset_us
    return [_recorded_of(each, offset_us) for each in answer.processes]


def _recorded_of(process: pb.ProcessTrace, offset_us: int) -> RecordedProcess:
    recorded = process.recorded
    offset_us += recorded.clock_offset_us
    return RecordedProcess(
        name=process.name,
        spans=tuple(
            Span(
                kind=each.kind,
                begin_us=each.begin_us + offset_us,
                end_us=each.begin_us + each.duration_us + offset_us,
                step=each.step,
                lane=each.lane,
            )
            for each in recorded.spans
        ),
        clock_error_us=None if recorded.clock_error_us < 0 else recorded.clock_error_us,
        is_complete=recorded.is_complete,
        left_out_count=recorded.left_out_count,
    )


async def save_checkpoint(address: str, *, timeout_s: float) -> SavedCheckpoint:
    """Has a checkpoint made; returns when it is complete.

    Args:
        address: Of the coordinator.
        timeout_s: Longest wait for it.

    Raises:
        CallError: It gave no answer, or refused.
    """
    async with _coordinator(address) as stub:
        response = await stub.SaveCheckpoint(
            pb.SaveCheckpointRequest(
                protocol_version=PROTOCOL_VERSION,
                timeout_ms=round(timeout_s * 1000),
            ),
            timeout=timeout_s + ANSWER_MARGIN_S,
        )
    return _saved_of(response.saved)


async def restore_checkpoint(
    address: str, name: str, *, tries_only: bool, timeout_s: float
) -> CheckpointReturn:
    """Has a job return to a checkpoint, or asks what that would mean.

    Args:
        address: Of the coordinator.
        name: Which one; empty for the newest good one.
        tries_only: Whether nothing is to change.
        timeout_s: Longest wait.

    Raises:
        CallError: It gave no answer, or refused.
    """
    async with _coordinator(address) as stub:
        response = await stub.RestoreCheckpoint(
            pb.RestoreCheckpointRequest(
                protocol_version=PROTOCOL_VERSION,
                name=name,
                tries_only=tries_only,
                timeout_ms=round(timeout_s * 1000),
            ),
            timeout=timeout_s + ANSWER_MARGIN_S,
        )
    return CheckpointReturn(
        _saved_of(response.saved), response.lost_step_count, tuple(response.undone)
    )


@asynccontextmanager
async def _coordinator(address: str) -> AsyncIterator["CoordinatorServiceAsyncStub"]:
    """Calls to a coordinator, whose errors become `CallError`."""
    async with aio_channel(address, ChannelKind.CONTROL) as channel:
        with translated(f"the coordinator at {address}"):
            yield cast("CoordinatorServiceAsyncStub", CoordinatorServiceStub(channel))


def status_of(message: pb.GetStatusResponse) -> JobStatus:
    """Where a job stands.

    Raises:
        Refusal: `MALFORMED_MESSAGE` for a mode that only a newer release knows.
    """
    return JobStatus(
        settings=read_settings(message.settings),
        mode=known(Mode, message.mode),
        staleness_bound=message.staleness_bound,
        mode_clock=message.mode_clock,
        phase=phase_name(message.phase),
        generation=message.generation,
        workers_floor=message.workers_floor,
        evicted_count=message.evicted_count,
        workers=tuple(map(_worker_of, message.workers)),
        shards=tuple(map(_shard_of, message.shards)),
        waiting_for=message.waiting_for,
        snapshot_version=message.snapshot_version,
        tensor_count=message.tensor_count,
        parameter_bytes=message.parameter_bytes,
        failure=message.failure,
        clip_grad_norm=message.clip_grad_norm,
        compression=message.compression,
        splits=tuple(map(read_split, message.splits)),
        epochs=tuple(map(read_epoch, message.epochs)),
        checkpoints=(
            _checkpoints_of(message.checkpoints)
            if message.HasField("checkpoints")
            else None
        ),
        privacy=_privacy_of(message.privacy) if message.HasField("privacy") else None,
        diagnosis=message.diagnosis.sentence,
        steps_per_s=message.steps_per_s if message.HasField("steps_per_s") else None,
        samples_per_s=(
            message.samples_per_s if message.HasField("samples_per_s") else None
        ),
        metrics={each.name: each.value for each in message.metrics},
    )


def _privacy_of(message: pb.PrivacyStatus) -> PrivacyStatus:
    return PrivacyStatus(
        **{name: getattr(message, name) for name in PrivacyStatus.__slots__}
    )


def _checkpoints_of(message: pb.CheckpointStatus) -> CheckpointStatus:
    return CheckpointStatus(
        url=message.url,
        interval=message.interval,
        newest=_saved_of(message.newest) if message.HasField("newest") else None,
        failure=message.failure,
    )


def _saved_of(message: pb.SavedCheckpoint) -> SavedCheckpoint:
    return SavedCheckpoint(
        url=message.place.url,
        name=message.place.name,
        version=message.version,
        clock=message.clock,
        byte_count=message.byte_count,
        age_ms=message.age_ms,
    )


def _worker_of(message: pb.WorkerStatus) -> WorkerStatus:
    return WorkerStatus(
        worker_id=message.worker.worker_id,
        incarnation=message.worker.incarnation,
        rank=message.rank,
        state=known(WorkerState, message.state),
        clock=message.clock,
        lead=message.lead,
        silent_ms=message.silent_ms,
        step_ms=message.step_ms,
        address=message.address,
        shared_memory_shard_count=message.shared_memory_shard_count,
        brought_other=tuple(message.brought_other),
        unreached_shards=tuple(message.unreached_shards),
        gradients=GradientCounts(
            message.gradients.bad_count,
            message.gradients.clipped_count,
            message.gradients.left_out_count,
        ),
    )


def _shard_of(message: pb.ShardStatus) -> ShardStatus:
    is_waiting = message.HasField("waiting")
    return ShardStatus(
        shard_index=message.shard.shard_index,
        incarnation=message.shard.incarnation,
        state=message.state,
        address=message.shard.address,
        silent_ms=message.silent_ms,
        parameter_bytes=message.parameter_bytes,
        optimizer_bytes=message.optimizer_bytes,
        clock=message.applied_clock,
        frontier=message.frontier,
        version=message.version,
        queued_push_count=message.queued_push_count,
        torn_step_count=message.torn_step_count,
        staleness_counts=tuple(message.staleness_counts),
        waiting=messages.waiting_of(message.waiting) if is_waiting else None,
    )
