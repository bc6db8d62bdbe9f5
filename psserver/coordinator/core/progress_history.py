"""How fast a job has trained over time: a bounded ring of points."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace

POINT_COUNT_MAX = 512
"""Points that are kept. When there are so many every second one goes, and the interval
doubles: the whole job stays in view, ever more coarsely."""

FIRST_INTERVAL_MS = 1_000

RATE_MS = 6_000
"""A rate is of so long at least, once the job has trained for that: shards report every
second and workers every two, so that one of less would count no report, or two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryPoint:
    """How a job trained until now.

    Attributes:
        at_ms: When it is, monotonic.
        clock: Largest clock that all members had completed.
        steps_per_s: Since the point before, or in the last `RATE_MS`.
        samples_per_s: Likewise; None where none are counted.
        metrics: What scripts had logged last, a mean over the workers.
    """

    at_ms: int
    clock: int
    steps_per_s: float
    samples_per_s: float | None
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class _Count:
    at_ms: int
    step_count: int
    sample_count: int


class ProgressHistory:
    """Points of a job.

    Attributes:
        interval_ms: Time from one to the next.
        points: The oldest first.
    """

    def __init__(self) -> None:
        self.interval_ms = FIRST_INTERVAL_MS
        self.points: list[HistoryPoint] = []
        self._counts: deque[_Count] = deque()

    def is_due(self, now_ms: int) -> bool:
        """Whether the next point is to be added."""
        counts = self._counts
        return not counts or now_ms - counts[-1].at_ms >= self.interval_ms

    def add(
        self,
        now_ms: int,
        *,
        clock: int,
        step_count: int,
        sample_count: int,
        metrics: Mapping[str, float],
    ) -> None:
        """Adds a point; the first one, and one after a return, only begins an interval.

        Args:
            now_ms: Monotonic time.
            clock: Largest clock that all members have completed.
            step_count: Steps of all workers; less than before when the job has returned
                to a checkpoint.
            sample_count: Samples behind these; 0 where none are counted.
            metrics: What scripts have logged last.
        """
        counts = self._counts
        if counts and step_count < counts[-1].step_count:
            counts.clear()  # of the time before a return to a checkpoint
        while len(counts) > 1 and now_ms - counts[1].at_ms >= RATE_MS:
            counts.popleft()
        counts.append(_Count(now_ms, step_count, sample_count))
        first = counts[0]
        seconds = (now_ms - first.at_ms) / 1000
        if not seconds:
            return
        samples = max(0, sample_count - first.sample_count) / seconds
        self.points.append(
            HistoryPoint(
                at_ms=now_ms,
                clock=clock,
                steps_per_s=(step_count - first.step_count) / seconds,
                samples_per_s=samples if sample_count else None,
                metrics=metrics,
            )
        )
        if len(self.points) == POINT_COUNT_MAX:
            self.interval_ms *= 2
            pairs = zip(self.points[::2], self.points[1::2], strict=True)
            self.points = [_merged(first, second) for first, second in pairs]


def _merged(first: HistoryPoint, second: HistoryPoint) -> HistoryPoint:
    """Two points of the same interval as one, at the time of the second."""
    known = [r for r in (first.samples_per_s, second.samples_per_s) if r is not None]
    return replace(
        second,
        steps_per_s=(first.steps_per_s + second.steps_per_s) / 2,
        samples_per_s=sum(known) / len(known) if known else None,
    )
