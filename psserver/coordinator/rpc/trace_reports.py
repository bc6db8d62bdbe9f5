"""What processes record of their steps: orders to them, and their reports."""

from typing import Final

from psserver.coordinator.host.coordinator_host import CoordinatorHost
from pswire.v1 import coordinator_service_pb2 as messages

_KIND_LENGTH_MAX: Final = 32
_LANE_LENGTH_MAX: Final = 256
_TIME_US_MAX: Final = 1 << 53
"""Above, JSON's numbers are not exact."""


def take_recorded(
    host: CoordinatorHost, name: str, recorded: messages.RecordedSpans
) -> messages.TraceOrder | None:
    """Takes what a process has recorded; what it is to record now, None for nothing.

    Args:
        host: The coordinator.
        name: Of the process.
        recorded: Empty where it records nothing.
    """
    tracing = host.core.tracing
    if recorded.number and tracing.step_count:
        # Copies, of these fields alone: a part of a message keeps all of it in memory,
        # with whatever else its sender has put into it.
        spans = [
            messages.Span(
                kind=each.kind,
                begin_us=each.begin_us,
                duration_us=each.duration_us,
                step=each.step,
                lane=each.lane,
            )
            for each in recorded.spans
            if _is_sound(each)
        ]
        tracing.take(
            name,
            recorded.number,
            spans,
            clock=(
                max(-_TIME_US_MAX, min(recorded.clock_offset_us, _TIME_US_MAX)),
                max(-1, min(recorded.clock_error_us, _TIME_US_MAX)),
            ),
            left_out_count=max(0, min(recorded.left_out_count, _TIME_US_MAX))
            + len(recorded.spans)
            - len(spans),
            is_complete=recorded.is_complete,
        )
        host.changes.notify()
    if name not in tracing.processes:
        return None
    return messages.TraceOrder(
        number=tracing.number,
        step_count=tracing.step_count,
        begin_us=tracing.begin_us,
    )


def _is_sound(span: messages.Span) -> bool:
    return (
        len(span.kind) <= _KIND_LENGTH_MAX
        and len(span.lane) <= _LANE_LENGTH_MAX
        and 0 <= span.begin_us <= _TIME_US_MAX
        and 0 <= span.duration_us <= _TIME_US_MAX
    )
