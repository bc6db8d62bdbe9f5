"""What a process does in a few steps, piece by piece, when somebody asks for a trace.

Nothing is kept before an order of the coordinator, and a bounded number of spans after
it. Orders come, and spans go, with the reports that processes make in any case.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from pswire.v1 import coordinator_service_pb2 as messages

SPAN_COUNT_MAX: Final = 4_096
"""Most spans of one process that wait to be reported, and most in a report."""


def clock_us() -> int:
    """Microseconds on the clock of spans, which never goes back."""
    return time.perf_counter_ns() // 1000


@dataclass(frozen=True, slots=True)
class Span:
    """A piece of time.

    Attributes:
        kind: What the process did.
        begin_us: When that began.
        end_us: When it ended.
        step: Clock of the step that it belongs to, or the worker's count of steps.
        lane: Of a shard, for which worker or by which thread.
    """

    kind: str
    begin_us: int
    end_us: int
    step: int
    lane: str = ""


class Recording:
    """The spans of one trace. One thread notes a span, and another may take it.

    Attributes:
        number: Of the trace.
        is_complete: Whether all steps are recorded.
    """

    def __init__(self, number: int, step_count: int, begin_us: int = 0) -> None:
        self.number = number
        self._begin_us = begin_us
        self.is_complete = False
        self._first_step: int | None = None
        self._step_count = step_count
        self._spans: deque[Span] = deque()
        self._left_out_count = 0

    def note(
        self, kind: str, begin_us: int, end_us: int, step: int, lane: str = ""
    ) -> None:
        """Notes a span; the first one of a step after the last ends the recording.

        Those that begin before the trace does belong to none of its steps.
        """
        if self.is_complete or begin_us < self._begin_us:
            return
        if self._first_step is None:
            self._first_step = step
        if step >= self._first_step + self._step_count:
            self.is_complete = True
        elif len(self._spans) >= SPAN_COUNT_MAX:
            self._left_out_count += 1
        else:
            self._spans.append(Span(kind, begin_us, end_us, step, lane))

    @contextmanager
    def noting(self, kind: str, step: int, lane: str = "") -> Iterator[None]:
        """Notes what is done meanwhile."""
        begin_us = clock_us()
        try:
            yield
        finally:
            self.note(kind, begin_us, clock_us(), step, lane)

    def take(self) -> tuple[list[Span], int]:
        """Spans that were not taken before, and how many there was no room for."""
        left_out, self._left_out_count = self._left_out_count, 0
        return [self._spans.popleft() for _ in range(len(self._spans))], left_out


class SpanLog:
    """The part of one process in the traces of its job.

    Attributes:
        recording: What is being recorded, None for nothing.
    """

    def __init__(self, now_us: Callable[[], int] = clock_us) -> None:
        self.recording: Recording | None = None
        self._now_us = now_us
        self._number = 0
        self._is_over = False  # with the report that is under way
        self._asked_us = 0
        self._offset_us = 0
        self._error_us: int | None = None

    def report(self) -> messages.RecordedSpans | None:
        """What goes with the report that is made now, None for nothing."""
        self._asked_us = self._now_us()
        recording, self._is_over = self.recording, False
        if recording is None:
            return None
        # Asked first: no span comes after it.
        is_complete = self._is_over = recording.is_complete
        spans, left_out_count = recording.take()
        return messages.RecordedSpans(
            number=recording.number,
            spans=[
                messages.Span(
                    kind=each.kind,
                    begin_us=each.begin_us,
                    duration_us=max(0, each.end_us - each.begin_us),
                    step=each.step,
                    lane=each.lane,
                )
                for each in spans
            ],
            clock_offset_us=self._offset_us,
            clock_error_us=-1 if self._error_us is None else self._error_us,
            is_complete=is_complete,
            left_out_count=left_out_count,
        )

    def take_answer(self, coordinator_us: int, order: messages.TraceOrder) -> None:
        """Takes what the coordinator has answered to the report.

        Its clock was read between question and answer: taken for the middle, it is
        wrong by half of the round trip at most. The shortest one counts.

        Args:
            coordinator_us: The coordinator's clock.
            order: What to record; number 0 for nothing.
        """
        if self.recording is not None and self._is_over:
            self.recording = None
        now_us = self._now_us()
        error_us = (now_us - self._asked_us + 1) // 2
        if self._error_us is None or error_us <= self._error_us:
            self._error_us = error_us
            self._offset_us = coordinator_us - (now_us + self._asked_us) // 2
        if order.number > self._number:
            self._number = order.number
            begin_us = max(0, order.begin_us - self._offset_us)
            self.recording = Recording(order.number, order.step_count, begin_us)
        elif not order.number:
            self.recording = None  # nobody waits for it any more
