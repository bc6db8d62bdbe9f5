"""Waits, as every log and error names them: for which worker, and how often.

Two measures that a wait must not mix: how long the worker has been in its step, which
a shard knows from its pushes and which is long while a script validates; and since
when there is no sign of life of it, which the coordinator knows from its watch.
"""

from dataclasses import dataclass
from typing import Final

NOT_KNOWN: Final = -1
"""Of a time that nobody knows."""


@dataclass(frozen=True, slots=True)
class Awaited:
    """A worker that somebody waits for.

    Attributes:
        name: Its id.
        clock: Clocks it has completed.
        step_ms: How long it has been in the step after them: time since its last push
            was done, or began to arrive. `NOT_KNOWN` before its first push.
        lost_ms: Time without a sign of life at the coordinator, 0 while there is one,
            `NOT_KNOWN` where the coordinator has not said.
    """

    name: str
    clock: int
    step_ms: int
    lost_ms: int = NOT_KNOWN

    def __str__(self) -> str:
        return f"{self.name} ({self.state})"

    @property
    def state(self) -> str:
        """Whether it lives, as far as that is known, and in which step it is."""
        if self.lost_ms > 0:
            return f"{lost_text(self.lost_ms)} in step {self.clock + 1}"
        step = (
            "no push yet"
            if self.step_ms < 0
            else f"in step {self.clock + 1} for {self.step_ms / 1000:.0f} s"
        )
        return f"alive, {step}" if self.lost_ms == 0 else step


def lost_text(lost_ms: int) -> str:
    """Since when there is no sign of life of a process, in words."""
    return f"lost {lost_ms / 1000:.0f} s ago"


_GAPS_MAX: Final = 60
"""Longest time between two lines, in first ones: 5 minutes after 5 s."""


def next_due(waited: float, first: float) -> float:
    """When a wait is to be said next: after 5, 10, 20, 40 s and so on.

    Whoever looks at the log an hour later finds a line for each stage, not a thousand
    that differ in a number.

    Args:
        waited: For how long it had lasted as it was said last, 0 if it never was.
        first: After which time it is said first, in the same unit.

    Returns:
        For how long it will have lasted then.
    """
    return waited + min(max(waited, first), first * _GAPS_MAX)
