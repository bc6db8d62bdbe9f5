"""Signals that ask a process to end: which are one wish, and which a second one.

A second wish ends a process at once. `timeout` and some supervisors send a signal to
the process and, in the same moment, to its group or all of its service: it comes twice,
and nobody has lost patience.
"""

import time
from collections.abc import Callable
from enum import Enum
from typing import Final

SAME_WISH_S: Final = 0.5
"""Signals that come so soon after the first are the same wish. Those of one sender are
microseconds apart; who presses Ctrl-C again has seen first that nothing happened."""


class Heard(Enum):
    FIRST = "first"
    SAME = "same"
    AGAIN = "again"


class EndWish:
    """What a process has heard of the wish that it ends."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._first_s: float | None = None

    def hear(self) -> Heard:
        """Notes a signal, whatever its number."""
        now_s = self._clock()
        if self._first_s is None:
            self._first_s = now_s
            return Heard.FIRST
        return Heard.SAME if now_s - self._first_s < SAME_WISH_S else Heard.AGAIN
