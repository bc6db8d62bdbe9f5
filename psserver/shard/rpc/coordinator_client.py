"""A shard's calls to its coordinator.

The watch is opened again whenever it breaks, and reports are sent until they are
taken, so that a coordinator's restart costs a shard nothing but time.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection
from functools import partial
from typing import TYPE_CHECKING, TypeVar, cast

import grpc
import grpc.aio

from psserver.edge.cut_codec import cut_request, part_request, read_place
from psserver.edge.cut_report import CutReport
from psserver.edge.fence_codec import fence_request
from psserver.edge.fence_report import FenceReport
from psserver.edge.file_calls import in_thread
from psserver.edge.lifecycle import LAST_CHECKPOINT_S
from psserver.edge.memory_grant import MemoryGrant
from psserver.shard.core.shard_fence import Cut
from psserver.shard.host.shard_host import Report, ShardHost
from psserver.shard.rpc.coordinator_outage import Outage, Silence
from psserver.shard.rpc.progress_report import ProgressReport
from pswire.addresses import parse_address
from pswire.error_details import is_decided, plain_details, refusal_from_rpc_error
from pswire.limits import PROTOCOL_VERSION
from pswire.membership import CutPurpose, FenceKind
from pswire.membership_codec import read_identity, read_record, read_sequences
from pswire.reasons import ACCESS_REFUSALS, ErrorReason, Refusal
from pswire.schema_codec import MergedModel, read_terms
from pswire.security.certificates import certificates_of
from pswire.security.credentials import Credentials
from pswire.security.tls_problem import handshake_problem
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

_GONE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
"""How calls end whose coordinator is not there, or ends while they run."""

NOTHING_RECORDED = messages.RecordedSpans()

log = logging.getLogger("psserver.shard")

Response = TypeVar("Response")
Request = (
    messages.ReportFenceRequest
    | messages.ReportCutRequest
    | messages.ReportCheckpointRequest
)


class CoordinatorClient:
    """The coordinator as a shard sees it.

    Attributes:
        progress: What the shard reports each second; None before it serves.
    """

    def __init__(self, channel: grpc.aio.Channel, address: str) -> None:
        # One class serves both kinds of channel; only its stub file tells them apart.
        self._stub = cast(
            "CoordinatorServiceAsyncStub", CoordinatorServiceStub(channel)
        )
        self._address = address
        self._process_id = ""
        self.progress: ProgressReport | None = None

    async def register(
        self,
        *,
        process_id: str,
        address: str,
        memory: MemoryGrant,
        wanted_index: int | None = None,
    ) -> messages.RegisterShardResponse:
        """Asks for a place until there is one, saying whom it waits for.

        Args:
            process_id: Unique to this process.
            address: Where workers reach it.
            memory: What it may use.
            wanted_index: Place that it asks for, None for any.

        Raises:
            Refusal: The coordinator does not want this shard.
        """
        self._process_id = process_id
        request = messages.RegisterShardRequest(
            protocol_version=PROTOCOL_VERSION,
            process_id=process_id,
            address=address,
            memory_bytes=memory.byte_count,
            memory_scope=memory.scope,
            wanted_index=wanted_index,
        )
        return await self._until_answered(
            lambda: self._stub.RegisterShard(request, timeout=CALL_TIMEOUT_S),
            # Later its credential may be replaced, and it has values to keep.
            and_raises=ACCESS_REFUSALS,
        )

    async def serve(self, host: ShardHost) -> None:
        """Does all that a shard owes its coordinator, until the job ends.

        Raises:
            Refusal: This start of the shard is not wanted any more.
        """
        silence = Silence(host)
        try:
            async with asyncio.TaskGroup() as duties:
                reports = duties.create_task(self._send_reports(host, silence))
                progress = duties.create_task(self._send_progress(host, silence))
                try:
                    await self._follow(host, silence)
                finally:
                    reports.cancel()
                    progress.cancel()
        except ExceptionGroup as group:
            # Whichever came first: the others are its company.
            raise group.exceptions[0] from None
        finally:
            silence.close()

    async def drain(self, host: ShardHost) -> None:
        """Has the coordinator make a checkpoint with what this shard holds.

        Returns when there is one, when the job makes none, or none can be made. While
        it waits the shard goes on as before.
        """
        if not host.has_model or host.end_reason:
            return
        request = messages.DrainShardRequest(
            job_id=host.job_id,
            shard_index=host.shard_index,
            incarnation=host.incarnation,
            process_id=self._process_id,
        )
        try:
            await self._stub.DrainShard(
                request, timeout=LAST_CHECKPOINT_S + CALL_TIMEOUT_S
            )
        except grpc.aio.AioRpcError as error:
            if error.code() in _GONE:
                log.info(
                    "the coordinator has ended before this shard, which asks nobody "
                    "for a last checkpoint"
                )
            else:
                log.warning("no last checkpoint: %s", error.details())

    async def _follow(self, host: ShardHost, silence: Silence) -> None:
        """Follows the job until it ends.

        Raises:
            Refusal: This start of the shard is not wanted any more.
        """
        request = messages.WatchShardRequest(
            job_id=host.job_id,
            shard_index=host.shard_index,
            incarnation=host.incarnation,
            process_id=self._process_id,
        )
        outage = Outage(self._address)
        while not host.end_reason:
            why = "it ended the watch"
            views = _Views()
            try:
                async for event in self._stub.WatchShard(request):
                    outage.end()
                    if event.HasField("view"):
                        views.take(host, event.view)
                    else:
                        _take_event(host, event)
                    silence.opened()
            except grpc.aio.AioRpcError as error:
                _raise_if_decided(error)
                why = await _why(self._address, error)
            silence.broke()
            host.coordinator_lost()
            if not host.end_reason:
                outage.note(why)
                await asyncio.sleep(RETRY_S)

    async def _send_reports(self, host: ShardHost, silence: Silence) -> None:
        """Sends reports in order, each until it is taken."""
        while True:
            await self._send_report(host, await host.outbox.get())
            silence.heard()

    async def _send_progress(self, host: ShardHost, silence: Silence) -> None:
        """Reports where the shard stands, every second; a lost one does not matter."""
        report = self.progress = ProgressReport(host)
        while True:
            await asyncio.sleep(PROGRESS_INTERVAL_S)
            if not host.has_model or host.end_reason:
                continue
            request = report.message()
            request.process_id = self._process_id
            request.recorded.MergeFrom(host.spans.report() or NOTHING_RECORDED)
            try:
                answer = await self._stub.ReportProgress(
                    request, timeout=CALL_TIMEOUT_S
                )
                silence.heard()
                report.taken(request)
                host.spans.take_answer(answer.coordinator_us, answer.trace)
                host.note_lost(
                    {read_identity(each.worker): each.lost_ms for each in answer.lost},
                    coordinator_wait=answer.coordinator_wait,
                )
            except grpc.aio.AioRpcError as error:
                log.debug("progress was not taken: %s", error.details())

    async def _send_report(self, host: ShardHost, report: Report) -> None:
        stub = self._stub
        if isinstance(report, FenceReport):
            await self._send(host, stub.ReportFence, fence_request(report))
        elif isinstance(report, CutReport):
            await self._send(host, stub.ReportCut, cut_request(report))
        else:
            await self._send(host, stub.ReportCheckpoint, part_request(report))

    async def _send(
        self, host: ShardHost, call: Callable[..., Awaitable[object]], request: Request
    ) -> None:
        """Sends a report of this start of the shard until it is taken."""
        request.job_id = host.job_id
        request.shard_index = host.shard_index
        request.incarnation = host.incarnation
        request.process_id = self._process_id
        await self._until_answered(lambda: call(request, timeout=CALL_TIMEOUT_S))

    async def _until_answered(
        self,
        call: Callable[[], Awaitable[Response]],
        and_raises: Collection[ErrorReason] = (),
    ) -> Response:
        outage = Outage(self._address)
        while True:
            try:
                return await call()
            except grpc.aio.AioRpcError as error:
                _raise_if_decided(error, and_raises)
                outage.note(await _why(self._address, error))
                await asyncio.sleep(RETRY_S)


async def _why(address: str, error: grpc.aio.AioRpcError) -> str:
    """Why the coordinator does not answer, also where gRPC knows no more than that."""
    text = plain_details(error.details() or error.code().name)
    if "Socket closed" not in text:
        return text
    own = certificates_of(Credentials.from_environment())
    problem = await in_thread(
        partial(handshake_problem, parse_address(address), own, CALL_TIMEOUT_S)
    )
    return problem or text


def _raise_if_decided(
    error: grpc.aio.AioRpcError, and_raises: Collection[ErrorReason] = ()
) -> None:
    refusal = refusal_from_rpc_error(error)
    if refusal is not None and (
        is_decided(error.code()) or refusal.reason in and_raises
    ):
        raise refusal from error
    if error.code() is grpc.StatusCode.UNIMPLEMENTED:
        raise Refusal(
            ErrorReason.PROTOCOL_VERSION,
            "what answers there is not a paramserver coordinator of this release",
        ) from error


class _Views:
    """Views of one watch: what comes in several events is taken as one."""

    def __init__(self) -> None:
        self._merged: MergedModel[messages.ShardView] | None = None

    def take(self, host: ShardHost, part: messages.ShardView) -> None:
        is_last = not part.continued
        if self._merged is None:
            self._merged = MergedModel(part)
        else:
            self._merged.add(part)
        if is_last:
            _take_view(host, self._merged.message)
            self._merged = None


def _take_event(host: ShardHost, event: messages.WatchShardResponse) -> None:
    match event.WhichOneof("event"):
        case "prepare":
            prepare = event.prepare
            seeder = (
                read_identity(prepare.seeder) if prepare.HasField("seeder") else None
            )
            host.prepare_fence(
                prepare.fence_number,
                FenceKind(prepare.kind),
                seeder,
                [read_identity(worker) for worker in prepare.evicting],
                read_place(prepare.checkpoint)
                if prepare.HasField("checkpoint")
                else None,
            )
        case "record":
            host.install_record(read_record(event.record))
        case "abort":
            abort = event.abort
            host.abort_fence(
                abort.fence_number, dict(read_sequences(abort.batch_floors))
            )
        case "cut":
            cut = event.cut
            host.decide_cut(
                cut.fence_number,
                Cut(
                    cut.snapshot_id,
                    cut.clock,
                    dict(read_sequences(cut.sequences)),
                    CutPurpose(cut.purpose),
                ),
            )
        case "write":
            write = event.write
            host.checkpoints.write(write.snapshot_id, read_place(write.place))
        case "release":
            host.release_image(event.release.snapshot_id)
        case "end":
            host.fail(event.end.reason)


def _take_view(host: ShardHost, view: messages.ShardView) -> None:
    if not view.HasField("schema"):
        return
    host.adopt(read_terms(view))
    host.take_measure_key(view.measure_key)
    if view.HasField("record"):
        host.install_record(read_record(view.record))
    host.abort_fence(view.fence_closed_number)
    host.release_images_up_to(view.snapshot_closed_id)
