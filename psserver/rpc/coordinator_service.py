"""Control plane of a job: messages to core calls and back."""

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar
from urllib.parse import unquote

import grpc
from google.protobuf.message import Message

from psserver.core.coordinator_effects import (
    EndJob,
)
from psserver.core.effects import FenceReport, WorkerHolding
from psserver.core.ledger import EpochShape
from psserver.core.roster import GONE, WorkerEntry, WorkerState
from psserver.core.shard_map import ShardSlot
from psserver.host.coordinator_host import CoordinatorHost
from psserver.rpc.guard import Context, reader, streaming, unary
from psserver.rpc.identity_codec import check_protocol, read_ranges, worker_key
from psserver.rpc.record_codec import (
    address_message,
    identity_message,
    read_identity,
    settings_message,
)
from psserver.rpc.status_report import status_message
from psserver.rpc.watch_codec import (
    shard_event,
    shard_view,
    worker_event,
    worker_view,
)
from pswire.limits import NAME_BYTES_MAX, WAITING_INTERVAL_MS
from pswire.reasons import ErrorReason, Refusal
from pswire.schema_codec import (
    optimizer_from_message,
    schema_from_message,
    schema_to_message,
)
from pswire.v1 import coordinator_service_pb2 as messages
from pswire.v1 import push_pb2

SERVICE = "pswire.v1.CoordinatorService"

BATCH_COUNT_MAX = 1024
"""Most batches that one call leases."""

LOADER_COUNT_MAX = 256
"""Most loaders that one worker names."""


ShardRequest = (
    messages.WatchShardRequest
    | messages.ReportFenceRequest
    | messages.ReportCutRequest
    | messages.ReportProgressRequest
)

WorkerRequest = (
    messages.WatchWorkerRequest
    | messages.JoinRequest
    | messages.LeaveRequest
    | messages.OpenEpochRequest
    | messages.LeaseDataRequest
)

Request = TypeVar("Request", bound=Message)
Response = TypeVar("Response", bound=Message)


