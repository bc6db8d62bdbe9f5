"""A shard's calls to its coordinator.

The watch is opened again whenever it breaks, and reports are sent until they are
taken, so that a coordinator's restart costs a shard nothing but time.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar, cast

import grpc
import grpc.aio

from psserver.core.effects import FenceReport
from psserver.core.record import FenceKind
from psserver.host.shard_host import CutReport, ShardHost
from psserver.rpc.push_codec import waiting_message
from psserver.rpc.record_codec import identity_message, read_identity, read_record
from pswire.error_details import is_decided, refusal_from_rpc_error
from pswire.limits import PROTOCOL_VERSION, WAITING_INTERVAL_MS
from pswire.placement import place
from pswire.reasons import ErrorReason, Refusal
from pswire.schema_codec import optimizer_from_message, schema_from_message
from pswire.v1 import coordinator_service_pb2 as messages
from pswire.v1.coordinator_service_pb2_grpc import CoordinatorServiceStub

if TYPE_CHECKING:
    from pswire.v1.coordinator_service_pb2_grpc import CoordinatorServiceAsyncStub

CALL_TIMEOUT_S = 2.0
"""Deadline of a unary call: the coordinator answers at once or not at all."""

RETRY_S = 0.1
"""Wait before a call is made again. Below the grace in which a broken watch must be
back."""

PROGRESS_INTERVAL_S = 1.0

log = logging.getLogger("psserver.shard")

Response = TypeVar("Response")


class CoordinatorClient:
    """The coordinator as a shard sees it."""

    def __init__(self, channel: grpc.aio.Channel, address: str) -> None:
        # One class serves both kinds of channel; only its stub file tells them apart.
        self._stub = cast(
            "CoordinatorServiceAsyncStub", CoordinatorServiceStub(channel)
        )
        self._address = address

    async def register(
        self, *, process_id: str, address: str
    ) -> messages.RegisterShardResponse:
        """Asks for a place until there is one, saying whom it waits for.

        Raises:
            Refusal: The coordinator does not want this shard.
        """
        request = messages.RegisterShardRequest(
            protocol_version=PROTOCOL_VERSION, process_id=process_id, address=address
        )
        return await self._until_answered(
            lambda: self._stub.RegisterShard(request, timeout=CALL_TIMEOUT_S)
        )

    async def serve(self, host: ShardHost) -> None:
        """Does all that a shard owes its coordinator, until the job ends.

        Raises:
            Refusal: This start of the shard is not wanted any more.
        """
        try:
            async with asyncio.TaskGroup() as duties:
                reports = duties.create_task(self.send_reports(host))
                progress = duties.create_task(self.send_progress(host))
                try:
                    await self.follow(host)
                finally:
                    reports.cancel()
                    progress.cancel()
        except ExceptionGroup as group:
            # Whichever came first: the others are its company.
            raise group.exceptions[0] from None

    async def follow(self, host: ShardHost) -> None:
        """Follows the job until it ends.

        Raises:
            Refusal: This start of the shard is not wanted any more.
        """
        request = messages.WatchShardRequest(
            job_id=host.job_id,
            shard_index=host.shard_index,
            incarnation=host.incarnation,
        )
        outage = _Outage(self._address)
        while not host.end_reason:
            why = "it ended the watch"
            try:
                async for event in self._stub.WatchShard(request):
                    outage.end()
                    _take_event(host, event)
            except grpc.aio.AioRpcError as error:
                _raise_if_decided(error)
                why = error.details() or error.code().name
            if not host.end_reason:
                outage.note(why)
                await asyncio.sleep(RETRY_S)

    async def send_reports(self, host: ShardHost) -> None:
        """Sends reports in order, each until it is taken."""
        while True:
            await self._send_report(host, await host.outbox.get())

    async def send_progress(self, host: ShardHost) -> None:
        """Tells where the shard stands, every second; a lost one does not matter."""
        clock, since_ms = -1, host.now_ms()
        while True:
            await asyncio.sleep(PROGRESS_INTERVAL_S)
            if not host.has_model or host.end_reason:
                continue
            model = host.model
            if model.core.clocks.applied_clock != clock:
                clock, since_ms = model.core.clocks.applied_clock, host.now_ms()
            request = messages.ReportProgressRequest(
                job_id=host.job_id,
                shard_index=host.shard_index,
                incarnation=host.incarnation,
                applied_clock=clock,
                version=model.core.clocks.version,
                parameter_bytes=model.engine.byte_count,
                optimizer_bytes=model.engine.state_byte_count,
            )
            waited_ms = host.now_ms() - since_ms
            if waited_ms >= WAITING_INTERVAL_MS:
                request.waiting.CopyFrom(waiting_message(host, waited_ms))
            try:
                await self._stub.ReportProgress(request, timeout=CALL_TIMEOUT_S)
            except grpc.aio.AioRpcError as error:
                log.debug("progress was not taken: %s", error.details())

    async def _send_report(
        self, host: ShardHost, report: FenceReport | CutReport
    ) -> None:
        if isinstance(report, FenceReport):
            fence = _fence_request(host, report)
            await self._until_answered(
                lambda: self._stub.ReportFence(fence, timeout=CALL_TIMEOUT_S)
            )
        else:
            cut = _cut_request(host, report)
            await self._until_answered(
                lambda: self._stub.ReportCut(cut, timeout=CALL_TIMEOUT_S)
            )

    async def _until_answered(
        self, call: Callable[[], Awaitable[Response]]
    ) -> Response:
        outage = _Outage(self._address)
        while True:
            try:
                return await call()
            except grpc.aio.AioRpcError as error:
                _raise_if_decided(error)
                outage.note(error.details() or error.code().name)
                await asyncio.sleep(RETRY_S)


class _Outage:
    """Says that the coordinator does not answer: at first, then every few seconds."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._began_s: float | None = None
        self._said_s = 0.0

    def note(self, why: str) -> None:
        """An attempt has failed."""
        now_s = time.monotonic()
        is_first = self._began_s is None
        if self._began_s is None:
            self._began_s = now_s
        if is_first or now_s - self._said_s >= WAITING_INTERVAL_MS / 1000:
            self._said_s = now_s
            log.warning(
                "waiting for the coordinator at %s for %.0f s: %s",
                self._address,
                now_s - self._began_s,
                why,
            )

    def end(self) -> None:
        """It answers."""
        self._began_s = None


