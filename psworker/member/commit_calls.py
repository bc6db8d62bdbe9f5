"""Calls of the second phase of one push, made again until they are decided.

On the event loop.
"""

from pswire.membership import ClockChoice, WorkerKey
from psworker.member.membership import Membership
from psworker.member.push_history import PushHistory
from psworker.member.shard_clients import ShardClients
from psworker.transport.retries import until_decided


class ShardCommitCalls:
    """What `Commits` needs of the shards, until a push's deadline."""

    def __init__(
        self,
        clients: ShardClients,
        worker: WorkerKey,
        membership: Membership,
        *,
        history: PushHistory,
        deadline: float,
    ) -> None:
        """Calls nobody yet.

        Args:
            clients: Clients of all shards.
            worker: Who calls.
            membership: What the coordinator has told.
            history: Told of commits.
            deadline: Of the push, on the monotonic clock.
        """
        self._clients = clients
        self._worker = worker
        self._membership = membership
        self._history = history
        self._deadline = deadline

    async def commit(self, shard_index: int, choice: ClockChoice) -> None:
        """Tells one shard to commit a clock.

        One that refuses, since its contributors are others, tells `staged` again.
        """

        async def attempt(timeout_s: float) -> bool:
            client = await self._clients.of(shard_index)
            self._history.committed(self._worker, shard_index, choice.clock)
            return await client.commit(
                self._membership.generation, choice, timeout_s=timeout_s
            )

        await until_decided(attempt, self._deadline)

    async def choose(self, clock: int, sequence: int) -> ClockChoice:
        """Tells shard 0 that every shard has a push; who counts."""

        async def attempt(timeout_s: float) -> ClockChoice:
            client = await self._clients.of(0)
            return await client.ready(
                self._membership.generation, clock, sequence, timeout_s=timeout_s
            )

        return await until_decided(attempt, self._deadline)
