"""Lets something else end what a task awaits, with an error, without a second task.

On the event loop. As `asyncio.timeout` does it: the task that awaits is cancelled, and
that is turned into the error where it was awaited.
"""

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


class Interruption:
    """One wait of one task."""

    def __init__(self) -> None:
        self._task: asyncio.Task[object] | None = None
        self._error: BaseException | None = None

    def interrupt(self, error: BaseException) -> None:
        """Ends the wait, if it has not ended; the first error stands.

        Args:
            error: What is raised where it was awaited.
        """
        if self._task is None or self._error is not None:
            return
        self._error = error
        # What runs in the task itself is not to be cancelled: it is about to end.
        if self._task is not asyncio.current_task():
            self._task.cancel()

    async def of(self, work: Awaitable[T]) -> T:
        """The result of `work`, unless it is interrupted before.

        Raises:
            BaseException: What it was interrupted with, even when `work` failed for a
                reason of its own then.
        """
        task = self._task = asyncio.current_task()
        assert task is not None, "only tasks wait"
        cancelled_count = task.cancelling()
        try:
            return await work
        except BaseException:
            if self._error is None:
                raise
            if task.cancelling() > cancelled_count and (
                task.uncancel() > cancelled_count
            ):
                raise  # by somebody else, too
            raise self._error from None
        finally:
            self._task = None
