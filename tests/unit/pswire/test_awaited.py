"""A wait tells a worker that is busy from one that is dead, in one form of words.

It is said again at a falling rate, and never forgotten.
"""

from itertools import pairwise

import pytest

from pswire.awaited import NOT_KNOWN, Awaited, next_due


@pytest.mark.parametrize(
    ("step_ms", "lost_ms", "text"),
    [
        (25_000, 0, "w1 (alive, in step 10 for 25 s)"),
        (25_000, 12_000, "w1 (lost 12 s ago in step 10)"),
        (25_000, NOT_KNOWN, "w1 (in step 10 for 25 s)"),
        (NOT_KNOWN, 0, "w1 (alive, no push yet)"),
        (NOT_KNOWN, 12_000, "w1 (lost 12 s ago in step 10)"),
        (NOT_KNOWN, NOT_KNOWN, "w1 (no push yet)"),
    ],
)
def test_sign_of_life_and_time_in_the_step_are_two_things(
    step_ms: int, lost_ms: int, text: str
) -> None:
    assert str(Awaited("w1", 9, step_ms, lost_ms)) == text


def lines(duration: float, first: float) -> list[float]:
    found: list[float] = []
    while (due := next_due(found[-1] if found else 0, first)) <= duration:
        found.append(due)
    return found


@pytest.mark.parametrize("unit", [1, 1000])
def test_each_line_comes_after_twice_the_time(unit: int) -> None:
    assert lines(90 * unit, 5 * unit) == [each * unit for each in (5, 10, 20, 40, 80)]


def test_no_five_minutes_pass_without_a_line() -> None:
    told = lines(7200, 5)
    assert told[-3:] == [6320, 6620, 6920]
    assert max(b - a for a, b in pairwise(told)) == 300


def test_a_line_that_was_said_late_moves_the_next_one() -> None:
    assert next_due(7, 5) == 14
