"""Work in threads beside the event loop, and what it takes of the processors."""

import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from psserver.edge import file_calls
from psserver.edge.decoding import LARGE_BYTES_MIN, parsed
from psserver.edge.file_calls import in_thread


def niceness() -> int:
    """Of the thread that asks."""
    return os.getpriority(os.PRIO_PROCESS, 0)


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no priorities there")
async def test_what_is_done_in_the_background_leaves_training_the_processors() -> None:
    before = niceness()
    assert await in_thread(niceness) == before
    assert await in_thread(niceness, is_background=True) == min(19, before + 10)
    assert niceness() == before


async def test_an_error_of_the_thread_is_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        await in_thread(lambda: 1 // 0, is_background=True)


async def test_work_waits_for_a_thread_where_the_system_allows_none(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    start, count = threading.Thread.start, 0

    def refused(thread: threading.Thread) -> None:
        nonlocal count
        count += 1
        if count <= 2:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(file_calls, "THREAD_RETRY_S", 0.01)
    monkeypatch.setattr(threading.Thread, "start", refused)

    assert await in_thread(lambda: 7) == 7
    assert count == 3
    assert "waits, and steps go on: can't start new thread" in caplog.text


async def test_a_large_message_is_parsed_without_a_thread_if_there_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("psserver.edge.decoding._thread", ThreadPoolExecutor(1))
    monkeypatch.setattr(threading.Thread, "start", refused)

    assert await parsed(LARGE_BYTES_MIN, lambda: 7) == 7
