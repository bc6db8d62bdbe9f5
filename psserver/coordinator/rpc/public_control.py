"""What readers and people call at the coordinator; they are never members."""

import time
from collections.abc import AsyncIterator

from psserver.coordinator.core.diagnosis import Cause
from psserver.coordinator.host.coordinator_host import CoordinatorHost
from psserver.coordinator.host.snapshot_requests import PinnedSnapshot
from psserver.coordinator.rpc.status_report import (
    checkpoint_status,
    events_message,
    history_message,
    saved_message,
    status_message,
)
from psserver.coordinator.rpc.watch_codec import address_message
from psserver.edge.answer_slots import AnswerSlots
from psserver.edge.decoding import check_protocol
from psserver.edge.guard import Context, Methods, answered, machine_of, streamed
from psserver.edge.metrics import JobReadings
from psserver.edge.monotonic import now_ms
from pswire.limits import STALENESS_BOUND_MAX, TRACE_STEP_COUNT_MAX
from pswire.membership import Mode, ModeTerms
from pswire.membership_codec import known, split_messages
from pswire.names import shown_url
from pswire.reasons import ErrorReason, Refusal
from pswire.schema_codec import cut_model, schema_to_message
from pswire.span_log import clock_us
from pswire.v1 import coordinator_service_pb2 as messages

UNDONE_COUNT_MAX = 64
"""Most names of checkpoints in an answer."""


TRACE_LEAD_US = 2_500_000
"""Until a trace begins: workers report every two seconds, and hear of it then."""


