"""Positions of an epoch, kept as runs: neighbours take no more room than one."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable


class PositionSet:
    """A set of positions.

    Invariant: its runs are sorted, not empty, and have gaps between them.

    Args:
        runs: Pairs of a first position and one past the last; they may meet.
    """

    def __init__(self, runs: Iterable[tuple[int, int]] = ()) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []
        for start, stop in runs:
            self.add(start, stop)

    def copy(self) -> "PositionSet":
        copied = PositionSet()
        copied._starts = self._starts.copy()
        copied._stops = self._stops.copy()
        return copied

    @property
    def runs(self) -> list[tuple[int, int]]:
        """First position of each run and one past its last, in order."""
        return list(zip(self._starts, self._stops, strict=True))

    @property
    def run_count(self) -> int:
        return len(self._starts)

    @property
    def position_count(self) -> int:
        return sum(self._stops) - sum(self._starts)

    def covers(self, start: int, stop: int) -> bool:
        """Whether all of `[start, stop)` is in it; nothing is in nothing."""
        at = bisect_right(self._starts, start) - 1
        return at >= 0 and start < stop <= self._stops[at]

    def add(self, start: int, stop: int) -> None:
        """Takes `[start, stop)` in, whatever of it is there."""
        if start >= stop:
            return
        # All runs that it meets become one with it.
        first = bisect_left(self._stops, start)
        last = bisect_right(self._starts, stop)
        if first < last:
            start = min(start, self._starts[first])
            stop = max(stop, self._stops[last - 1])
        self._starts[first:last] = [start]
        self._stops[first:last] = [stop]

    def remove(self, start: int, stop: int) -> None:
        """Takes out `[start, stop)`, of which all is there."""
        assert self.covers(start, stop)
        at = bisect_right(self._starts, start) - 1
        edges = (self._starts[at], start), (stop, self._stops[at])
        left = [(begin, end) for begin, end in edges if begin < end]
        self._starts[at : at + 1] = [begin for begin, _ in left]
        self._stops[at : at + 1] = [end for _, end in left]

    def pop_first(self) -> tuple[int, int]:
        """Takes out the run with the lowest positions."""
        return self._starts.pop(0), self._stops.pop(0)

    def __bool__(self) -> bool:
        return bool(self._starts)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PositionSet) and self.runs == other.runs

    __hash__ = None  # type: ignore[assignment]  # it changes

    def __repr__(self) -> str:
        return f"PositionSet({self.runs})"
