"""Data that was drawn from a prepared loader and not yet pushed.

A loader draws, the next push takes everything drawn since the push before, and its
acknowledgement turns the ranges into consumed ones, which the next lease request or
the leave reports. Thread-safe: the user's thread draws, while acknowledgements may
come on the event loop's.
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


class PendingData:
    """Ranges on their way from a loader through a push to the coordinator."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sample_count: int | None = None
        self._drawn: list[DataRange] = []
        self._consumed: list[DataRange] = []

    def draw(self, sample_count: int, data_range: DataRange | None = None) -> None:
        """Notes a batch at the moment it's handed to the user."""
        with self._lock:
            self._sample_count = (self._sample_count or 0) + sample_count
            if data_range is not None:
                self._drawn.append(data_range)

    def take(self) -> DrawnData:
        """What the next push carries. The caller acknowledges its ranges later."""
        with self._lock:
            drawn = DrawnData(self._sample_count, tuple(self._drawn))
            self._sample_count = None
            self._drawn = []
            return drawn

    def acknowledge(self, ranges: tuple[DataRange, ...]) -> None:
        """A push that carried these ranges is part of the parameters."""
        with self._lock:
            self._consumed.extend(ranges)

    def take_consumed(self) -> tuple[DataRange, ...]:
        """Acknowledged ranges that no report has carried yet."""
        with self._lock:
            consumed = tuple(self._consumed)
            self._consumed = []
            return consumed

    def return_consumed(self, ranges: tuple[DataRange, ...]) -> None:
        """A report that carried these ranges failed: the next one tells them."""
        with self._lock:
            self._consumed[:0] = ranges

    @property
    def has_consumed(self) -> bool:
        """Whether there is something to report."""
        with self._lock:
            return bool(self._consumed)
