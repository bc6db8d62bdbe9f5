"""Where arithmetic is done: at once in the event loop, or in a thread.

Work on more than `INLINE_BYTES_MAX` goes to a thread that releases the GIL, so that
other calls are answered meanwhile; less is done at once, since handing it over costs
more than it does.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

INLINE_BYTES_MAX = 64 << 10
"""Largest work that is done in the event loop: about 50 us of arithmetic, against
about 100 us for a thread's turn."""

Result = TypeVar("Result")


class Arithmetic:
    """The threads of a shard, and the loop that they report to."""

    def __init__(self, thread_count: int) -> None:
        self._threads = ThreadPoolExecutor(thread_count, thread_name_prefix="apply")
        self._loop = asyncio.get_running_loop()

    def close(self) -> None:
        """Waits for what is under way and ends the threads."""
        self._threads.shutdown(wait=True)

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
            then: Given the result.
            failed: Given the error of a thread; one in the loop is raised.
        """
        if byte_count <= INLINE_BYTES_MAX:
            then(work())
            return

        def ended(done: "asyncio.Future[Result]") -> None:
            error = done.exception()
            if error is None:
                then(done.result())
            else:
                failed(error)

        self._loop.run_in_executor(self._threads, work).add_done_callback(ended)

    async def result(self, work: Callable[[], Result], byte_count: int) -> Result:
        """Does work and returns its result."""
        if byte_count <= INLINE_BYTES_MAX:
            return work()
        return await self._loop.run_in_executor(self._threads, work)
