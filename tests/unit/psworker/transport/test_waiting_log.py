import asyncio
import logging

import pytest

from pswire.awaited import Awaited
from psworker.transport.values import Waiting
from psworker.transport.waiting_log import WaitingLog, saying_whom
from tests.doubles.manual_clock import ManualClock

WAITING = Waiting(42, 5000, "", (Awaited("w2", 41, 7000), Awaited("w3", 0, -1)))


def test_waiting_names_everyone_with_its_step() -> None:
    assert str(WAITING) == ("w2 (in step 42 for 7 s), w3 (no push yet)")


def test_a_crowd_is_counted() -> None:
    crowd = tuple(Awaited(f"w{index}", 1, 0) for index in range(20))

    assert str(Waiting(1, 0, "", crowd)).endswith("and 12 more")


def test_all_shards_together_say_one_line_at_growing_intervals(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = ManualClock()
    log = WaitingLog(clock)
    with caplog.at_level(logging.WARNING, "psworker"):
        for seconds in (5.0, 5.01, 5.02, 10.0, 10.01, 15.0, 20.0, 20.01):
            clock.now_s = 100 + seconds
            log.note(WAITING)

    assert [record.getMessage() for record in caplog.records] == [
        f"waiting for {WAITING}, 5 s so far",
        f"waiting for {WAITING}, 10 s so far",
        f"waiting for {WAITING}, 20 s so far",
    ]


def test_a_reminder_says_nothing_early(caplog: pytest.LogCaptureFixture) -> None:
    clock = ManualClock()
    log = WaitingLog(clock)
    with caplog.at_level(logging.WARNING, "psworker"):
        for seconds in (1.0, 4.9, 5.0, 7.0, 10.0, 15.0, 20.0):
            clock.now_s = 100 + seconds
            log.remind("w1 to join")

    assert [record.getMessage() for record in caplog.records] == [
        "waiting for w1 to join, 5 s so far",
        "waiting for w1 to join, 10 s so far",
        "waiting for w1 to join, 20 s so far",
    ]


def test_a_wait_of_the_whole_job_is_told_apart_from_that_of_the_worker(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = ManualClock()
    log = WaitingLog(clock)
    with caplog.at_level(logging.WARNING, "psworker"):
        for seconds, job_waited_s in ((5.0, 310.0), (10.0, 12.0)):
            clock.now_s = 100 + seconds
            log.remind("1 more worker to call prepare()", job_waited_s=job_waited_s)

    assert [record.getMessage() for record in caplog.records] == [
        "waiting for 1 more worker to call prepare(), 5 s so far (the job has waited "
        "for 310 s)",
        "waiting for 1 more worker to call prepare(), 10 s so far",
    ]


async def test_a_call_that_takes_long_says_for_whom(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("psworker.transport.waiting_log.WAITING_INTERVAL_MS", 10)

    said: list[str] = []
    twice = asyncio.Event()

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())
            if len(said) == 2:
                twice.set()

    async def work() -> int:
        await twice.wait()
        return 7

    listener = Listener()
    logging.getLogger("psworker").addHandler(listener)
    try:
        assert await saying_whom(work, "the coordinator at host:1") == 7
    finally:
        logging.getLogger("psworker").removeHandler(listener)
    assert all(
        line.startswith("waiting for the coordinator at host:1, ") for line in said
    )
