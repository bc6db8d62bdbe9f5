"""How fast a job has trained over time: a bounded ring of points."""

from collections.abc import Mapping
from dataclasses import dataclass, field

POINT_COUNT_MAX = 512
"""Points that are kept. When there are so many every second one goes, and the interval
doubles: the whole job stays in view, ever more coarsely."""

FIRST_INTERVAL_MS = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryPoint:
    """How a job trained between the point before and this one.

    Attributes:
        at_ms: When it is, monotonic.
        clock: Largest clock that all members had completed.
        step_count: Steps of all workers until then.
        sample_count: Samples behind these, as far as they are counted.
        metrics: What scripts had logged last, a mean over the workers.
        steps_per_s: Since the point before.
        samples_per_s: Likewise; None where none are counted.
    """

    at_ms: int
    clock: int
    step_count: int
    sample_count: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    steps_per_s: float = 0.0
    samples_per_s: float | None = None


class ProgressHistory:
    """Points of a job.

    Attributes:
        interval_ms: Time from one to the next.
        points: The oldest first.
    """

    def __init__(self) -> None:
        self.interval_ms = FIRST_INTERVAL_MS
        self.points: list[HistoryPoint] = []
        self._before: HistoryPoint | None = None

    def is_due(self, now_ms: int) -> bool:
        """Whether the next point is to be added."""
        before = self._before
        return before is None or now_ms - before.at_ms >= self.interval_ms

    def add(
        self,
        now_ms: int,
        *,
        clock: int,
        step_count: int,
        sample_count: int,
        metrics: Mapping[str, float],
    ) -> None:
        """Adds a point; the first one only begins the first interval.

        Args:
            now_ms: Monotonic time.
            clock: Largest clock that all members have completed.
            step_count: Steps of all workers; less than before when the job has returned
                to a checkpoint.
            sample_count: Samples behind these; 0 where none are counted.
            metrics: What scripts have logged last.
        """
        new = HistoryPoint(
            at_ms=now_ms,
            clock=clock,
            step_count=step_count,
            sample_count=sample_count,
            metrics=metrics,
        )
        before, self._before = self._before, new
        if before is None:
            return
        self.points.append(_after(before, new))
        if len(self.points) == POINT_COUNT_MAX:
            self.interval_ms *= 2
            pairs = zip(self.points[::2], self.points[1::2], strict=True)
            self.points = [_merged(first, second) for first, second in pairs]


def _after(before: HistoryPoint, new: HistoryPoint) -> HistoryPoint:
    """A point with its rates."""
    seconds = (new.at_ms - before.at_ms) / 1000
    samples = max(0, new.sample_count - before.sample_count) / seconds
    return HistoryPoint(
        at_ms=new.at_ms,
        clock=new.clock,
        step_count=new.step_count,
        sample_count=new.sample_count,
        metrics=new.metrics,
        steps_per_s=max(0, new.step_count - before.step_count) / seconds,
        samples_per_s=samples if new.sample_count else None,
    )


def _merged(first: HistoryPoint, second: HistoryPoint) -> HistoryPoint:
    """Two points of the same interval as one, at the time of the second."""
    known = [r for r in (first.samples_per_s, second.samples_per_s) if r is not None]
    return HistoryPoint(
        at_ms=second.at_ms,
        clock=second.clock,
        step_count=second.step_count,
        sample_count=second.sample_count,
        metrics=second.metrics,
        steps_per_s=(first.steps_per_s + second.steps_per_s) / 2,
        samples_per_s=sum(known) / len(known) if known else None,
    )
