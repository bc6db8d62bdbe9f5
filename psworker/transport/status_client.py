"""Where a job stands, asked by a person's tools. No torch behind it."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, cast

from pswire.channels import ChannelKind, aio_channel
from pswire.limits import PROTOCOL_VERSION
from pswire.v1 import coordinator_service_pb2 as pb
from pswire.v1.coordinator_service_pb2_grpc import CoordinatorServiceStub
from psworker.transport import messages, values
from psworker.transport.call_error import translated

if TYPE_CHECKING:
    from pswire.v1.coordinator_service_pb2_grpc import CoordinatorServiceAsyncStub


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerState:
    """One worker; rank and `silent_ms` are -1 where there is none."""

    worker_id: str
    incarnation: int
    rank: int
    state: str
    clock: int
    silent_ms: int
    address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardState:
    """One shard; `silent_ms` is -1 if it was never heard of."""

    shard_index: int
    incarnation: int
    state: str
    address: str
    silent_ms: int
    parameter_bytes: int
    optimizer_bytes: int
    clock: int
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStatus:
    """Where a job stands.

    Attributes:
        settings: What is fixed when the coordinator starts.
        phase: `waiting`, `seeding`, `running`, `finished` or `failed`.
        generation: Newest generation.
        workers: All workers that are not gone.
        shards: All shards.
        waiting_for: Whom the job waits for, in words.
        snapshot_version: Version of the newest snapshot, -1 if none.
        tensor_count: Tensors of the job, 0 before the first worker.
        parameter_bytes: Bytes of parameters over all shards.
        failure: Why the job failed, else empty.
    """

    settings: values.JobSettings
    phase: str
    generation: int
    workers: tuple[WorkerState, ...]
    shards: tuple[ShardState, ...]
    waiting_for: str
    snapshot_version: int
    tensor_count: int
    parameter_bytes: int
    failure: str


_PHASES: Final = {
    pb.JOB_PHASE_WAITING: "waiting",
    pb.JOB_PHASE_SEEDING: "seeding",
    pb.JOB_PHASE_RUNNING: "running",
    pb.JOB_PHASE_FINISHED: "finished",
    pb.JOB_PHASE_FAILED: "failed",
}


async def fetch_status(address: str, *, timeout_s: float) -> JobStatus:
    """Asks the coordinator where its job stands.

    Raises:
        CallError: It gave no answer, or refused.
        Refusal: The answer can't be read.
    """
    async with aio_channel(address, ChannelKind.CONTROL) as channel:
        stub = cast("CoordinatorServiceAsyncStub", CoordinatorServiceStub(channel))
        with translated(f"the coordinator at {address}"):
            response = await stub.GetStatus(
                pb.GetStatusRequest(protocol_version=PROTOCOL_VERSION),
                timeout=timeout_s,
            )
    return _status_of(response)


def _status_of(message: pb.GetStatusResponse) -> JobStatus:
    return JobStatus(
        settings=messages.settings_of(message.settings),
        phase=_PHASES.get(message.phase, f"unknown ({message.phase})"),
        generation=message.generation,
        workers=tuple(
            WorkerState(
                worker_id=each.worker.worker_id,
                incarnation=each.worker.incarnation,
                rank=each.rank,
                state=each.state,
                clock=each.clock,
                silent_ms=each.silent_ms,
                address=each.address,
            )
            for each in message.workers
        ),
        shards=tuple(
            ShardState(
                shard_index=each.shard.shard_index,
                incarnation=each.shard.incarnation,
                state=each.state,
                address=each.shard.address,
                silent_ms=each.silent_ms,
                parameter_bytes=each.parameter_bytes,
                optimizer_bytes=each.optimizer_bytes,
                clock=each.applied_clock,
                version=each.version,
            )
            for each in message.shards
        ),
        waiting_for=message.waiting_for,
        snapshot_version=message.snapshot_version,
        tensor_count=message.tensor_count,
        parameter_bytes=message.parameter_bytes,
        failure=message.failure,
    )
