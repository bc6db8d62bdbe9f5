"""A wait is said again at a falling rate, and never forgotten."""

from itertools import pairwise

import pytest

from pswire.repeats import next_due


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
