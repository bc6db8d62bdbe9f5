"""How often a wait that goes on is said again, in every log alike."""

from typing import Final

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
