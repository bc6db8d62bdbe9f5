"""What a worker's log and its account of data say of pushes that end differently."""

import logging

import pytest

from pswire.leased_data import DataRange, DataReport
from psworker.data.pending import PendingData
from psworker.optim.push_result import PushResult
from psworker.steps.push_account import PushAccount

FIRST = DataRange("loader", 0, 0, 4)


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


@pytest.fixture
def pending() -> PendingData:
    return PendingData()


@pytest.mark.parametrize(
    ("worker_ids", "of_whom"),
    [(("w1",), "w1"), (("w0", "w2"), "w0, w2"), ((), "some worker")],
)
def test_a_skipped_clock_is_told_with_whose_gradient_it_was(
    caplog: pytest.LogCaptureFixture,
    pending: PendingData,
    worker_ids: tuple[str, ...],
    of_whom: str,
) -> None:
    with caplog.at_level(logging.WARNING, "psworker"):
        skipped = result("skipped", *worker_ids)
        PushAccount(pending).note(skipped, (FIRST,), is_discarded=False)

    assert caplog.messages == [
        f"clock 7 was skipped: the gradient of {of_whom} was not finite"
    ]
    assert pending.take_report() == DataReport((FIRST,))


def test_a_push_that_was_applied_is_not_worth_a_line(
    caplog: pytest.LogCaptureFixture, pending: PendingData
) -> None:
    PushAccount(pending).note(result("applied"), (FIRST,), is_discarded=False)

    assert not caplog.messages
    assert pending.take_report() == DataReport((FIRST,))


@pytest.mark.parametrize("is_discarded", [False, True])
def test_data_of_a_dropped_push_counts_as_dropped_and_is_told_once(
    caplog: pytest.LogCaptureFixture, pending: PendingData, *, is_discarded: bool
) -> None:
    PushAccount(pending).note(result("dropped"), (FIRST,), is_discarded=is_discarded)

    lines = [
        each.startswith("what this worker pushed was thrown away")
        for each in caplog.messages
    ]
    assert lines == ([] if is_discarded else [True])
    assert pending.take_report() == DataReport((), (FIRST,))