class PublicControl:
    def __init__(self, host: CoordinatorHost) -> None:
        self._host = host
        self._descriptions = AnswerSlots(
            each_max=host.limits.machine_snapshot_answers,
            all_max=host.limits.snapshot_answers,
        )

    def methods(self) -> Methods:
        return {
            "RequestSnapshot": streamed(
                self.request_snapshot, messages.RequestSnapshotRequest
            ),
            "ReleaseSnapshot": answered(
                self.release_snapshot, messages.ReleaseSnapshotRequest
            ),
            "SaveCheckpoint": answered(
                self.save_checkpoint, messages.SaveCheckpointRequest
            ),
            "RestoreCheckpoint": answered(
                self.restore_checkpoint, messages.RestoreCheckpointRequest
            ),
            "SetMode": answered(self.set_mode, messages.SetModeRequest),
            "RecordTrace": answered(self.record_trace, messages.RecordTraceRequest),
            "GetStatus": answered(self.get_status, messages.GetStatusRequest),
            "GetHistory": answered(self.get_history, messages.GetHistoryRequest),
            "WatchEvents": streamed(self.watch_events, messages.WatchEventsRequest),
        }

    async def request_snapshot(
        self, request: messages.RequestSnapshotRequest, context: Context
    ) -> AsyncIterator[messages.RequestSnapshotResponse]:
        """Finds or makes a snapshot newer than a version."""
        check_protocol(request.protocol_version)
        pinned = await self._host.snapshots.get(
            newer_than=request.newer_than, timeout_s=self._wait_s(request.timeout_ms)
        )
        reader = machine_of(context)
        if not self._descriptions.has_one(reader):
            raise Refusal(
                ErrorReason.BUSY,
                f"{self._descriptions.count(reader)} answers that describe a snapshot "
                f"to {reader} are not read yet",
            )
        with self._descriptions.taken(reader):
            for part in cut_model(self._description(pinned)):
                yield part

    async def release_snapshot(
        self, request: messages.ReleaseSnapshotRequest, context: Context
    ) -> messages.ReleaseSnapshotResponse:
        self._host.snapshots.release(request.snapshot_id, request.pin_id)
        return messages.ReleaseSnapshotResponse()

    async def save_checkpoint(
        self, request: messages.SaveCheckpointRequest, context: Context
    ) -> messages.SaveCheckpointResponse:
        """Makes a checkpoint; answers when it is complete."""
        check_protocol(request.protocol_version)
        await self._host.checkpoints.save(self._wait_s(request.timeout_ms))
        checkpoints = self._host.core.checkpoints
        return messages.SaveCheckpointResponse(
            saved=checkpoint_status(checkpoints, now_ms()).newest
        )

    async def restore_checkpoint(
        self, request: messages.RestoreCheckpointRequest, context: Context
    ) -> messages.RestoreCheckpointResponse:
        """Has the job return to a checkpoint; answers when it is decided."""
        check_protocol(request.protocol_version)
        found = await self._host.checkpoints.restore(
            request.name,
            self._wait_s(request.timeout_ms),
            tries_only=request.tries_only,
        )
        settings = self._host.core.checkpoints.settings
        assert settings is not None, "else it is refused"
        return messages.RestoreCheckpointResponse(
            saved=saved_message(found.saved, shown_url(settings.url), now_ms()),
            lost_step_count=found.lost_step_count,
            undone=found.undone[:UNDONE_COUNT_MAX],
        )

    async def set_mode(
        self, request: messages.SetModeRequest, context: Context
    ) -> messages.SetModeResponse:
        """Changes the mode; answers when the record is written."""
        check_protocol(request.protocol_version)
        mode = known(Mode, request.mode)
        terms = ModeTerms(
            mode,
            checked_bound(mode, request.staleness_bound),
            request.quorum,
            request.grace_window_ms,
        )
        record = await self._host.set_mode(terms, self._wait_s(request.timeout_ms))
        return messages.SetModeResponse(
            generation=record.generation, mode_clock=record.change_clock
        )

    async def record_trace(
        self, request: messages.RecordTraceRequest, context: Context
    ) -> messages.RecordTraceResponse:
        """Has all record their next steps; answers when they have, or in time."""
        check_protocol(request.protocol_version)
        if not 1 <= request.step_count <= TRACE_STEP_COUNT_MAX:
            raise Refusal(
                ErrorReason.MALFORMED_MESSAGE,
                f"{request.step_count} steps, of 1 to {TRACE_STEP_COUNT_MAX}",
            )
        host, core = self._host, self._host.core
        begin_us = clock_us() + TRACE_LEAD_US
        core.tracing.begin(request.step_count, core.traced_names, begin_us)
        unfinished: list[str] = []
        try:
            await host.changes.wait_until(
                lambda: not core.tracing.unfinished(core.traced_names),
                self._wait_s(request.timeout_ms),
            )
            unfinished = core.tracing.unfinished(core.traced_names)
        finally:
            processes = core.tracing.end()
        return messages.RecordTraceResponse(
            processes=[
                messages.ProcessTrace(
                    name=name,
                    recorded=messages.RecordedSpans(
                        number=core.tracing.number,
                        spans=process.spans,
                        clock_offset_us=process.clock_offset_us,
                        clock_error_us=process.clock_error_us,
                        is_complete=process.is_complete,
                        left_out_count=process.left_out_count,
                    ),
                )
                for name, process in processes.items()
            ],
            unfinished=unfinished,
            unix_offset_us=time.time_ns() // 1000 - clock_us(),
        )

    async def get_status(
        self, request: messages.GetStatusRequest, context: Context
    ) -> messages.GetStatusResponse:
        check_protocol(request.protocol_version)
        return self.status()

    async def get_history(
        self, request: messages.GetHistoryRequest, context: Context
    ) -> messages.GetHistoryResponse:
        check_protocol(request.protocol_version)
        return self.history()

    async def watch_events(
        self, request: messages.WatchEventsRequest, context: Context
    ) -> AsyncIterator[messages.WatchEventsResponse]:
        """Sends what has happened after an event, then what happens."""
        check_protocol(request.protocol_version)
        events, after = self._host.core.events, request.after
        while True:
            if events.newest_number > after:
                yield self.events(after)
                after = events.newest_number
            elif not request.follow:
                return
            else:
                await self._host.wait_event(after)

    def status(self) -> messages.GetStatusResponse:
        """Where the job stands."""
        status = status_message(self._host.core, self._host.waits, now_ms())
        status.splits.extend(split_messages(self._host.data.splits.all()))
        status.admin_url = self._host.admin_url
        return status

    def readings(self) -> JobReadings:
        """What monitoring gets."""
        core = self._host.core
        return JobReadings(
            status=self.status(),
            causes=tuple(Cause),
            sample_count=core.sample_count,
            version=core.shards.version,
            checkpoint_count=core.checkpoints.completed_count,
            checkpoint_failure_count=core.checkpoints.failed_count,
            checkpoint_ms=core.checkpoints.duration_ms,
            is_state_written=not core.writes.failure,
        )

    def history(self) -> messages.GetHistoryResponse:
        """How the job has trained."""
        return history_message(self._host.core, self._host.unix_offset_s)

    def events(self, after: int) -> messages.WatchEventsResponse:
        """What has happened after an event."""
        host = self._host
        return events_message(host.core.events.after(after), host.unix_offset_s)

    # Inside

    def _wait_s(self, timeout_ms: int) -> float:
        """For how long a caller is waited with: no longer than anybody may."""
        return min(max(0, timeout_ms) / 1000, self._host.limits.wait_s)

    def _description(self, pinned: PinnedSnapshot) -> messages.RequestSnapshotResponse:
        core = self._host.core
        terms = core.model.terms
        assert terms is not None
        return messages.RequestSnapshotResponse(
            job_id=core.settings.job_id,
            snapshot_id=pinned.entry.snapshot_id,
            version=pinned.entry.version,
            clock=pinned.entry.clock,
            generation=pinned.entry.generation,
            shards=[address_message(slot) for slot in core.shards.slots],
            schema=schema_to_message(terms.schema),
            pin_ttl_ms=pinned.ttl_ms,
            pin_id=pinned.pin_id,
            chunk_bytes=terms.chunk_bytes(core.settings),
        )


def checked_bound(mode: Mode, bound: int) -> int:
    """A staleness bound that somebody wants, in clocks.

    Raises:
        Refusal: `MALFORMED_MESSAGE`: the mode can't have it.
    """
    bound_max = mode.rules.bound_of(STALENESS_BOUND_MAX)
    if not 0 <= bound <= bound_max:
        raise Refusal(
            ErrorReason.MALFORMED_MESSAGE,
            f"a staleness bound of {bound} in {mode.name} is not in 0 to {bound_max}",
        )
    return bound
