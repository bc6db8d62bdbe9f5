"""Data that was drawn from a prepared loader and not yet pushed or reported.

A loader draws, the next push takes everything drawn since the push before, and what
became of the push turns the ranges into consumed or dropped ones, which the next lease
request or the leave reports. Thread-safe: the user's thread draws, while reports may
fail on the event loop's.
"""

import threading
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class DataRange:
    """Positions `[start, stop)` in the order of an epoch.

    Attributes:
        loader: Name of the loader.
        epoch: Epoch, from 0.
        start: First position.
        stop: One past the last position.
    """

    loader: str
    epoch: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class DrawnData:
    """What one push carries.

    Attributes:
        sample_count: Samples behind the gradient, `None` when no loader counted.
        ranges: Leased ranges the samples came from.
    """

    sample_count: int | None
    ranges: tuple[DataRange, ...]


@dataclass(frozen=True, slots=True)
class DataReport:
    """What the coordinator is told next about this worker's data.

    Attributes:
        consumed: Ranges whose pushes are part of the parameters.
        dropped: Ranges whose pushes were thrown away.
        incarnation: How often the worker had rejoined when this was noted.
    """

    consumed: tuple[DataRange, ...] = ()
    dropped: tuple[DataRange, ...] = ()
    incarnation: int = 0


class PendingData:
    """Ranges on their way from a loader through a push to the coordinator."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sample_count: int | None = None
        self._drawn: list[DataRange] = []
        self._consumed: list[DataRange] = []
        self._dropped: list[DataRange] = []
        self._incarnation = 0

    def draw(self, sample_count: int, data_range: DataRange | None = None) -> None:
        """Notes a batch at the moment it's handed to the user."""
        with self._lock:
            self._sample_count = (self._sample_count or 0) + sample_count
            if data_range is not None:
                self._drawn.append(data_range)

    def take(self) -> DrawnData:
        """What the next push carries. The caller says later what became of it."""
        with self._lock:
            drawn = DrawnData(self._sample_count, tuple(self._drawn))
            self._sample_count = None
            self._drawn = []
            return drawn

    def acknowledge(self, ranges: tuple[DataRange, ...]) -> None:
        """A push that carried these ranges is part of the parameters."""
        with self._lock:
            self._consumed.extend(ranges)

    def drop(self, ranges: tuple[DataRange, ...]) -> None:
        """A push that carried these ranges was thrown away."""
        with self._lock:
            self._dropped.extend(ranges)

    def take_report(self) -> DataReport:
        """What no report has carried yet."""
        with self._lock:
            report = DataReport(
                tuple(self._consumed), tuple(self._dropped), self._incarnation
            )
            self._consumed = []
            self._dropped = []
            return report

    def return_report(self, report: DataReport) -> None:
        """A report failed: the next one tells what it should have."""
        with self._lock:
            if report.incarnation == self._incarnation:
                self._consumed[:0] = report.consumed
                self._dropped[:0] = report.dropped

    def start_over(self) -> None:
        """The worker has rejoined: what its start before held is not its own any more.

        What of it counts the coordinator learns from the shards.
        """
        with self._lock:
            self._incarnation += 1
            self._sample_count = None
            self._drawn = []
            self._consumed = []
            self._dropped = []

    @property
    def has_drawn(self) -> bool:
        """Whether anything was drawn since the last push."""
        with self._lock:
            return self._sample_count is not None

    @property
    def has_news(self) -> bool:
        """Whether there is something to report."""
        with self._lock:
            return bool(self._consumed or self._dropped)
