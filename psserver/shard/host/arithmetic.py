"""Where arithmetic is done: at once in the event loop, or in a thread.

Work on more than `INLINE_BYTES_MAX` goes to a thread that releases the GIL, so that
other calls are answered meanwhile; less is done at once, since handing it over costs
more than it does.

What threads have done is reported to the loop several at a time. With a future for
each, as `run_in_executor` makes one, a step of 64 chunks woke the loop 64 times, each
time at the cost of a fifth of a chunk's update.
"""

import asyncio
import queue
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

INLINE_BYTES_MAX = 64 << 10
"""Largest work that is done in the event loop: about 50 us of arithmetic, against
about 100 us for a thread's turn."""

REPORTED_COUNT = 4
"""Results that are reported together while there is more to do. A chunk of 1 MiB takes
a thread about 0.3 ms."""

REPORTED_BYTES_MIN = 7 << 19
"""A result of so much that it is reported by itself."""

LONG_BYTES_MIN = 4 << 20
"""Work, on more than a chunk, that no result waits behind."""

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class _Work:
    """Something to do, and what is called at its end."""

    do: Callable[[], Any]
    byte_count: int
    then: Callable[[Any], None]
    failed: Callable[[BaseException], None]


class Arithmetic:
    """The threads of a shard, and the loop that they report to."""

    def __init__(self, thread_count: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._work: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._ended: deque[Callable[[], None]] = deque()
        self._threads = [
            threading.Thread(target=self._serve, name=f"apply_{number}", daemon=True)
            for number in range(thread_count)
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Waits for what is under way and ends the threads."""
        for _ in self._threads:
            self._work.put(None)
        for thread in self._threads:
            thread.join()

    def run(
        self,
        work: Callable[[], Result],
        byte_count: int,
        *,
        then: Callable[[Result], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        """Does work and goes on in the loop, before this returns if it is small.

        Args:
            work: Touches nothing that belongs to the loop.
            byte_count: How much it is.
            then: Called with the result.
            failed: Called with the error of a thread; one in the loop is raised.
        """
        if byte_count <= INLINE_BYTES_MAX:
            then(work())
        else:
            self._work.put(_Work(work, byte_count, then, failed))

    async def result(self, work: Callable[[], Result], byte_count: int) -> Result:
        """Does work and returns its result."""
        if byte_count <= INLINE_BYTES_MAX:
            return work()
        future: asyncio.Future[Result] = self._loop.create_future()

        def succeed(result: Result) -> None:
            if not future.cancelled():
                future.set_result(result)

        def fail(error: BaseException) -> None:
            if not future.cancelled():
                future.set_exception(error)

        self._work.put(_Work(work, byte_count, succeed, fail))
        return await future

    def _serve(self) -> None:
        while (work := self._work.get()) is not None:
            is_large = work.byte_count >= REPORTED_BYTES_MIN
            if work.byte_count > LONG_BYTES_MIN and self._ended:
                self._loop.call_soon_threadsafe(self._report)
            try:
                end = partial(work.then, work.do())
            except BaseException as error:
                end = partial(work.failed, error)
            del work  # holds gradients
            self._ended.append(end)
            del end
            if is_large or len(self._ended) >= REPORTED_COUNT or self._work.empty():
                self._loop.call_soon_threadsafe(self._report)

    def _report(self) -> None:
        while self._ended:
            # By itself, so that an error in one leaves the others alone.
            self._loop.call_soon(self._ended.popleft())
