"""Lines that others can cause at will are few."""

import logging

import pytest

from psserver.logs import REFUSAL_LINES_MAX, REFUSAL_PERIOD_S, RefusalLog

LOG = logging.getLogger("psserver.test")


class Clock:
    """Stands still until it is told."""

    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_a_period_has_few_lines_and_the_next_says_how_many_there_were(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = Clock()
    refusals = RefusalLog(LOG, clock)
    for number in range(1000):
        refusals.warning("refused %d", number)
    assert caplog.messages == [f"refused {n}" for n in range(REFUSAL_LINES_MAX)]

    clock.now_s += REFUSAL_PERIOD_S - 0.1
    refusals.warning("refused in the same period")
    caplog.clear()
    clock.now_s += 0.1
    refusals.warning("refused %s", "later")
    refusals.warning("refused then")

    left_out = 1001 - REFUSAL_LINES_MAX
    assert caplog.messages == [
        f"refused later ({left_out} lines like this were left out before)",
        "refused then",
    ]


def test_few_lines_are_all_written(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    refusals = RefusalLog(LOG, clock)
    for _ in range(20):
        clock.now_s += REFUSAL_PERIOD_S / REFUSAL_LINES_MAX
        refusals.warning("refused")
    assert caplog.messages == ["refused"] * 20


def test_an_error_has_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    RefusalLog(LOG, Clock()).warning("failed", error=OSError("x"))
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert record.exc_info is not None
