"""Calls that carry pushes one after the other, and have none just now.

Their handlers wait for the next push, which may never come. So they wait for so long,
and few for one worker; and a shard that stops ends them, since it would wait for them
otherwise. With such a call nothing is lost: the next push opens another one.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Final

from psserver.shard.host.hosted_members import HostedMembers
from pswire.membership import WorkerKey
from pswire.reasons import ErrorReason, Refusal

FIRST_PUSH_TIMEOUT_S: Final = 10.0
"""Time for a call to bring its first push. It is opened for one; a silent one would
hold a stream for ever."""

REST_TIMEOUT_S: Final = 600.0
"""Longest time between two pushes of a call, as long as a step may take by default."""

RESTING_OF_WORKER_MAX: Final = 4
"""Calls of one worker that rest. It has one; others are of connections that broke, and
whose end has not come yet."""


class RestingCalls:
    """The handlers of such calls, each a task of its own."""

    def __init__(self, members: HostedMembers) -> None:
        self._members = members
        self._unnamed: dict[asyncio.Task[object], None] = {}  # before their first push
        self._given_way: set[asyncio.Task[object]] = set()
        self._is_over = False

    async def next(
        self, requests: AsyncIterator[bytes], worker: WorkerKey | None
    ) -> bytes | None:
        """The next message of the running handler's call; None when the call ends.

        Args:
            requests: Its messages.
            worker: Whose pushes it has carried, None before the first.

        Raises:
            Refusal: The shard stops, or there was no first push.
        """
        task = asyncio.current_task()
        assert task is not None, "handlers run in tasks"
        if self._is_over:
            return None
        own = self._unnamed if worker is None else self._members.of(worker).resting
        own[task] = None
        if worker is not None and len(own) > RESTING_OF_WORKER_MAX:
            oldest = next(iter(own))
            del own[oldest]
            self._given_way.add(oldest)
            oldest.cancel()
        limit_s = FIRST_PUSH_TIMEOUT_S if worker is None else REST_TIMEOUT_S
        try:
            async with asyncio.timeout(limit_s):
                return await anext(requests, None)
        except TimeoutError:
            if worker is not None:
                return None
            raise Refusal(
                ErrorReason.WAIT_TIMEOUT,
                f"a call was silent for {limit_s:g} s instead of pushing",
            ) from None
        except asyncio.CancelledError:
            if task in self._given_way:
                return None
            if not self._is_over:
                raise  # the client has hung up
            raise Refusal(ErrorReason.DRAINING, "the shard is shutting down") from None
        finally:
            own.pop(task, None)
            self._given_way.discard(task)

    def end_all(self) -> None:
        """Ends these calls, also those that are carrying a push by now, after it."""
        self._is_over = True
        for tasks in (self._unnamed, *(known.resting for known in self._members)):
            for task in tasks:
                task.cancel()
