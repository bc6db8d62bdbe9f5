"""The one thread that talks to the network.

The user's thread computes; this one moves bytes. Started by the first connection or
reader that needs it and stopped with the last, never at import: a process that
forks before it connects is not affected.
"""

import asyncio
import gc
import os
import queue
import sys
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, Generic, TypeVar, cast

import grpc.aio
from typing_extensions import override

from pswire.channels import has_inherited_channels, has_own_channels
from pswire.process_memory import keep_freed_memory
from psworker.errors import FORKED_TEXT, ClosedError

T = TypeVar("T")
Work = Callable[[], Coroutine[Any, Any, T]]


class LoopFuture(Generic[T]):
    """The result of something on the loop, for another thread to wait for.

    Not that of `concurrent.futures`: a thread that asks or waits for one holds its lock
    for a moment, in Python. A signal handler that interrupts this moment and waits for
    the loop in turn, as to save, would wait for ever: the loop needs the lock to go on.
    That one also costs a small push more than its bytes.
    """

    def __init__(self, cancel: Callable[[], None] = lambda: None) -> None:
        """Takes what `cancel` calls, from any thread."""
        self._cancel_work = cancel
        self._ended = threading.Lock()
        self._ended.acquire()
        self._at_end: list[Callable[[], None]] = []
        self._value: T | None = None
        self._error: BaseException | None = None
        self._is_over = False

    def set_result(self, value: T) -> None:
        """Ends it, unless it has ended already."""
        self._end(value, None)

    def set_exception(self, error: BaseException) -> None:
        """Ends it by an error, unless it has ended already."""
        self._end(None, error)

    def cancel(self) -> None:
        """Cancels what is under way, from any thread."""
        self._cancel_work()

    def done(self) -> bool:
        """Whether it has ended."""
        return self._is_over

    @property
    def failed(self) -> bool:
        """Whether it has ended with an error."""
        return self._error is not None

    def call_at_end(self, end: Callable[[], None]) -> None:
        """Calls `end` once it has ended, perhaps now. It may be called twice."""
        self._at_end.append(end)
        if self._is_over:
            end()

    def forget(self, end: Callable[[], None]) -> None:
        """Ends `call_at_end`."""
        self._at_end.remove(end)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits until it has ended, however; whether it has, within that time."""
        wait_s = -1.0 if timeout_s is None else max(0.0, timeout_s)
        if not self._is_over and self._ended.acquire(timeout=wait_s):
            self._ended.release()  # for others who wait
        return self._is_over

    def result(self, timeout_s: float | None = None) -> T:
        """The result, waiting for it.

        Raises:
            TimeoutError: There is none within `timeout_s`.
            CancelledError: That of `concurrent.futures`: it was cancelled.
        """
        if not self.wait(timeout_s):
            raise TimeoutError
        try:
            if self._error is not None:
                raise self._error
            return cast("T", self._value)
        finally:
            del self  # the error would hold it by the frame, and it the error

    async def awaited(self) -> T:
        """As `result`, for coroutines of the loop that it ends on."""
        ended = asyncio.Event()
        self.call_at_end(ended.set)
        await ended.wait()
        return self.result()

    def _end(self, value: T | None, error: BaseException | None) -> None:
        if self._is_over:
            return
        self._value, self._error = value, error
        self._is_over = True
        self._ended.release()
        for end in tuple(self._at_end):
            end()


def first_of(
    futures: Sequence[LoopFuture[Any]], timeout_s: float
) -> Sequence[LoopFuture[Any]]:
    """Those of some futures that are done, once one is or time is up."""
    ended: queue.SimpleQueue[None] = queue.SimpleQueue()
    end = partial(ended.put, None)
    for each in futures:
        each.call_at_end(end)
    with suppress(queue.Empty):
        ended.get(timeout=timeout_s)
    for each in futures:
        each.forget(end)  # a long wait is many short ones
    return [each for each in futures if each.done()]


class _Running(LoopFuture[T]):
    """A coroutine that the loop makes and runs: an interrupted thread leaves none."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._loop = loop
        self._task: asyncio.Task[T] | None = None

    def begin(self, work: Work[T]) -> None:
        """Begins, on the loop.

        Keeps `work` until its end alone: who keeps this may be part of a cycle, and a
        push's gradients would stay until garbage is collected.
        """
        self._task = self._loop.create_task(_run(work))
        self._task.add_done_callback(self._ends)

    @override
    def cancel(self) -> None:
        self._loop.call_soon_threadsafe(self._cancel)

    def _cancel(self) -> None:
        if self._task is None:  # whoever started it was interrupted
            self.set_exception(CancelledError())
        else:
            self._task.cancel()

    def _ends(self, task: "asyncio.Task[T]") -> None:
        if task.cancelled():
            self.set_exception(CancelledError())
        elif (error := task.exception()) is not None:
            self.set_exception(error)
        else:
            self.set_result(task.result())


async def _run(work: Work[T]) -> T:
    return await work()


