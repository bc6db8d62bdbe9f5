"""Which numbers a setting may have, and the one form of what is said of others."""

import math
from typing import Any

import pytest

from pswire.number_range import NumberRange

COUNT = NumberRange(1, 64)
SECONDS = NumberRange(0.0, 3600.0, unit="seconds", why="nobody waits longer")


@pytest.mark.parametrize(
    ("allowed", "text", "number"),
    [(COUNT, "1", 1), (COUNT, " 64 ", 64), (SECONDS, "0", 0.0), (SECONDS, "1e3", 1e3)],
)
def test_the_limits_and_what_is_between_them_are_taken(
    allowed: NumberRange, text: str, number: float
) -> None:
    found = allowed.parsed(text)
    assert found == number
    assert type(found) is type(number)
    assert allowed.problem(found) == ""


@pytest.mark.parametrize("text", ["0", "-1", "65", "9" * 30, "1.5", "1e1", "1e400"])
def test_a_number_is_shown_as_it_was_typed(text: str) -> None:
    with pytest.raises(ValueError, match="is not") as caught:
        COUNT.parsed(text)
    assert str(caught.value) == f"{text} is not a whole number from 1 to 64"


@pytest.mark.parametrize("text", ["abc", "", "a\nb", "0x10", "1,5"])
def test_what_is_no_number_is_quoted(text: str) -> None:
    with pytest.raises(ValueError, match="is not") as caught:
        COUNT.parsed(text)
    assert str(caught.value) == f"{text!r} is not a whole number from 1 to 64"


@pytest.mark.parametrize("text", ["nan", "inf", "-inf", "3600.1", "-0.1"])
def test_a_time_is_finite_and_within_its_limits(text: str) -> None:
    with pytest.raises(ValueError, match="is not") as caught:
        SECONDS.parsed(text)
    assert str(caught.value) == (
        f"{text} is not a number of seconds from 0 to 3600: nobody waits longer"
    )


def test_a_number_of_any_length_is_told_what_is_allowed() -> None:
    with pytest.raises(ValueError, match="from 1 to 64") as caught:
        COUNT.parsed("9" * 5_000)
    assert len(str(caught.value)) < 100


@pytest.mark.parametrize(
    ("is_above", "is_below", "words"),
    [
        (False, False, "from 0 to 1"),
        (True, False, "above 0, at most 1"),
        (False, True, "from 0, less than 1"),
        (True, True, "above 0, less than 1"),
    ],
)
def test_a_limit_itself_may_be_refused(
    is_above: bool, is_below: bool, words: str
) -> None:
    allowed = NumberRange(0.0, 1.0, is_above=is_above, is_below=is_below)
    assert bool(allowed.problem(0)) is is_above
    assert bool(allowed.problem(1)) is is_below
    assert allowed.problem(0.5) == ""
    assert allowed.problem(2) == f"2 is not a number {words}"


@pytest.mark.parametrize(
    "given", [0, 65, -1, math.nan, math.inf, 1.0, True, None, "3", [3], 1 << 70]
)
def test_a_value_of_another_type_is_no_number(given: Any) -> None:  # noqa: ANN401
    assert COUNT.problem(given) == f"{given!r} is not a whole number from 1 to 64"


def test_the_least_one_may_be_left_out() -> None:
    above = NumberRange(0.0, 10.0, is_above=True)
    assert above.problem(1) == above.problem(0.1) == above.problem(10) == ""
    assert above.problem(0) == "0 is not a number above 0, at most 10"
