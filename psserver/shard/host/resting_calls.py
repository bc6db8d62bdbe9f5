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

RESTING_OF_WORKER_MAX: Final = 4
"""Calls of one worker that rest. It has one; others are of connections that broke, and
whose end has not come yet."""


class RestingCalls:
    """The handlers of such calls, each a task of its own.

    Args:
        members: Whose they are.
        rest_s: Longest time between two pushes of a call.
    """

    def __init__(self, members: HostedMembers, rest_s: float) -> None:
        self._members = members
        self._rest_s = rest_s
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
            Refusal: The shard stops.
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
        try:
            async with asyncio.timeout(self._rest_s):
                return await anext(requests, None)
        except TimeoutError:
            return None
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
