import asyncio
import gc
import multiprocessing
import os
import subprocess
import sys
import threading
from concurrent.futures import CancelledError
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import grpc.aio
import pytest

from pswire import channels
from psworker import event_loop
from psworker.errors import ClosedError


@pytest.fixture(autouse=True)
def _no_users(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a new process, whatever other tests have left open."""
    monkeypatch.setattr(event_loop, "_shared", None)
    monkeypatch.setattr(event_loop, "_user_count", 0)
    monkeypatch.setattr(event_loop, "_loops", {})
    monkeypatch.setattr(channels, "_channels", {})


def test_work_runs_on_another_thread_and_gives_its_result() -> None:
    loop = event_loop.acquire()
    try:

        async def name() -> str:
            return threading.current_thread().name

        assert loop.run(name) == "psworker-loop"
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

    before = set(threading.enumerate())
    loop = event_loop.acquire()
    same = event_loop.acquire()
    future = loop.submit(forever)
    assert started.wait(10)
    event_loop.release()
    assert not cancelled.is_set()
    event_loop.release()

    assert same is loop
    assert cancelled.is_set()
    with pytest.raises(CancelledError):
        future.result(0)
    assert set(threading.enumerate()) <= before


def test_there_is_one_loop_however_often_its_thread_ends() -> None:
    """gRPC keeps each that it has seen, at 256 KiB."""
    seen = []
    for _ in range(3):
        loop = event_loop.acquire()
        seen.append(loop.run(running_loop))
        event_loop.release()

    assert seen == [seen[0]] * 3


async def running_loop() -> asyncio.AbstractEventLoop:
    return asyncio.get_running_loop()


def test_one_that_has_stopped_takes_no_work() -> None:
    loop = event_loop.acquire()
    event_loop.release()

    with pytest.raises(ClosedError, match="last connection of this process was closed"):
        loop.submit(running_loop)
    with pytest.raises(ClosedError, match="connect again"):
        loop.submit(running_loop, lambda: None)
    with pytest.raises(ClosedError, match="connect again"):
        loop.post(lambda: None)


def test_another_thread_that_closes_ends_a_wait() -> None:
    loop = event_loop.acquire()
    begun = threading.Event()
    ended: list[BaseException] = []

    async def forever() -> None:
        begun.set()
        await asyncio.Event().wait()

    def wait() -> None:
        try:
            loop.run(forever)
        except CancelledError as error:
            ended.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    assert begun.wait(10)
    event_loop.release()
    waiting.join(10)

    assert len(ended) == 1


def test_what_a_thread_leaves_behind_is_not_done_by_the_next() -> None:
    done: list[str] = []

    async def outlive(generations: int) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            if generations:
                keep.append(asyncio.ensure_future(outlive(generations - 1)))
            asyncio.get_running_loop().call_soon(done.append, "called")

    keep: list[asyncio.Future[None]] = []
    loop = event_loop.acquire()
    loop.submit(lambda: outlive(4))
    loop.run(lambda: asyncio.sleep(0))
    event_loop.release()
    by_the_first = list(done)
    loop = event_loop.acquire()
    try:
        left = loop.run(other_tasks)
    finally:
        event_loop.release()

    assert by_the_first == done == ["called"] * 5
    assert left == set()
    assert [each.cancelled() for each in keep] == [True] * 4


async def other_tasks() -> set[asyncio.Task[object]]:
    await asyncio.sleep(0.01)
    return asyncio.all_tasks() - {asyncio.current_task()}


def test_work_that_races_with_the_end_is_done_cancelled_or_refused() -> None:
    """Never forgotten: whoever waits for it would wait for good."""
    for _ in range(100):
        loop = event_loop.acquire()
        outcomes: list[str] = []
        has_begun = threading.Event()

        def work(
            loop: event_loop.EventLoop = loop,
            outcomes: list[str] = outcomes,
            has_begun: threading.Event = has_begun,
        ) -> None:
            while not outcomes or outcomes[-1] == "done":
                has_begun.set()
                try:
                    outcomes.append(
                        loop.run(lambda: asyncio.sleep(0, "done"), timeout_s=10)
                    )
                except (CancelledError, ClosedError) as error:
                    outcomes.append(type(error).__name__)

        worker = threading.Thread(target=work)
        worker.start()
        assert has_begun.wait(10)
        event_loop.release()
        worker.join(10)

        assert outcomes[-1] in ("CancelledError", "ClosedError")


def test_a_callback_that_raises_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise ValueError("as the test wants it")

    loop = event_loop.acquire()
    try:
        loop.post(fail)
        assert loop.run(lambda: asyncio.sleep(0, "served")) == "served"
    finally:
        event_loop.release()
    assert "as the test wants it" in caplog.text


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_callback_that_exits_ends_the_thread_and_every_wait() -> None:
    def leave() -> None:
        raise SystemExit(3)

    loop = event_loop.acquire()
    try:
        waiting = loop.submit(lambda: asyncio.Event().wait())
        loop.post(leave)
        with pytest.raises(CancelledError):
            waiting.result(10)
        loop.stop()
        with pytest.raises(ClosedError):
            loop.run(running_loop)
        again = event_loop.acquire()  # though the first user is still there
        try:
            assert again.run(lambda: asyncio.sleep(0, "served")) == "served"
        finally:
            event_loop.release()
    finally:
        event_loop.release()


def test_threads_beside_it_end_with_it() -> None:
    before = set(threading.enumerate())
    loop = event_loop.acquire()
    aside = loop.run(lambda: asyncio.to_thread(threading.current_thread))
    event_loop.release()
    aside.join(10)

    assert set(threading.enumerate()) <= before
    loop = event_loop.acquire()
    try:
        assert loop.run(lambda: asyncio.to_thread(str, "again")) == "again"
    finally:
        event_loop.release()


def test_a_channel_that_is_garbage_leaves_grpc_to_the_thread_that_serves() -> None:
    """Else the thread that collects the last one changes a loop that is running."""

    async def open_and_close() -> None:
        channel = grpc.aio.insecure_channel("127.0.0.1:1")
        await channel.close()

    def pollers() -> set[threading.Thread]:
        threads = threading.enumerate()
        return {each for each in threads if "_poll_wrapper" in each.name}

    gc.collect()  # what other tests have left
    before = pollers()
    loop = event_loop.acquire()
    try:
        loop.run(open_and_close)
        serving = pollers()
        gc.collect()
        assert serving
        assert pollers() == serving
    finally:
        event_loop.release()
    gc.collect()
    assert pollers() == before


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_has_a_loop_of_its_own() -> None:
    """Its parent's waits on its parent's sockets."""
    event_loop.acquire()
    event_loop.release()
    child = multiprocessing.get_context("fork").Process(target=serve_in_child)
    child.start()
    child.join(30)

    assert child.exitcode == 0
    loop = event_loop.acquire()
    try:
        assert loop.run(lambda: asyncio.sleep(0, "served")) == "served"
    finally:
        event_loop.release()


def serve_in_child() -> None:
    inherited = set(event_loop._loops.values())
    loop = event_loop.acquire()
    assert loop.run(running_loop) not in inherited
    event_loop.release()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_child_of_a_connected_process_is_told_so() -> None:
    loop = event_loop.acquire()
    try:
        child = multiprocessing.get_context("fork").Process(
            target=refused_in_child, args=(loop,)
        )
        child.start()
        child.join(30)
    finally:
        event_loop.release()
    assert child.exitcode == 0


def refused_in_child(loop: event_loop.EventLoop) -> None:
    with pytest.raises(ClosedError, match="was forked after psworker was connected"):
        loop.run(running_loop)


def test_a_process_that_ends_says_nothing_of_its_loop() -> None:
    program = (
        "import asyncio\n"
        "from psworker import event_loop\n"
        "event_loop.acquire().run(lambda: asyncio.sleep(0))\n"
        "event_loop.release()\n"
        "event_loop.acquire().submit(asyncio.Event().wait)\n"
    )
    # Not `-X dev`: asyncio would name each callback that a busy machine makes slow.
    done = subprocess.run(
        [sys.executable, "-W", "always", "-c", program],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_wait_that_ends_early_cancels_the_work() -> None:
    begun, cancelled = threading.Event(), threading.Event()

    async def forever() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    loop = event_loop.acquire()
    try:
        while not begun.is_set():  # cancelled before, there is nothing to see of it
            with pytest.raises(TimeoutError):
                loop.run(forever, timeout_s=0.01)
        assert cancelled.wait(10)
    finally:
        event_loop.release()


def test_whoever_starts_work_is_told_of_its_end_and_then_asks() -> None:
    has_ended = threading.Event()

    async def fail() -> None:
        raise ValueError("as the test wants it")

    loop = event_loop.acquire()
    try:
        running = loop.submit(lambda: asyncio.sleep(0, "done"), has_ended.set)
        assert has_ended.wait(10)
        assert running.result() == "done"
        has_ended.clear()
        failing = loop.submit(fail, has_ended.set)
        assert has_ended.wait(10)
        with pytest.raises(ValueError, match="as the test wants it"):
            failing.result()
    finally:
        event_loop.release()


def test_started_work_that_is_cancelled_tells_its_end_too() -> None:
    has_ended = threading.Event()
    loop = event_loop.acquire()
    try:
        running = loop.submit(lambda: asyncio.Event().wait(), has_ended.set)
        running.cancel()
        assert has_ended.wait(10)
        with pytest.raises(CancelledError):
            running.result()
    finally:
        event_loop.release()


def test_a_handler_may_wait_at_any_line_of_a_wait() -> None:
    """One that saves asks the loop too, which must not need what a wait holds."""
    loop = event_loop.acquire()
    interrupted: set[tuple[str, int]] = set()

    def trace(frame: FrameType, event: str, _: object) -> Any:  # noqa: ANN401, as sys wants it
        line = frame.f_code.co_filename, frame.f_lineno
        if event == "line" and line not in interrupted:
            interrupted.add(line)
            sys.settrace(None)
            assert loop.run(lambda: asyncio.sleep(0, "saved"), 10) == "saved"
            sys.settrace(trace)
        return trace

    async def later(count: int) -> int:
        for _ in range(count):
            await asyncio.sleep(0)
        return count

    try:
        sys.settrace(trace)
        try:
            for count in range(40):
                soon = partial(later, count)
                first, second = loop.submit(soon), loop.submit(partial(later, 99))
                while first not in event_loop.first_of((first, second), 10):
                    pass
                assert first.result() == count
                assert loop.run(soon) == count
                assert second.result() == 99
                second.cancel()
        finally:
            sys.settrace(None)
    finally:
        event_loop.release()
    names = {Path(file).name for file, _ in interrupted}
    assert "event_loop.py" in names


class Alarm(Exception):
    """What a handler raises."""


def test_a_handler_may_raise_at_any_line_of_a_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No coroutine is left of which Python would warn that nobody awaits it."""
    gc.collect()  # what other tests have left
    loop = event_loop.acquire()
    interrupted: set[tuple[str, int]] = set()
    warned: list[str] = []
    monkeypatch.setattr(
        sys, "unraisablehook", lambda raised: warned.append(str(raised.exc_value))
    )

    def trace(frame: FrameType, event: str, _: object) -> Any:  # noqa: ANN401, as sys wants it
        line = frame.f_code.co_name, frame.f_lineno
        is_ours = frame.f_code.co_filename == event_loop.__file__
        if event == "line" and is_ours and line not in interrupted:
            interrupted.add(line)
            sys.settrace(None)
            raise Alarm
        return trace

    async def endless() -> None:
        await asyncio.Event().wait()

    def wait_once() -> None:
        with suppress(TimeoutError):
            loop.run(endless, 0.01)
        with suppress(TimeoutError):
            loop.submit(endless, lambda: None).result(0.01)

    try:
        before = -1
        while len(interrupted) > before:
            before = len(interrupted)
            sys.settrace(trace)
            with suppress(Alarm):
                wait_once()
            sys.settrace(None)
        names = {name for name, _ in interrupted}
        assert names >= {"run", "submit", "__init__", "_begin", "result", "cancel"}
    finally:
        sys.settrace(None)
        event_loop.release()
    gc.collect()
    assert warned == []


def test_who_waits_in_vain_is_told_so_and_may_wait_again() -> None:
    loop = event_loop.acquire()
    try:
        come = asyncio.Event()
        future = loop.submit(come.wait)
        with pytest.raises(TimeoutError):
            future.result(0.01)
        assert not future.done()
        assert event_loop.first_of((future,), 0.01) == []
        assert not future._at_end  # a wait of days leaves nothing behind
        loop.notify(come)
        assert future.result(10) is True
        assert event_loop.first_of((future,), 0) == [future]
    finally:
        event_loop.release()
