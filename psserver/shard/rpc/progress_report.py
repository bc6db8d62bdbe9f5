"""Where a shard stands, for the coordinator and for the log."""

import logging
import time

from psserver.edge.metrics import ShardReadings
from psserver.edge.monotonic import now_ms
from psserver.shard.host.shard_host import ShardHost
from psserver.shard.rpc.push_codec import waiting_message
from psserver.shard.tensors.sent_values import sent_bytes
from pswire.awaited import Awaited, next_due
from pswire.limits import WAITING_INTERVAL_MS
from pswire.membership_codec import identity_message, sequence_messages
from pswire.process_memory import resident_bytes
from pswire.v1 import coordinator_service_pb2 as messages
from pswire.v1 import push_pb2

log = logging.getLogger("psserver.shard")


class ProgressReport:
    """What a shard reports every second.

    Args:
        host: The shard.
    """

    def __init__(self, host: ShardHost) -> None:
        self._host = host
        self._version = -1
        self._since_ms = now_ms()
        self._said_ms = (0, 0)
        self._is_recording_end_known = False

    def taken(self, report: messages.ReportProgressRequest) -> None:
        """The coordinator has answered a report."""
        self._is_recording_end_known = bool(report.recording_end)

    def message(self) -> messages.ReportProgressRequest:
        """Where the shard stands now. The coordinator has sent it its model."""
        host, model = self._host, self._host.model
        core = model.core
        waiting = self._waiting()
        now_s = time.perf_counter()
        return messages.ReportProgressRequest(
            job_id=host.job_id,
            shard_index=host.shard_index,
            incarnation=host.incarnation,
            applied_clock=core.clocks.applied_clock,
            version=core.clocks.version,
            parameter_bytes=model.engine.vectors.byte_count,
            waiting=waiting,
            optimizer_bytes=model.engine.state_byte_count
            + sent_bytes(each.sent for each in host.members if each.sent is not None),
            frontier=core.clocks.frontier,
            queued_push_count=core.queued_push_count,
            torn_step_count=core.state.torn_step_count,
            staleness_counts=core.staleness_counts,
            done=sequence_messages(core.done_sequences()),
            gradients=[
                messages.GradientCounts(
                    worker=identity_message(each.window.worker),
                    bad_count=each.gradients.bad,
                    clipped_count=each.gradients.clipped,
                    left_out_count=each.gradients.left_out,
                )
                for each in core.on_shard
                if any(each.gradients)
            ],
            sharing=map(identity_message, host.members.sharing),
            contradicting=map(
                identity_message,
                sorted(each.worker for each in host.members if each.has_contradicted),
            ),
            resident_bytes=resident_bytes(),
            apply_s=host.apply_s,
            received_bytes=host.received_bytes,
            sent_bytes=host.sent_bytes,
            duplicate_count=host.duplicate_count,
            chunk_count=len(model.chunks),
            recording_end="" if host.recorder is None else host.recorder.end_text,
            is_recording_end_known=self._is_recording_end_known,
            waits=[
                messages.MemberWait(
                    worker=identity_message(each.worker),
                    waited_s=each.peers.total_s(now_s),
                )
                for each in host.members
                if each.sent is not None  # a member
            ],
        )

    def readings(self) -> ShardReadings:
        """What monitoring gets. The coordinator has sent the shard its model."""
        report = self.message()
        waits_for = ""
        if self._host.silent_since_ms is not None:
            waits_for = "coordinator"
        elif report.HasField("waiting"):
            waits_for = "members" if report.waiting.awaited else "else"
        return ShardReadings(
            report=report, outcomes=self._host.outcomes, waits_for=waits_for
        )

    def _waiting(self) -> push_pb2.Waiting | None:
        """Whom the shard waits for, when nothing has come of it for a while."""
        host = self._host
        version, now = host.model.core.clocks.version, now_ms()
        if version != self._version or not host.model.core.clocks.members:
            # Where nobody trains, the wait begins as somebody joins.
            self._version, self._since_ms = version, now
        oldest_ms = host.members.oldest_ms
        since_ms = (
            self._since_ms if oldest_ms is None else min(self._since_ms, oldest_ms)
        )
        if now - since_ms < WAITING_INTERVAL_MS:
            return None
        waiting = waiting_message(host, now - since_ms, to_coordinator=True)
        if oldest_ms is not None and now - oldest_ms >= WAITING_INTERVAL_MS:
            self._say(waiting, oldest_ms, now - oldest_ms)
        elif not waiting.awaited:
            return None  # nobody pushes, and nothing is due
        return waiting

    def _say(self, waiting: push_pb2.Waiting, since_ms: int, waited_ms: int) -> None:
        said_since_ms, said_after_ms = self._said_ms
        if said_since_ms != since_ms:
            said_after_ms = 0
        if waited_ms < next_due(said_after_ms, WAITING_INTERVAL_MS):
            return
        self._said_ms = since_ms, waited_ms
        log.warning(
            "a push has waited %.0f s for %s%s",
            waited_ms / 1000,
            waiting.reason,
            "".join(f"; {_awaited_text(each)}" for each in waiting.awaited),
        )


def _awaited_text(awaited: push_pb2.Awaited) -> str:
    name = ascii(awaited.name[:64])
    return str(Awaited(name, awaited.clock, awaited.step_ms, awaited.lost_ms))
