"""Data that was drawn from a prepared loader and not yet pushed or reported.

A loader draws, the next push takes everything drawn since the push before, and what
became of the push turns the ranges into consumed or dropped ones, which the next lease
request or the leave reports. What was drawn and is behind no push is skipped.
Thread-safe: the user's thread draws, while reports may fail on the event loop's.
"""

import threading
from collections import Counter
from dataclasses import dataclass, replace


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
        skipped: Ranges that were drawn and are behind no push.
    """

    consumed: tuple[DataRange, ...] = ()
    dropped: tuple[DataRange, ...] = ()
    incarnation: int = 0
    skipped: tuple[DataRange, ...] = ()


class PendingData:
    """Ranges on their way from a loader through a push to the coordinator."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sample_counts: Counter[str] = Counter()
        self._drawn: list[DataRange] = []
        self._consumed: list[DataRange] = []
        self._dropped: list[DataRange] = []
        self._skipped: list[DataRange] = []
        self._incarnation = 0

    def draw(
        self, sample_count: int, data_range: DataRange | None = None, loader: str = ""
    ) -> None:
        """Notes a batch at the moment it's handed to the user.

        Args:
            sample_count: Samples of the batch.
            data_range: The leased range it is of, if any.
            loader: Name of the loader, where there is no range to tell it.
        """
        with self._lock:
            if data_range is not None:
                loader = data_range.loader
                self._drawn.append(data_range)
            self._sample_counts[loader] += sample_count

    def skip(self, loader: str) -> None:
        """What was drawn from a loader since the last push is behind no gradient.

        The next push neither names nor weighs it.
        """
        with self._lock:
            self._sample_counts.pop(loader, None)
            self._skipped += [each for each in self._drawn if each.loader == loader]
            self._drawn = [each for each in self._drawn if each.loader != loader]

    def take(self) -> DrawnData:
        """What the next push carries. The caller says later what became of it."""
        with self._lock:
            # A count of 0 was counted, too: an empty batch weighs nothing.
            counted = self._sample_counts
            drawn = DrawnData(counted.total() if counted else None, tuple(self._drawn))
            self._sample_counts = Counter()
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
                tuple(self._consumed),
                tuple(self._dropped),
                self._incarnation,
                tuple(self._skipped),
            )
            self._consumed = []
            self._dropped = []
            self._skipped = []
            return report

    def take_last_report(self, loader: str | None = None) -> DataReport:
        """As `take_report`, of who is done with an epoch of a loader, or with all.

        What was drawn and not pushed counts as skipped, unless it is pushed yet.
        """
        report = self.take_report()
        with self._lock:
            drawn = [e for e in self._drawn if loader in (None, e.loader)]
            return replace(report, skipped=(*report.skipped, *drawn))

    def return_report(self, report: DataReport) -> None:
        """A report failed: the next one tells what it should have."""
        with self._lock:
            if report.incarnation == self._incarnation:
                self._consumed[:0] = report.consumed
                self._dropped[:0] = report.dropped
                self._skipped[:0] = report.skipped

    def start_over(self) -> None:
        """The worker has rejoined: what its start before held is not its own any more.

        What of it counts the coordinator learns from the shards.
        """
        with self._lock:
            self._incarnation += 1
            self._sample_counts = Counter()
            self._drawn = []
            self._consumed = []
            self._dropped = []
            self._skipped = []

    @property
    def unreported(self) -> DataReport:
        """What no report has carried yet; it stays so."""
        with self._lock:
            return DataReport(
                tuple(self._consumed), tuple(self._dropped), self._incarnation
            )

    @property
    def has_drawn(self) -> bool:
        """Whether anything was drawn since the last push."""
        with self._lock:
            return bool(self._sample_counts)

    @property
    def has_news(self) -> bool:
        """Whether there is something to report."""
        with self._lock:
            return bool(self._consumed or self._dropped or self._skipped)
