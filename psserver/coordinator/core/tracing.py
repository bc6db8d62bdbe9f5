"""The trace that is being recorded, of all workers and shards of a job."""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from pswire.reasons import ErrorReason, Refusal

SPAN_COUNT_MAX: Final = 65_536
"""Most spans of a trace; an answer has them all."""

SPAN_BYTES_MAX: Final = 5 << 20
"""Most bytes of them, which leaves room for names of processes in a message."""

_FIELD_BYTES: Final = 4
"""Of a span in a message, beside itself, at most."""


class SizedSpan(Protocol):
    """A span as it goes into an answer."""

    def ByteSize(self) -> int:
        """Bytes that it takes."""


@dataclass(slots=True)
class RecordedProcess:
    """What one process has recorded.

    Attributes:
        spans: As it has sent them.
        clock_offset_us: To be added to its clock for that of this process.
        clock_error_us: Largest error of that, -1 where it isn't known.
        byte_count: What they take.
        left_out_count: Spans that there was no room for.
        is_complete: Whether all steps are there.
    """

    spans: list[Any] = field(default_factory=list)
    byte_count: int = 0
    clock_offset_us: int = 0
    clock_error_us: int = -1
    left_out_count: int = 0
    is_complete: bool = False


class Tracing:
    """One trace at a time.

    Attributes:
        number: Of the newest trace.
        step_count: Its steps; 0 while none is recorded.
        begin_us: When its processes begin, on this process's clock of spans.
        processes: What is recorded, by name of the process.
    """

    def __init__(self, start_count: int) -> None:
        # Those of an earlier start of the coordinator are known to all processes.
        self.number = start_count << 20
        self.step_count = self.begin_us = 0
        self.processes: dict[str, RecordedProcess] = {}
        self._shares: dict[str, int] = {}

    def begin(self, step_count: int, names: Collection[str], begin_us: int = 0) -> None:
        """Has processes record from a moment on, by when all have heard of it.

        Raises:
            Refusal: `BUSY`: another trace is being recorded; `NOT_STARTED`: there is
                nobody to record.
        """
        if self.step_count:
            raise Refusal(ErrorReason.BUSY, "another trace is being recorded")
        if not names:
            raise Refusal(
                ErrorReason.NOT_STARTED, "there is no member whose steps to record"
            )
        self.number += 1
        self.step_count, self.begin_us = step_count, begin_us
        self.processes = {name: RecordedProcess() for name in sorted(names)}
        # Half is for the workers and half for the shards, and each gets as much of
        # that: one that sends what it likes takes no room of another.
        kinds = Counter(map(_kind_of, names))
        self._shares = {kind: 2 * count for kind, count in kinds.items()}

    def end(self) -> dict[str, RecordedProcess]:
        """Records no more; what there is."""
        found, self.processes, self.step_count = self.processes, {}, 0
        return found

    def take(
        self,
        name: str,
        number: int,
        spans: Sequence[SizedSpan],
        *,
        clock: tuple[int, int],
        left_out_count: int,
        is_complete: bool,
    ) -> None:
        """A process reports what it has recorded.

        Args:
            name: Of the process.
            number: Of its trace; of another one, nothing is taken.
            spans: New ones.
            clock: Offset and error of its clock, in microseconds.
            left_out_count: Spans that it had no room for.
            is_complete: Whether it has recorded all steps.
        """
        process = self.processes.get(name)
        if process is None or number != self.number:
            return
        process.left_out_count += left_out_count
        share = self._shares[_kind_of(name)]
        for span in spans:
            byte_count = span.ByteSize() + _FIELD_BYTES
            if (
                len(process.spans) < SPAN_COUNT_MAX // share
                and process.byte_count + byte_count <= SPAN_BYTES_MAX // share
            ):
                process.spans.append(span)
                process.byte_count += byte_count
            else:
                process.left_out_count += 1
        process.clock_offset_us, process.clock_error_us = clock
        process.is_complete = is_complete

    def unfinished(self, present: Collection[str]) -> list[str]:
        """Those that have not recorded all steps and are still there."""
        return [
            name
            for name, process in self.processes.items()
            if not process.is_complete and name in present
        ]


def _kind_of(name: str) -> str:
    """Whether a process is a worker or a shard, by its name."""
    return name.partition(" ")[0]
