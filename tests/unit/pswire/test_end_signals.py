"""Which signals are one wish of a process's end, and which a second one."""

import pytest

from pswire.end_signals import SAME_WISH_S, EndWish, Heard
from tests.doubles.manual_clock import ManualClock


def test_signals_of_one_moment_are_one_wish() -> None:
    clock = ManualClock()
    wish = EndWish(clock)
    assert wish.hear() is Heard.FIRST
    assert wish.hear() is Heard.SAME
    clock.now_s += SAME_WISH_S * 0.9
    assert wish.hear() is Heard.SAME


@pytest.mark.parametrize("later_s", [SAME_WISH_S, 60.0])
def test_a_later_one_is_a_second_wish(later_s: float) -> None:
    clock = ManualClock()
    wish = EndWish(clock)
    assert wish.hear() is Heard.FIRST
    clock.now_s += later_s
    assert wish.hear() is Heard.AGAIN


def test_the_moment_begins_with_the_first_and_ends() -> None:
    clock = ManualClock()
    wish = EndWish(clock)
    heard = []
    for _ in range(5):
        heard.append(wish.hear())
        clock.now_s += SAME_WISH_S * 0.4
    assert heard == [Heard.FIRST, Heard.SAME, Heard.SAME, Heard.AGAIN, Heard.AGAIN]
