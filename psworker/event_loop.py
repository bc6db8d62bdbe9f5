"""The one thread that talks to the network.

The user's thread computes; this one moves bytes. Started by the first connection or
reader that needs it and stopped with the last, never at import: a process that
forks before it connects is not affected.
"""

import asyncio
import gc
import os
import sys
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import Any, Generic, TypeVar

import grpc.aio

from pswire.channels import has_inherited_channels, has_own_channels
from pswire.freed_memory import keep_freed_memory
from psworker.errors import FORKED_TEXT, ClosedError

T = TypeVar("T")


class Running(Generic[T]):
    """Work on the loop that another thread has started, and hears the end of.

    What `concurrent.futures.Future` does costs a small push more than its bytes.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        work: Coroutine[Any, Any, T],
        on_end: Callable[[], None],
    ) -> None:
        self._loop = loop
        self._work = work
        self._on_end = on_end
        self._task: asyncio.Task[T] | None = None

    def begin(self) -> None:
        """Begins, on the loop."""
        self._task = self._loop.create_task(self._work)
        self._task.add_done_callback(self._end)

    def cancel(self) -> None:
        """Cancels the work, from any thread; its end is told all the same."""
        self._loop.call_soon_threadsafe(self._cancel)

    def result(self) -> T:
        """What came of it, once its end was told.

        Raises:
            CancelledError: That of `concurrent.futures`: it was cancelled.
        """
        assert self._task is not None, "it has ended"
        try:
            return self._task.result()
        except asyncio.CancelledError:
            raise CancelledError from None

    def _cancel(self) -> None:
        assert self._task is not None, "it began before"
        self._task.cancel()

    def _end(self, task: "asyncio.Task[T]") -> None:
        if not task.cancelled():
            task.exception()  # is looked at, even if nobody wants the result any more
        self._on_end()


class EventLoop:
    """A thread that serves the process's asyncio loop, with a blocking entrance.

    Once it has ended, another one may serve the same loop: none of the work of this one
    is left there.
    """

    def __init__(self) -> None:
        self._loop = _loop_of_process()
        self._lock = threading.RLock()  # a signal handler may submit too
        self._is_over = False
        # Not `loop.stop`: one that comes too late would stop the next thread.
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

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Starts a coroutine on the loop. Cancelling the future cancels it.

        Raises:
            ClosedError: This is a forked child, which has no such thread, or the thread
                has ended.
        """
        with self._lock:
            self._refuse(work)
            return asyncio.run_coroutine_threadsafe(work, self._loop)

    def start(
        self, work: Coroutine[Any, Any, T], on_end: Callable[[], None]
    ) -> Running[T]:
        """As `submit`, for whoever wants to be told of the end and then ask.

        Args:
            work: What to run.
            on_end: Called on the loop's thread when it has ended, however it did.

        Raises:
            ClosedError: As `submit`.
        """
        running = Running(self._loop, work, on_end)
        with self._lock:
            self._refuse(work)
            self._loop.call_soon_threadsafe(running.begin)
        return running

    def run(self, work: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        """Runs a coroutine and waits for its result.

        Whatever ends the wait early, such as Ctrl-C, cancels the coroutine.

        Raises:
            TimeoutError: It took longer than `timeout_s`.
            ClosedError: As `submit`.
            CancelledError: That of `concurrent.futures`: the thread ended first.
        """
        assert threading.current_thread() is not self._thread, "would wait for itself"
        future = self.submit(work)
        try:
            return future.result(timeout_s)
        except BaseException:
            future.cancel()
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

    def _refuse(self, work: Coroutine[Any, Any, Any]) -> None:
        try:
            if os.getpid() != self._process_id:
                raise ClosedError(FORKED_TEXT)
            self._refuse_when_over()
        except ClosedError:
            work.close()
            raise

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
        # What came until now is in the loop, where the next thread would find it.
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


_lock = threading.Lock()
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
    """Gives the loop up; the last one to do so stops it."""
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