class CoordinatorService:
    """Handlers of the coordinator."""

    def __init__(self, host: CoordinatorHost) -> None:
        self._host = host

    def handler(self) -> grpc.GenericRpcHandler:
        """Handlers by method name."""
        return grpc.method_handlers_generic_handler(
            SERVICE,
            {
                "RegisterShard": _answered(
                    self.register_shard, messages.RegisterShardRequest
                ),
                "WatchShard": _streamed(self.watch_shard, messages.WatchShardRequest),
                "ReportFence": _answered(
                    self.report_fence, messages.ReportFenceRequest
                ),
                "ReportCut": _answered(self.report_cut, messages.ReportCutRequest),
                "ReportProgress": _answered(
                    self.report_progress, messages.ReportProgressRequest
                ),
                "RegisterWorker": _answered(
                    self.register_worker, messages.RegisterWorkerRequest
                ),
                "WatchWorker": _streamed(
                    self.watch_worker, messages.WatchWorkerRequest
                ),
                "Join": _answered(self.join, messages.JoinRequest),
                "Leave": _answered(self.leave, messages.LeaveRequest),
                "OpenEpoch": _answered(self.open_epoch, messages.OpenEpochRequest),
                "LeaseData": _answered(self.lease_data, messages.LeaseDataRequest),
                "RequestSnapshot": _answered(
                    self.request_snapshot, messages.RequestSnapshotRequest
                ),
                "ReleaseSnapshot": _answered(
                    self.release_snapshot, messages.ReleaseSnapshotRequest
                ),
                "GetStatus": _answered(self.get_status, messages.GetStatusRequest),
            },
        )

    # Shards

    async def register_shard(
        self, request: messages.RegisterShardRequest, context: Context
    ) -> messages.RegisterShardResponse:
        """Gives a shard its index and incarnation."""
        check_protocol(request.protocol_version)
        if not request.process_id or not request.address:
            raise Refusal(
                ErrorReason.MALFORMED_MESSAGE, "process_id or address is empty"
            )
        slot = self._host.register_shard(
            process_id=request.process_id, address=request.address
        )
        return messages.RegisterShardResponse(
            shard_index=slot.index,
            incarnation=slot.incarnation,
            settings=settings_message(self._host.core.settings),
        )

    async def watch_shard(
        self, request: messages.WatchShardRequest, context: Context
    ) -> AsyncIterator[messages.WatchShardResponse]:
        """Follows the job as a shard, from the whole current state on."""
        host = self._host
        slot = self._slot(request)
        # Opened first: what happens while the view is on its way is in the queue.
        queue = host.open_shard_watch(slot)
        try:
            yield messages.WatchShardResponse(view=shard_view(host.core))
            while True:
                event = await queue.get()
                response = shard_event(host.core, event)
                if response is not None:
                    yield response
                if isinstance(event, EndJob):
                    return  # nothing follows, and a shard ends when its watch does
        finally:
            host.close_shard_watch(slot, queue)

    async def report_fence(
        self, request: messages.ReportFenceRequest, context: Context
    ) -> messages.ReportFenceResponse:
        """Takes a shard's answer to a fence."""
        core = self._host.core
        slot = self._slot(request)
        report = FenceReport(
            fence_number=request.fence_number,
            holdings=tuple(
                WorkerHolding(
                    worker=read_identity(holding.worker),
                    complete_clock=holding.complete_clock,
                )
                for holding in request.workers
            ),
            trailer_clock_max=request.trailer_clock_max,
            touched_clock_max=request.touched_clock_max,
            applied_clock=request.applied_clock,
            skip_clocks=tuple(request.skip_clocks),
        )
        core.report_fence(slot, report, self._host.now_ms())
        self._host.pump()
        return messages.ReportFenceResponse()

    async def report_cut(
        self, request: messages.ReportCutRequest, context: Context
    ) -> messages.ReportCutResponse:
        """Takes word that a shard's part of a snapshot is ready, or failed."""
        core = self._host.core
        slot = self._slot(request)
        core.report_cut(slot, request.snapshot_id, request.failure, self._host.now_ms())
        self._host.pump()
        return messages.ReportCutResponse()

    async def report_progress(
        self, request: messages.ReportProgressRequest, context: Context
    ) -> messages.ReportProgressResponse:
        """Takes word where a shard stands."""
        slot = self._slot(request)
        slot.heard_ms = self._host.now_ms()
        slot.applied_clock = request.applied_clock
        slot.version = request.version
        slot.parameter_bytes = request.parameter_bytes
        slot.optimizer_bytes = request.optimizer_bytes
        slot.waiting_for = tuple(
            (item.name, item.clock, item.silent_ms) for item in request.waiting.awaited
        )
        slot.waited_ms = request.waiting.waited_ms
        return messages.ReportProgressResponse()

    # Workers

    async def register_worker(
        self, request: messages.RegisterWorkerRequest, context: Context
    ) -> messages.RegisterWorkerResponse:
        """Gives a worker its id and incarnation."""
        check_protocol(request.protocol_version)
        entry = self._host.register_worker(
            process_id=request.process_id,
            worker_id=request.worker_id,
            address=_peer(context),
        )
        return messages.RegisterWorkerResponse(
            worker=identity_message(entry.worker),
            settings=settings_message(self._host.core.settings),
        )

    async def watch_worker(
        self, request: messages.WatchWorkerRequest, context: Context
    ) -> AsyncIterator[messages.WatchWorkerResponse]:
        """Follows the job as a worker; the stream is its sign of life."""
        host = self._host
        entry = self._entry(request)
        # Opened first: what happens while the view is on its way is in the queue.
        queue = host.open_worker_watch(entry)
        try:
            yield messages.WatchWorkerResponse(view=worker_view(host.core))
            began_ms = host.now_ms()
            while True:
                waited_s = WAITING_INTERVAL_MS / 1000
                has_event = await host.next_event(queue, waited_s)
                if has_event:
                    event = queue.get_nowait()
                    response = worker_event(host.core, event)
                    if response is not None:
                        yield response
                    if isinstance(event, EndJob):
                        return
                elif entry.state is WorkerState.JOINING:
                    waiting = push_pb2.Waiting(
                        waited_ms=host.now_ms() - began_ms,
                        reason=host.core.waiting_for() or "a fence to be decided",
                    )
                    yield messages.WatchWorkerResponse(waiting=waiting)
        finally:
            host.close_worker_watch(entry, queue)

    async def join(
        self, request: messages.JoinRequest, context: Context
    ) -> messages.JoinResponse:
        """Queues a worker for membership."""
        entry = self._entry(request)
        schema = schema_from_message(request.schema)
        optimizers = tuple(
            optimizer_from_message(optimizer, schema)
            for optimizer in request.optimizers
        )
        if len(request.loaders) > LOADER_COUNT_MAX:
            raise Refusal(
                ErrorReason.LIMIT_EXCEEDED,
                f"{len(request.loaders)} loaders, the limit is {LOADER_COUNT_MAX}",
            )
        for loader in request.loaders:
            _check_name(loader)
        self._host.core.join(
            entry,
            schema=schema,
            optimizers=optimizers,
            loaders=tuple(request.loaders),
            now_ms=self._host.now_ms(),
        )
        self._host.pump()
        return messages.JoinResponse()

    async def leave(
        self, request: messages.LeaveRequest, context: Context
    ) -> messages.LeaveResponse:
        """Ends a membership."""
        entry = self._entry(request)
        if request.sequence < 0:
            raise Refusal(ErrorReason.MALFORMED_MESSAGE, "sequence is negative")
        await self._host.leave(
            entry, sequence=request.sequence, consumed=read_ranges(request.consumed)
        )
        return messages.LeaveResponse()

    # Data

    async def open_epoch(
        self, request: messages.OpenEpochRequest, context: Context
    ) -> messages.OpenEpochResponse:
        """Opens an epoch of a loader."""
        entry = self._member(request)
        _check_name(request.loader)
        if request.epoch < 0:
            raise Refusal(ErrorReason.MALFORMED_MESSAGE, "epoch is negative")
        seed = self._host.open_epoch(
            entry,
            request.loader,
            request.epoch,
            EpochShape(
                position_count=request.position_count,
                batch_size=request.batch_size,
                drop_last=request.drop_last,
            ),
            read_ranges(request.consumed),
        )
        return messages.OpenEpochResponse(seed=seed)

    async def lease_data(
        self, request: messages.LeaseDataRequest, context: Context
    ) -> messages.LeaseDataResponse:
        """Leases ranges of an epoch."""
        entry = self._member(request)
        if not 1 <= request.batch_count_max <= BATCH_COUNT_MAX:
            raise Refusal(
                ErrorReason.MALFORMED_MESSAGE,
                f"batch_count_max {request.batch_count_max} is not in 1 to "
                f"{BATCH_COUNT_MAX}",
            )
        ledger = self._host.core.ledger.register_order(
            entry.worker, request.loader, request.epoch, request.order_digest
        )
        self._host.consume(entry, read_ranges(request.consumed))
        leased = await self._host.lease(
            entry, ledger, count_max=request.batch_count_max, wait=request.wait
        )
        return messages.LeaseDataResponse(
            ranges=[
                push_pb2.DataRange(
                    loader=piece.loader,
                    epoch=piece.epoch,
                    start=piece.start,
                    stop=piece.stop,
                )
                for piece in leased
            ],
            closed=ledger.is_closed,
        )

    # Readers and people

    async def request_snapshot(
        self, request: messages.RequestSnapshotRequest, context: Context
    ) -> messages.RequestSnapshotResponse:
        """Finds or makes a snapshot newer than a version."""
        check_protocol(request.protocol_version)
        core = self._host.core
        pinned = await self._host.snapshot(
            newer_than=request.newer_than, timeout_s=max(0, request.timeout_ms) / 1000
        )
        assert core.model.schema is not None
        return messages.RequestSnapshotResponse(
            job_id=core.settings.job_id,
            snapshot_id=pinned.entry.snapshot_id,
            version=pinned.entry.version,
            clock=pinned.entry.clock,
            generation=pinned.entry.generation,
            shards=[address_message(slot) for slot in core.shards.slots],
            schema=schema_to_message(core.model.schema),
            pin_ttl_ms=core.settings.pin_ttl_ms,
            pin_id=pinned.pin_id,
        )

    async def release_snapshot(
        self, request: messages.ReleaseSnapshotRequest, context: Context
    ) -> messages.ReleaseSnapshotResponse:
        """Ends a reader's pin."""
        self._host.release_snapshot(request.snapshot_id, request.pin_id)
        return messages.ReleaseSnapshotResponse()

    async def get_status(
        self, request: messages.GetStatusRequest, context: Context
    ) -> messages.GetStatusResponse:
        """Tells where the job stands."""
        check_protocol(request.protocol_version)
        return status_message(self._host.core, self._host.now_ms())

    # Inside

    def _slot(self, request: ShardRequest) -> ShardSlot:
        self._check_job(request.job_id)
        slots = self._host.core.shards
        return slots.slot(request.shard_index, request.incarnation)

    def _entry(self, request: WorkerRequest) -> WorkerEntry:
        self._check_job(request.job_id)
        return self._host.core.roster.entry(worker_key(request.worker))

    def _member(self, request: WorkerRequest) -> WorkerEntry:
        entry = self._entry(request)
        if entry.state in (*GONE, WorkerState.REGISTERED, WorkerState.JOINING):
            raise Refusal(
                ErrorReason.NOT_STARTED,
                f"{entry.worker} is {entry.state.value}, data is leased to members",
            )
        return entry

    def _check_job(self, job_id: str) -> None:
        """Refuses who has outlived an earlier job at this address.

        Worker ids, shard indexes and incarnations begin anew in every job.

        Raises:
            Refusal: `JOB_UNKNOWN`.
        """
        own = self._host.core.settings.job_id
        if job_id != own:
            raise Refusal(
                ErrorReason.JOB_UNKNOWN,
                f"the caller belongs to job {job_id[:64]!r}, this is job {own!r}",
            )


