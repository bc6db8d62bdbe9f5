"""A wait tells a worker that is busy from one that is dead, in one form of words."""

import pytest

from pswire.awaited import NOT_KNOWN, Awaited


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
