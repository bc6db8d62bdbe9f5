"""Calls that carry pushes one after the other, and have none just now.

Their handlers wait for the next push, which may never come: a shard that stops ends
them, since it would wait for them otherwise.
"""

import asyncio
from collections.abc import AsyncIterator

from pswire.reasons import ErrorReason, Refusal


class RestingCalls:
    """The handlers of such calls, each a task of its own."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[object]] = set()
        self._is_over = False

    async def next(self, requests: AsyncIterator[bytes]) -> bytes | None:
        """The next message of the running handler's call; None at the call's end.

        Raises:
            Refusal: The shard stops.
        """
        task = asyncio.current_task()
        assert task is not None, "handlers run in tasks"
        if self._is_over:
            return None
        self._tasks.add(task)
        try:
            return await anext(requests, None)
        except asyncio.CancelledError:
            if not self._is_over:
                raise  # the client has hung up
            raise Refusal(ErrorReason.DRAINING, "the shard is shutting down") from None
        finally:
            self._tasks.discard(task)

    def end_all(self) -> None:
        """Ends these calls, also those that are carrying a push by now, after it."""
        self._is_over = True
        for task in self._tasks:
            task.cancel()
