"""Calls to the coordinator."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar, cast

from typing_extensions import override

from pswire.channels import ChannelKind, aio_channel
from pswire.compression import Compression
from pswire.job_settings import JobSettings
from pswire.job_terms import JobTerms
from pswire.leased_data import DataReport, Origin, RecordedSplit
from pswire.limits import PROTOCOL_VERSION
from pswire.membership import WorkerKey
from pswire.membership_codec import (
    identity_message,
    read_epoch,
    read_identity,
    read_ranges,
    read_settings,
    read_split,
    report_fields,
    split_message,
)
from pswire.process_memory import resident_bytes
from pswire.reasons import ErrorReason, Refusal
from pswire.schema import OptimizerSpec
from pswire.schema_codec import (
    MergedModel,
    cut_model,
    optimizer_to_message,
    terms_fields,
)
from pswire.span_log import SpanLog
from pswire.v1 import coordinator_service_pb2 as pb
from pswire.v1.coordinator_service_pb2_grpc import CoordinatorServiceStub
from psworker.transport import messages, values
from psworker.transport.calls import calling, translated
from psworker.transport.ports import CoordinatorPort, Traffic

if TYPE_CHECKING:
    import grpc.aio

    from pswire.v1.coordinator_service_pb2_grpc import CoordinatorServiceAsyncStub

Request = TypeVar("Request")
Response = TypeVar("Response")


class ControlClient(CoordinatorPort):
    """Calls by gRPC. Made and used on the event loop."""

    def __init__(self, address: str) -> None:
        self.peer = f"the coordinator at {address}"
        self._channel = aio_channel(address, ChannelKind.CONTROL)
        self._stub = cast(
            "CoordinatorServiceAsyncStub", CoordinatorServiceStub(self._channel)
        )
        self._job_id = ""  # until registered
        self._process_id = ""

    @override
    async def close(self) -> None:
        await self._channel.close()

    @override
    async def register_worker(
        self, process_id: str, worker_id: str, *, timeout_s: float
    ) -> tuple[WorkerKey, JobSettings]:
        response = await self._call(
            self._stub.RegisterWorker,
            pb.RegisterWorkerRequest(
                protocol_version=PROTOCOL_VERSION,
                process_id=process_id,
                worker_id=worker_id,
            ),
            timeout_s,
        )
        self._job_id = response.settings.job_id
        self._process_id = process_id
        return (
            read_identity(response.worker),
            read_settings(response.settings),
        )

    @override
    async def lease_ttl_ms(self, *, timeout_s: float) -> int:
        request = pb.GetStatusRequest(protocol_version=PROTOCOL_VERSION)
        response = await self._call(self._stub.GetStatus, request, timeout_s)
        return response.settings.lease_ttl_ms

    @override
    async def watch_worker(
        self, worker: WorkerKey
    ) -> AsyncGenerator[values.WatchEvent, None]:
        request = pb.WatchWorkerRequest(
            job_id=self._job_id,
            worker=identity_message(worker),
            process_id=self._process_id,
        )
        async with calling(self.peer, lambda: self._stub.WatchWorker(request)) as call:
            async for message in call:
                event = messages.watch_event_of(message)
                if event is not None:
                    yield event

    @override
    async def join(
        self,
        worker: WorkerKey,
        terms: JobTerms,
        loaders: Sequence[str],
        *,
        values_digest: int = 0,
        state_digest: int = 0,
        timeout_s: float,
    ) -> values.JoinAnswer:
        request = pb.JoinRequest(
            job_id=self._job_id,
            worker=identity_message(worker),
            loaders=loaders,
            **terms_fields(terms),
            values_digest=values_digest,
            state_digest=state_digest,
        )
        with translated(self.peer):
            parts = list(cut_model(request))  # here: what it refuses ends no call
            response = await self._stub.Join(iter(parts), timeout=timeout_s)
        return values.JoinAnswer(
            tuple(response.order),
            tuple(response.notes),
            tuple(response.epochs),
            response.checkpoint,
            response.start_checkpoint,
            response.generation_before,
            tuple(response.are_new),
        )

    @override
    async def declare_optimizer(
        self, worker: WorkerKey, spec: OptimizerSpec, *, timeout_s: float
    ) -> None:
        await self._call(
            self._stub.DeclareOptimizer,
            pb.DeclareOptimizerRequest(
                job_id=self._job_id,
                worker=identity_message(worker),
                optimizer=optimizer_to_message(spec),
            ),
            timeout_s,
        )

    @override
    async def report_silence(
        self, worker: WorkerKey, silent_ms: Mapping[int, int], *, timeout_s: float
    ) -> None:
        shards = [
            pb.ShardSilence(shard_index=index, silent_ms=each)
            for index, each in sorted(silent_ms.items())
        ]
        await self._call(
            self._stub.ReportSilence,
            pb.ReportSilenceRequest(
                job_id=self._job_id,
                worker=identity_message(worker),
                shards=shards,
                process_id=self._process_id,
            ),
            timeout_s,
        )

    @override
    async def report_work(
        self,
        worker: WorkerKey,
        done: values.WorkDone,
        traffic: Traffic,
        compression: Compression,
        spans: SpanLog,
        *,
        timeout_s: float,
    ) -> None:
        _, compute_s, load_s, send_s, wait_s, idle_s = done.seconds
        encodings = {compression.push or "raw": [traffic.sent_bytes, 0]}
        received = encodings.setdefault(compression.pull or "raw", [0, 0])
        received[1] = traffic.received_bytes
        answer = await self._call(
            self._stub.ReportWork,
            pb.ReportWorkRequest(
                job_id=self._job_id,
                worker=identity_message(worker),
                process_id=self._process_id,
                step_count=done.step_count,
                sample_count=done.sample_count,
                compute_s=compute_s,
                load_s=load_s,
                send_s=send_s,
                wait_s=wait_s,
                idle_s=idle_s,
                activity=pb.Activity.ValueType(done.activity),
                activity_ms=round(done.activity_s * 1000),
                traffic=pb.Traffic(
                    sent_bytes=traffic.sent_bytes,
                    received_bytes=traffic.received_bytes,
                    encodings=[
                        pb.EncodedBytes(
                            encoding=name, sent_bytes=sent, received_bytes=got
                        )
                        for name, (sent, got) in encodings.items()
                    ],
                ),
                resident_bytes=resident_bytes(),
                round_step_count=done.round_step_count,
                steps_since_push=done.steps_since_push,
                fragment_under_way=done.fragment_under_way,
                metrics=[
                    pb.Metric(name=name, value=value, step=step)
                    for name, (value, step) in done.metrics.items()
                ],
                recorded=spans.report(),
            ),
            timeout_s,
        )
        spans.take_answer(answer.coordinator_us, answer.trace)

    @override
    async def leave(
        self,
        worker: WorkerKey,
        sequence: int,
        report: DataReport,
        *,
        signal_name: str = "",
        timeout_s: float,
    ) -> None:
        await self._call(
            self._stub.Leave,
            pb.LeaveRequest(
                job_id=self._job_id,
                worker=identity_message(worker),
                sequence=sequence,
                **report_fields(report),
                signal=signal_name,
                process_id=self._process_id,
            ),
            timeout_s,
        )

    @override
    async def open_epoch(
        self, worker: WorkerKey, request: values.EpochRequest, *, timeout_s: float
    ) -> Origin:
        response = await self._call(
            self._stub.OpenEpoch,
            pb.OpenEpochRequest(
                job_id=self._job_id,
                worker=identity_message(worker),
                loader=request.loader,
                epoch=request.epoch,
                position_count=request.shape.position_count,
                batch_size=request.shape.batch_size,
                drop_last=request.shape.drop_last,
                origin=request.origin,
                **report_fields(request.report),
            ),
            timeout_s,
        )
        if response.HasField("seed"):
            return response.seed
        return response.origin

    @override
    async def lease_data(
        self, worker: WorkerKey, request: values.LeaseRequest, *, timeout_s: float
    ) -> values.Lease:
        response = await self._call(
            self._stub.LeaseData,
            pb.LeaseDataRequest(
                job_id=self._job_id,
                worker=identity_message(worker),
                loader=request.loader,
                epoch=request.epoch,
                order_digest=request.order_digest,
                **report_fields(request.report),
                batch_count_max=request.batch_count_max,
                wait=request.wait,
            ),
            timeout_s,
        )
        return values.Lease(
            read_ranges(response.ranges),
            response.closed,
            read_epoch(response.account) if response.closed else None,
        )

    @override
    async def save_state(
        self, worker: WorkerKey, snapshot_id: int, state: bytes, *, timeout_s: float
    ) -> None:
        await self._call(
            self._stub.SaveState,
            pb.SaveStateRequest(
                job_id=self._job_id,
                worker=identity_message(worker),
                process_id=self._process_id,
                snapshot_id=snapshot_id,
                state=state,
            ),
            timeout_s,
        )

    @override
    async def load_state(
        self, worker: WorkerKey, checkpoint: str, *, timeout_s: float
    ) -> bytes:
        response = await self._call(
            self._stub.LoadState,
            pb.LoadStateRequest(
                job_id=self._job_id,
                worker=identity_message(worker),
                checkpoint=checkpoint,
            ),
            timeout_s,
        )
        return response.state

    @override
    async def record_split(
        self, worker: WorkerKey, split: RecordedSplit, *, timeout_s: float
    ) -> RecordedSplit:
        response = await self._call(
            self._stub.RecordSplit,
            pb.RecordSplitRequest(
                job_id=self._job_id,
                worker=identity_message(worker),
                split=split_message(split),
            ),
            timeout_s,
        )
        return read_split(response.recorded)

    @override
    async def list_splits(
        self, name: str = "", *, timeout_s: float
    ) -> tuple[RecordedSplit, ...]:
        response = await self._call(
            self._stub.ListSplits,
            pb.ListSplitsRequest(protocol_version=PROTOCOL_VERSION, name=name),
            timeout_s,
        )
        return tuple(map(read_split, response.splits))

    @override
    async def request_snapshot(
        self, newer_than: int, *, wait_s: float, timeout_s: float
    ) -> values.PinnedSnapshot:
        request = pb.RequestSnapshotRequest(
            protocol_version=PROTOCOL_VERSION,
            newer_than=newer_than,
            timeout_ms=int(wait_s * 1000),
        )
        merged: MergedModel[pb.RequestSnapshotResponse] | None = None
        async with calling(
            self.peer, lambda: self._stub.RequestSnapshot(request, timeout=timeout_s)
        ) as call:
            async for part in call:
                if merged is None:
                    merged = MergedModel(part)
                else:
                    merged.add(part)
        if merged is None:
            raise Refusal(
                ErrorReason.MALFORMED_MESSAGE,
                f"{self.peer} answered a request for a snapshot without one",
            )
        return messages.snapshot_of(merged.message)

    @override
    async def release_snapshot(
        self, snapshot_id: int, pin_id: int, *, timeout_s: float
    ) -> None:
        await self._call(
            self._stub.ReleaseSnapshot,
            pb.ReleaseSnapshotRequest(snapshot_id=snapshot_id, pin_id=pin_id),
            timeout_s,
        )

    async def _call(
        self,
        method: "grpc.aio.UnaryUnaryMultiCallable[Request, Response]",
        request: Request,
        timeout_s: float,
    ) -> Response:
        with translated(self.peer):
            response: Response = await method(request, timeout=timeout_s)
            return response
