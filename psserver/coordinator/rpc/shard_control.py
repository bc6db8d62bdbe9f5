"""What shards call at the coordinator: messages to core calls and back."""

import logging
from collections.abc import AsyncIterator

from psserver.coordinator.core.coordinator_effects import (
    EndJob,
    ReturnToCheckpoint,
    SchemaFixed,
)
from psserver.coordinator.core.shard_map import ShardStanding
from psserver.coordinator.host.coordinator_host import CoordinatorHost
from psserver.coordinator.rpc.callers import Callers
from psserver.coordinator.rpc.trace_reports import take_recorded
from psserver.coordinator.rpc.watch_codec import shard_event, view_events
from psserver.edge.cut_codec import read_cut_report, read_part_report
from psserver.edge.decoding import check_protocol, worker_key
from psserver.edge.fence_codec import read_fence_report
from psserver.edge.guard import Context, Methods, answered, streamed
from psserver.edge.memory_grant import MemoryGrant
from psserver.edge.monotonic import now_ms
from pswire.aggregation import GradientCounts
from pswire.awaited import Awaited
from pswire.membership_codec import identity_message, settings_message
from pswire.reasons import ErrorReason, Refusal
from pswire.span_log import clock_us
from pswire.v1 import coordinator_service_pb2 as messages

log = logging.getLogger("psserver.coordinator")


class ShardControl:
    def __init__(self, host: CoordinatorHost) -> None:
        self._host = host
        self._callers = Callers(host.core)

    def methods(self) -> Methods:
        return {
            "RegisterShard": answered(
                self.register_shard, messages.RegisterShardRequest
            ),
            "WatchShard": streamed(self.watch_shard, messages.WatchShardRequest),
            "ReportFence": answered(self.report_fence, messages.ReportFenceRequest),
            "ReportCut": answered(self.report_cut, messages.ReportCutRequest),
            "ReportCheckpoint": answered(
                self.report_checkpoint, messages.ReportCheckpointRequest
            ),
            "DrainShard": answered(self.drain_shard, messages.DrainShardRequest),
            "ReportProgress": answered(
                self.report_progress, messages.ReportProgressRequest
            ),
        }

    async def register_shard(
        self, request: messages.RegisterShardRequest, context: Context
    ) -> messages.RegisterShardResponse:
        check_protocol(request.protocol_version)
        if not request.process_id or not request.address:
            raise Refusal(
                ErrorReason.MALFORMED_MESSAGE, "process_id or address is empty"
            )
        slot = self._host.register_shard(
            process_id=request.process_id,
            address=request.address,
            memory=MemoryGrant(max(0, request.memory_bytes), request.memory_scope),
            wanted_index=request.wanted_index
            if request.HasField("wanted_index")
            else None,
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
        slot = self._callers.slot(request)
        # Opened first: what happens while the view is on its way is in the queue.
        queue = host.open_shard_watch(slot)
        try:
            for part in view_events(host.core):
                yield part
            while True:
                event = await queue.get()
                if isinstance(event, ReturnToCheckpoint):
                    return  # it has lost its place
                if isinstance(event, SchemaFixed):
                    for part in view_events(host.core):
                        yield part
                response = shard_event(event)
                if response is not None:
                    yield response
                if isinstance(event, EndJob):
                    return  # nothing follows, and a shard ends when its watch does
        finally:
            host.close_shard_watch(slot, queue)

    async def report_fence(
        self, request: messages.ReportFenceRequest, context: Context
    ) -> messages.ReportFenceResponse:
        slot = self._callers.slot(request)
        self._host.take_report(slot, read_fence_report(request))
        return messages.ReportFenceResponse()

    async def report_cut(
        self, request: messages.ReportCutRequest, context: Context
    ) -> messages.ReportCutResponse:
        slot = self._callers.slot(request)
        self._host.core.report_cut(slot, read_cut_report(request), now_ms())
        self._host.pump()
        return messages.ReportCutResponse()

    async def report_checkpoint(
        self, request: messages.ReportCheckpointRequest, context: Context
    ) -> messages.ReportCheckpointResponse:
        slot = self._callers.slot(request)
        self._host.core.report_checkpoint(slot, read_part_report(request), now_ms())
        self._host.pump()
        return messages.ReportCheckpointResponse()

    async def drain_shard(
        self, request: messages.DrainShardRequest, context: Context
    ) -> messages.DrainShardResponse:
        slot = self._callers.slot(request)
        log.info("shard %d is to end", slot.index)
        await self._host.checkpoints.save_last()
        return messages.DrainShardResponse()

    async def report_progress(
        self, request: messages.ReportProgressRequest, context: Context
    ) -> messages.ReportProgressResponse:
        slot = self._callers.slot(request)
        contradicting = tuple(worker_key(worker) for worker in request.contradicting)
        self._host.take_standing(slot, _standing(request), contradicting)
        name = f"shard {slot.index}"
        return messages.ReportProgressResponse(
            trace=take_recorded(self._host, name, request.recorded),
            coordinator_us=clock_us(),
            lost=[
                messages.LostWorker(worker=identity_message(worker), lost_ms=lost_ms)
                for worker, lost_ms in self._host.core.roster.lost_ms(now_ms()).items()
            ],
            coordinator_wait=self._host.waits.disk_text,
        )


def _standing(request: messages.ReportProgressRequest) -> ShardStanding:
    return ShardStanding(
        heard_ms=now_ms(),
        applied_clock=request.applied_clock,
        version=request.version,
        frontier=request.frontier,
        parameter_bytes=request.parameter_bytes,
        optimizer_bytes=request.optimizer_bytes,
        queued_push_count=request.queued_push_count,
        torn_step_count=request.torn_step_count,
        staleness_counts=tuple(request.staleness_counts),
        gradients={
            worker_key(each.worker): GradientCounts(
                each.bad_count, each.clipped_count, each.left_out_count
            )
            for each in request.gradients
        },
        sharing=frozenset(map(worker_key, request.sharing)),
        done={worker_key(d.worker): d.sequence for d in request.done},
        waiting_for=tuple(
            Awaited(a.name, a.clock, a.step_ms, a.lost_ms)
            for a in request.waiting.awaited
        ),
        waiting_reason=request.waiting.reason,
        waited_ms=request.waiting.waited_ms,
        resident_bytes=request.resident_bytes,
        apply_s=request.apply_s,
        received_bytes=request.received_bytes,
        sent_bytes=request.sent_bytes,
        duplicate_count=request.duplicate_count,
        chunk_count=request.chunk_count,
        recording_end=request.recording_end,
        is_recording_end_known=request.is_recording_end_known,
        waits={worker_key(each.worker): each.waited_s for each in request.waits},
    )
