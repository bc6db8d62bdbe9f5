"""Says in the log whom this worker waits for, and not too often."""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

from pswire.awaited import next_due
from pswire.limits import WAITING_INTERVAL_MS
from psworker.transport.values import Waiting

T = TypeVar("T")

logger: Final = logging.getLogger("psworker")


class WaitingLog:
    """One line after 5, 10, 20, 40 s and so on, though every shard reports the same."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        """Begins a wait.

        Args:
            now: Seconds on a clock that never goes back.
        """
        self._now = now
        self._began = now()
        self._said_after_s = 0.0

    def note(self, waiting: Waiting) -> None:
        """Takes what a server reports unasked, which is never early."""
        # It reports every five seconds by its own clock, not by this one.
        if not self._said_after_s or self.quiet_s < WAITING_INTERVAL_MS / 1000 / 2:
            self._say(f"{waiting}")

    def remind(self, what: str, *, job_waited_s: float = 0) -> None:
        """Says `what` if it is time for another line.

        Args:
            what: Whom this worker waits for.
            job_waited_s: How long the whole job waits for that, if it does so for
                longer than this worker.
        """
        if self.quiet_s == 0:
            self._say(what, job_waited_s)

    @property
    def quiet_s(self) -> float:
        """Seconds until `remind` has something to say."""
        due_s = next_due(self._said_after_s, WAITING_INTERVAL_MS / 1000)
        return max(0.0, self._began + due_s - self._now())

    def _say(self, what: str, job_waited_s: float = 0) -> None:
        waited_s = self._now() - self._began
        is_job_longer = job_waited_s >= waited_s + WAITING_INTERVAL_MS / 1000
        logger.warning(
            "waiting for %s, %.0f s so far%s",
            what,
            waited_s,
            f" (the job has waited for {job_waited_s:.0f} s)" if is_job_longer else "",
        )
        self._said_after_s = waited_s


async def saying_whom(
    work: Callable[[], Coroutine[Any, Any, T]],
    what: str,
    log: WaitingLog | None = None,
) -> T:
    """The result of `work()`, which waits for `what`: said when it takes long.

    Args:
        work: Makes what is awaited.
        what: Whom it waits for.
        log: Of a longer wait that this is a part of.
    """
    log = log or WaitingLog()
    task = asyncio.ensure_future(work())
    try:
        while not task.done():
            log.remind(what)
            await asyncio.wait({task}, timeout=log.quiet_s)
        return task.result()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