class EventLoop:
    """A thread that serves the process's asyncio loop, for calls of other threads.

    Once it has ended, another one may serve the same loop: none of the work of this one
    is left there.
    """

    def __init__(self) -> None:
        self._loop = _loop_of_process()
        self._lock = threading.RLock()  # a signal handler may submit too
        self._is_over = False
        # Not `loop.stop`: one that is too late would stop the next thread.
        self._stopped = self._loop.create_future()
        self._process_id = os.getpid()
        self._thread = threading.Thread(
            target=self._serve, name="psworker-loop", daemon=True
        )
        self._thread.start()

    @property
    def is_over(self) -> bool:
        """Whether the thread has ended, by `stop` or by a callback that exits.

        Not in a forked child, where it never was.
        """
        return self._is_over and not self._thread.is_alive()

    def submit(
        self, work: Work[T], on_end: Callable[[], None] | None = None
    ) -> LoopFuture[T]:
        """Starts a coroutine on the loop. Cancelling the future cancels it.

        Args:
            work: Makes the coroutine, on the loop's thread.
            on_end: Called there when it has ended, however it did.

        Raises:
            ClosedError: This is a forked child, which has no such thread, or the thread
                has ended.
        """
        running = _Running[T](self._loop)
        try:
            if on_end is not None:
                running.call_at_end(on_end)
            self._begin(running, work)
            return running
        except BaseException:  # by a signal handler, say, anywhere in here
            if not running.done():
                running.cancel()
            raise

    def run(self, work: Work[T], timeout_s: float | None = None) -> T:
        """Runs a coroutine and waits for its result.

        Whatever ends the wait early, such as Ctrl-C, cancels the coroutine.

        Args:
            work: As `submit`.
            timeout_s: Longest wait.

        Raises:
            TimeoutError: It took longer.
            ClosedError: As `submit`.
            CancelledError: That of `concurrent.futures`: the thread ended first.
        """
        assert threading.current_thread() is not self._thread, "would wait for itself"
        running = _Running[T](self._loop)
        try:
            self._begin(running, work)
            return running.result(timeout_s)
        except BaseException:
            if not running.done():
                running.cancel()
            raise

    def post(self, work: Callable[[], None]) -> None:
        """Has the loop call this soon, from another thread or its own.

        Raises:
            ClosedError: The thread has ended.
        """
        with self._lock:
            self._refuse_when_over()
            self._loop.call_soon_threadsafe(work)

    def notify(self, event: asyncio.Event) -> None:
        """Sets an event of the loop from another thread.

        Raises:
            ClosedError: The thread has ended.
        """
        self.post(event.set)

    def stop(self) -> None:
        """Cancels what still runs and ends the thread."""
        if not self._thread.is_alive():
            return
        self._loop.call_soon_threadsafe(self._end_service)
        self._thread.join()

    def _end_service(self) -> None:
        if not self._stopped.done():
            self._stopped.set_result(None)

    def _begin(self, running: _Running[T], work: Work[T]) -> None:
        try:
            with self._lock:
                self._refuse_in_child()
                self._refuse_when_over()
                self._loop.call_soon_threadsafe(running.begin, work)
        except ClosedError as error:
            running.set_exception(error)
            raise

    def _refuse_in_child(self) -> None:
        if os.getpid() != self._process_id:
            raise ClosedError(FORKED_TEXT)

    def _refuse_when_over(self) -> None:
        if self._is_over:
            raise ClosedError(
                "the last connection of this process was closed: connect again"
            )

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        # Its threads end with this one, though the loop stays.
        executor = ThreadPoolExecutor(thread_name_prefix="psworker-aside")
        self._loop.set_default_executor(executor)
        # While the loop runs gRPC must not take its socket out of it, which whatever
        # thread collects the last channel as garbage would do.
        grpc.aio.init_grpc_aio()
        try:
            self._loop.run_until_complete(self._stopped)
        finally:
            self._end()
            grpc.aio.shutdown_grpc_aio()
            executor.shutdown(wait=False)
            asyncio.set_event_loop(None)

    def _end(self) -> None:
        self._loop.run_until_complete(_cancel_all())
        with self._lock:
            self._is_over = True
        # What was posted until now is in the loop, where the next thread would find it.
        self._loop.run_until_complete(_cancel_all())


async def _cancel_all() -> None:
    await asyncio.sleep(0)  # what was posted comes first: it may be work that begins
    this = asyncio.current_task()
    while tasks := [task for task in asyncio.all_tasks() if task is not this]:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


_loops: dict[int, asyncio.AbstractEventLoop] = {}
"""By the process that has made it. A parent's is not touched, and never freed: it would
take the parent's sockets out of what both of them wait on."""


def _loop_of_process() -> asyncio.AbstractEventLoop:
    """The loop of this process, the same one whenever a thread serves it.

    gRPC keeps every loop on which it was ever used while any channel is left, be it
    garbage, and a loop takes 256 KiB.
    """
    process_id = os.getpid()
    if process_id not in _loops:
        _loops[process_id] = _new_loop()
    return _loops[process_id]


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        # Not on Windows; the plain loop is slower, not different.
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


_lock = threading.RLock()  # a signal handler may connect or close too
_shared: EventLoop | None = None
_user_count = 0


def acquire() -> EventLoop:
    """The process's loop, started if none is served. Pair with `release`.

    Raises:
        ClosedError: This process was forked from one that holds a connection, be it a
            closed one.
    """
    global _shared, _user_count
    if has_inherited_channels():
        raise ClosedError(FORKED_TEXT)
    with _lock:
        if _shared is None or _shared.is_over:
            keep_freed_memory()
            _shared = EventLoop()
        _user_count += 1
        return _shared


def release() -> None:
    """Ends one `acquire`; the last one stops the loop."""
    global _shared, _user_count
    with _lock:
        assert _user_count > 0, "released more often than acquired"
        _user_count -= 1
        if _user_count == 0 and _shared is not None:
            _shared.stop()
            _shared = None


def _collect_before_fork() -> None:
    """Frees channels that are closed, so that a child may connect.

    They are garbage that only the collector finds, but where the script still holds
    what it was connected by.
    """
    if _shared is None and has_own_channels():
        gc.collect()


if sys.platform != "win32":
    os.register_at_fork(before=_collect_before_fork)
