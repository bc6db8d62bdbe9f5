"""Waiting for a condition on state that one event loop owns."""

import asyncio
from collections.abc import Callable


class Changes:
    """Wakes waiters whenever the state may have changed.

    A condition variable without a lock: all state belongs to one event loop.
    """

    def __init__(self) -> None:
        self._waiters: set[asyncio.Future[None]] = set()

    def notify(self) -> None:
        waiters, self._waiters = self._waiters, set()
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def wait_until(
        self, holds: Callable[[], bool], timeout_s: float | None = None
    ) -> bool:
        """Waits until a condition holds.

        Returns:
            Whether it holds; False when the time is over first.
        """
        loop = asyncio.get_running_loop()
        deadline = None if timeout_s is None else loop.time() + timeout_s
        while not holds():
            waiter: asyncio.Future[None] = loop.create_future()
            self._waiters.add(waiter)
            left = None if deadline is None else max(0.0, deadline - loop.time())
            done, _ = await asyncio.wait({waiter}, timeout=left)
            if not done:
                self._waiters.discard(waiter)
                return holds()
        return True
