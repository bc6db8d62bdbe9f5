"""How far an epoch of a job is, and how long it will take, from the job's status."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

WINDOW_S: Final = 30.0
"""The rate is that of so long: a stop shows soon, and a single step does not."""

_LEAST_S: Final = 1.0
"""Samples are dealt with in batches: a rate of less time says nothing."""

Document = dict[str, Any]


def duration_text(seconds: float) -> str:
    """As a clock shows it: `0:12`, `3:05:09`."""
    whole = max(0, round(seconds))
    hours, rest = divmod(whole, 3600)
    minutes, left = divmod(rest, 60)
    return f"{hours}:{minutes:02}:{left:02}" if hours else f"{minutes}:{left:02}"


@dataclass(frozen=True, slots=True)
class EpochProgress:
    """The newest epoch.

    Attributes:
        loader: Its loader.
        epoch: Its number, from 0.
        done_count: Positions that are dealt with, whatever became of them.
        count: All that there are to deal with.
        left_s: How long the rest takes at the rate of late; None where none is known.
        is_over: Whether it is over.
    """

    loader: str
    epoch: int
    done_count: int
    count: int
    left_s: float | None
    is_over: bool

    @property
    def part(self) -> float:
        """From 0 to 1."""
        return self.done_count / self.count if self.count else 1.0

    @property
    def left_text(self) -> str:
        """Such as `0:12 left`; empty where that is not known."""
        if self.is_over or self.left_s is None:
            return ""
        return f"{duration_text(self.left_s)} left"


class Pace:
    """Follows the newest epoch of a job, one status after the other."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._key: tuple[str, int] | None = None
        self._seen: deque[tuple[float, int]] = deque()

    def take(self, document: Document) -> EpochProgress | None:
        """Where the newest epoch is; None for a job without one."""
        if not document["epochs"]:
            return None
        newest = document["epochs"][0]
        count = newest["position_count"] - newest["left_out_count"]
        done = newest["position_count"] - newest["never_count"]
        done = max(0, min(count, done - newest["left_out_count"]))
        key, now_s = (newest["loader"], newest["epoch"]), self._now_s()
        if key != self._key or (self._seen and self._seen[-1][1] > done):
            self._key = key
            self._seen.clear()
        self._seen.append((now_s, done))
        while now_s - self._seen[0][0] > WINDOW_S:
            self._seen.popleft()
        return EpochProgress(
            *key, done, count, self._left_s(count - done), is_over=newest["over"]
        )

    def _left_s(self, left_count: int) -> float | None:
        (first_s, first), (last_s, last) = self._seen[0], self._seen[-1]
        if last_s - first_s < _LEAST_S or last <= first:
            return None
        return left_count * (last_s - first_s) / (last - first)
