import asyncio
import threading
from concurrent.futures import CancelledError

import pytest

from psworker import event_loop


def test_work_runs_on_another_thread_and_gives_its_result() -> None:
    loop = event_loop.acquire()
    try:

        async def name() -> str:
            return threading.current_thread().name

        assert loop.run(name()) == "psworker-loop"
    finally:
        event_loop.release()


def test_the_last_user_ends_the_thread_and_what_still_runs() -> None:
    cancelled = threading.Event()
    started = threading.Event()

    async def forever() -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    loop = event_loop.acquire()
    same = event_loop.acquire()
    future = loop.submit(forever())
    assert started.wait(10)
    event_loop.release()
    assert not cancelled.is_set()
    event_loop.release()

    assert same is loop
    assert cancelled.is_set()
    assert future.cancelled()
    assert "psworker-loop" not in {each.name for each in threading.enumerate()}


def test_a_wait_that_ends_early_cancels_the_work() -> None:
    cancelled = threading.Event()

    async def forever() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    loop = event_loop.acquire()
    try:
        with pytest.raises(TimeoutError):
            loop.run(forever(), timeout_s=0.01)
        assert cancelled.wait(10)
    finally:
        event_loop.release()


def test_whoever_starts_work_is_told_of_its_end_and_then_asks() -> None:
    has_ended = threading.Event()

    async def fail() -> None:
        raise ValueError("as the test wants it")

    loop = event_loop.acquire()
    try:
        running = loop.start(asyncio.sleep(0, "done"), has_ended.set)
        assert has_ended.wait(10)
        assert running.result() == "done"
        has_ended.clear()
        failing = loop.start(fail(), has_ended.set)
        assert has_ended.wait(10)
        with pytest.raises(ValueError, match="as the test wants it"):
            failing.result()
    finally:
        event_loop.release()


def test_started_work_that_is_cancelled_tells_its_end_too() -> None:
    has_ended = threading.Event()
    loop = event_loop.acquire()
    try:
        running = loop.start(asyncio.Event().wait(), has_ended.set)
        running.cancel()
        assert has_ended.wait(10)
        with pytest.raises(CancelledError):
            running.result()
    finally:
        event_loop.release()
