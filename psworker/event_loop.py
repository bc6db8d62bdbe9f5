"""The one thread that talks to the network.

The user's thread computes; this one moves bytes. Started by the first connection or
reader that needs it and stopped with the last, never at import: a process that
forks before it connects is not affected.
"""

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future
from typing import Any, Generic, TypeVar

from pswire.freed_memory import keep_freed_memory
from psworker.errors import ClosedError

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
    """An asyncio loop on a daemon thread, with a blocking entrance."""

    def __init__(self) -> None:
        self._loop = _new_loop()
        self._process_id = os.getpid()
        self._thread = threading.Thread(
            target=self._serve, name="psworker-loop", daemon=True
        )
        self._thread.start()

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Starts a coroutine on the loop. Cancelling the future cancels it.

        Raises:
            ClosedError: This is a forked child, which has no such thread.
        """
        self._refuse_forked(work)
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
        self._refuse_forked(work)
        running = Running(self._loop, work, on_end)
        self._loop.call_soon_threadsafe(running.begin)
        return running

    def run(self, work: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        """Runs a coroutine and waits for its result.

        Whatever ends the wait early, such as Ctrl-C, cancels the coroutine.

        Raises:
            TimeoutError: It took longer than `timeout_s`.
        """
        assert threading.current_thread() is not self._thread, "would wait for itself"
        future = self.submit(work)
        try:
            return future.result(timeout_s)
        except BaseException:
            future.cancel()
            raise

    def post(self, work: Callable[[], None]) -> None:
        """Has the loop call this soon, from another thread or its own."""
        self._loop.call_soon_threadsafe(work)

    def notify(self, event: asyncio.Event) -> None:
        """Sets an event of the loop from another thread."""
        self._loop.call_soon_threadsafe(event.set)

    def stop(self) -> None:
        """Cancels what still runs and ends the thread."""
        if not self._thread.is_alive():
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _refuse_forked(self, work: Coroutine[Any, Any, Any]) -> None:
        if os.getpid() != self._process_id:
            work.close()
            raise ClosedError(
                "this process was forked after psworker was connected: connect in the "
                "process that uses the connection"
            )

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            self._cancel_all()
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        finally:
            asyncio.set_event_loop(None)
            self._loop.close()

    def _cancel_all(self) -> None:
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))


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
    """The process's loop, started if nobody uses it yet. Pair with `release`."""
    global _shared, _user_count
    with _lock:
        if _shared is None:
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
