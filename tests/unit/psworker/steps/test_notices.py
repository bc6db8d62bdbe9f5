"""What a worker's log says of pushes that end differently."""

import logging

import pytest

from psworker.optim.push_result import PushResult
from psworker.steps.notices import DROP_COUNT_PER_LINE, LATE_COUNT_MIN, Notices


def result(outcome: str, *nonfinite_worker_ids: str) -> PushResult:
    return PushResult(
        outcome=outcome,
        clock=7,
        version=6,
        frontier=7,
        staleness=0,
        mode="bsp",
        duplicate=False,
        nonfinite_worker_ids=nonfinite_worker_ids,
    )


@pytest.mark.parametrize(
    ("worker_ids", "of_whom"),
    [(("w1",), "w1"), (("w0", "w2"), "w0, w2"), ((), "some worker")],
)
def test_a_skipped_clock_is_told_with_whose_gradient_it_was(
    caplog: pytest.LogCaptureFixture,
    worker_ids: tuple[str, ...],
    of_whom: str,
) -> None:
    with caplog.at_level(logging.WARNING, "psworker"):
        Notices().note_result(result("skipped", *worker_ids), is_discarded=False)

    assert caplog.messages == [
        f"clock 7 was skipped: the gradient of {of_whom} was not finite, or larger "
        "than the job's --gradient-norm-max"
    ]


def test_a_push_that_was_applied_is_not_worth_a_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    Notices().note_result(result("applied"), is_discarded=False)

    assert not caplog.messages


def test_dropped_pushes_are_told_at_the_first_and_at_each_hundred(
    caplog: pytest.LogCaptureFixture,
) -> None:
    notices = Notices()
    for _ in range(DROP_COUNT_PER_LINE):
        notices.note_result(result("dropped"), is_discarded=True)
    assert not caplog.messages

    for _ in range(2 * DROP_COUNT_PER_LINE):
        notices.note_result(result("dropped"), is_discarded=False)

    first, *more = caplog.messages
    assert first.startswith("what this worker pushed was thrown away, since clock 7 ")
    assert more == [f"{count} pushes were thrown away so far" for count in (100, 200)]


def test_a_step_that_is_late_for_clock_after_clock_is_told_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    notices = Notices()
    for count in range(1, LATE_COUNT_MIN):
        notices.note_late(count, count, 60.0)
    assert not caplog.messages

    for count in range(LATE_COUNT_MIN, 3 * LATE_COUNT_MIN):
        notices.note_late(count, count, 60.0)

    (text,) = caplog.messages
    assert text.startswith(
        "a step of this worker was late for 10 clocks in a row, up to clock 10, and is "
        "sent again for each next one, for 60 s at most: the job closes clocks without"
    )
    assert "raise the quorum or the grace window" in text