def _raise_if_decided(error: grpc.aio.AioRpcError) -> None:
    refusal = refusal_from_rpc_error(error)
    if refusal is not None and is_decided(error.code()):
        raise refusal from error
    if error.code() is grpc.StatusCode.UNIMPLEMENTED:
        raise Refusal(
            ErrorReason.PROTOCOL_VERSION,
            "what answers there is not a paramserver coordinator of this release",
        ) from error


def _take_event(host: ShardHost, event: messages.WatchShardResponse) -> None:
    match event.WhichOneof("event"):
        case "view":
            _take_view(host, event.view)
        case "prepare":
            prepare = event.prepare
            seeder = (
                read_identity(prepare.seeder) if prepare.HasField("seeder") else None
            )
            host.prepare_fence(prepare.fence_number, FenceKind(prepare.kind), seeder)
        case "record":
            host.install_record(read_record(event.record))
        case "abort":
            host.abort_fence(event.abort.fence_number)
        case "cut":
            cut = event.cut
            host.decide_cut(cut.fence_number, cut.snapshot_id, cut.clock)
        case "release":
            host.release_image(event.release.snapshot_id)
        case "end":
            host.fail(event.end.reason)


def _take_view(host: ShardHost, view: messages.ShardView) -> None:
    if not view.HasField("schema"):
        return
    schema = schema_from_message(view.schema)
    host.adopt(
        schema,
        place(schema, host.shard_count),
        tuple(optimizer_from_message(o, schema) for o in view.optimizers),
    )
    if view.HasField("record"):
        host.install_record(read_record(view.record))
    host.abort_fence(view.fence_closed_number)
    host.release_images_up_to(view.snapshot_closed_id)


def _fence_request(host: ShardHost, report: FenceReport) -> messages.ReportFenceRequest:
    return messages.ReportFenceRequest(
        job_id=host.job_id,
        fence_number=report.fence_number,
        shard_index=host.shard_index,
        incarnation=host.incarnation,
        workers=[
            messages.WorkerReport(
                worker=identity_message(holding.worker),
                complete_clock=holding.complete_clock,
            )
            for holding in report.holdings
        ],
        trailer_clock_max=report.trailer_clock_max,
        touched_clock_max=report.touched_clock_max,
        applied_clock=report.applied_clock,
        skip_clocks=report.skip_clocks,
    )


def _cut_request(host: ShardHost, report: CutReport) -> messages.ReportCutRequest:
    return messages.ReportCutRequest(
        job_id=host.job_id,
        snapshot_id=report.snapshot_id,
        shard_index=host.shard_index,
        incarnation=host.incarnation,
        failure=report.failure,
    )