def _check_name(name: str) -> None:
    if not 0 < len(name.encode()) <= NAME_BYTES_MAX:
        raise Refusal(
            ErrorReason.MALFORMED_MESSAGE,
            f"loader {name[:64]!r} is empty or longer than {NAME_BYTES_MAX} bytes",
        )


def _peer(context: Context) -> str:
    """Where the call comes from, as `HOST:PORT`."""
    peer = unquote(str(context.peer()))
    return peer.removeprefix("ipv4:").removeprefix("ipv6:")


def _answered(
    handler: Callable[[Request, Context], Awaitable[Response]],
    request_type: type[Request],
) -> "grpc.RpcMethodHandler[Request, Response]":
    """A method that takes one request and gives one answer."""
    return grpc.unary_unary_rpc_method_handler(
        unary(handler),
        request_deserializer=reader(request_type),
        response_serializer=_serialized,
    )


def _streamed(
    handler: Callable[[Request, Context], AsyncIterator[Response]],
    request_type: type[Request],
) -> "grpc.RpcMethodHandler[Request, Response]":
    """A method that takes one request and gives a stream of answers."""
    return grpc.unary_stream_rpc_method_handler(
        streaming(handler),
        request_deserializer=reader(request_type),
        response_serializer=_serialized,
    )


def _serialized(message: Message) -> bytes:
    return message.SerializeToString()
