"""Asks shards that are silent whether they are there, and tells the coordinator.

What one worker hears says nothing about where the fault is: the coordinator knows what
others hear, and decides. On the event loop.
"""

import asyncio
from collections.abc import Callable, Collection, Coroutine, Mapping
from typing import Any

from pswire.membership import WorkerKey
from psworker.member.membership import Membership
from psworker.member.shard_clients import ShardClients
from psworker.transport.call_error import CallError
from psworker.transport.retries import now

Tell = Callable[[Mapping[int, int]], Coroutine[Any, Any, None]]
"""Tells the coordinator for how many ms shards have been silent. May fail: the watch
tells what that means."""


async def tell_nobody(_: Mapping[int, int]) -> None:
    """For calls that stand for no member."""


class ShardReach:
    """Which shards answer one start of a worker.

    Attributes:
        pause_s: Silence after which a shard is asked, and time that it has to answer:
            half a lease, so that the coordinator knows after one.
    """

    def __init__(
        self,
        clients: ShardClients,
        worker: WorkerKey,
        membership: Membership,
        tell: Tell,
        *,
        lease_s: float,
    ) -> None:
        """Asks nobody yet.

        Args:
            clients: Of the shards.
            worker: Who asks.
            membership: Has the shard map, and is told why this worker may be evicted.
            tell: Tells the coordinator.
            lease_s: Silence after which a shard counts as out of reach.
        """
        self.pause_s = lease_s / 2
        self._clients = clients
        self._worker = worker
        self._membership = membership
        self._tell_coordinator = tell
        self._lease_s = lease_s
        self._tasks: set[asyncio.Task[None]] = set()
        self._watching: asyncio.Task[None] | None = None

    def begin(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        """Starts work that nobody waits for."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def close(self) -> None:
        """Ends all work."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def watch(self) -> None:
        """Asks all shards now and then, and tells of each how long it is silent.

        Also of those that answer: only so is it known that another worker can't reach
        what this one can. For workers that wait to become members.
        """
        assert self._watching is None
        self._watching = self.begin(self._watch())

    async def end_watch(self) -> None:
        """Asks no more, as a member, of which its calls tell."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
            self._watching = None
            self._membership.unreached = ""

    async def answering(self, shard_indexes: Collection[int]) -> set[int]:
        """Those of some shards that answer in time, be it by a refusal."""
        indexes = sorted(shard_indexes)
        answers = await asyncio.gather(*map(self._answers, indexes))
        return {
            index for index, is_there in zip(indexes, answers, strict=True) if is_there
        }

    async def tell(self, silent_s: Mapping[int, float]) -> None:
        """Tells the coordinator for how long shards have been silent."""
        out_of_reach = [
            f"shard {index} at {self._membership.shards[index].address}"
            for index, silence_s in sorted(silent_s.items())
            if silence_s >= self._lease_s
        ]
        self._membership.unreached = " and ".join(out_of_reach)
        try:
            await self._tell_coordinator(
                {index: round(1000 * each) for index, each in silent_s.items()}
            )
        except CallError:
            return  # it is told again, and the watch says what is wrong

    async def unreached(self, began: float) -> str:
        """What to wait for, in words, while some shard gives no answer; else empty.

        Args:
            began: Since when they are asked, for the coordinator.
        """
        shards = self._membership.shards
        there = await self.answering(range(len(shards)))
        silent = [index for index in range(len(shards)) if index not in there]
        if silent:
            await self.tell(dict.fromkeys(silent, now() - began))
        names = (f"shard {i} at {shards[i].address or 'no address'}" for i in silent)
        return f"an answer from {' and '.join(names)}" if silent else ""

    async def _watch(self) -> None:
        began = asked = now()
        answered: dict[int, float] = {}
        while True:
            await asyncio.sleep(max(0.0, asked + self.pause_s - now()))
            asked = now()
            shards = self._membership.shards
            known = [index for index, each in enumerate(shards) if each.address]
            if not known:
                continue
            for index in await self.answering(known):
                answered[index] = now()
            await self.tell({i: now() - answered.get(i, began) for i in known})

    async def _answers(self, shard_index: int) -> bool:
        try:
            client = await self._clients.of(shard_index)
            await client.get_session(self._worker, timeout_s=self.pause_s)
        except CallError as error:
            return error.refusal is not None
        return True
