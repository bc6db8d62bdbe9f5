"""One client for each shard, as the newest shard map says. On the event loop."""

import asyncio

from pswire.membership import WorkerKey
from psworker.member.membership import Membership
from psworker.transport.call_error import CallError
from psworker.transport.ports import ShardPort, Traffic
from psworker.transport.shard_client import ShardClient


class ShardClients:
    """Clients of one start of a worker, made when they are first needed."""

    def __init__(
        self, job_id: str, worker: WorkerKey, membership: Membership, traffic: Traffic
    ) -> None:
        """Connects to nobody yet.

        Args:
            job_id: The job.
            worker: Who calls.
            membership: Has the shard map.
            traffic: Counts the bytes of all messages.
        """
        self._job_id = job_id
        self._worker = worker
        self._membership = membership
        self._traffic = traffic
        self._clients: dict[int, ShardPort] = {}

    async def of(self, shard_index: int) -> ShardPort:
        """The client of the start of a shard that the map names.

        Raises:
            CallError: It has no address yet; the same call may succeed later.
        """
        shard = self._membership.shards[shard_index]
        client = self._clients.get(shard_index)
        if client is not None and client.shard == shard:
            return client
        if not shard.address:
            raise CallError(
                f"shard {shard_index}",
                "UNAVAILABLE",
                "it has no address yet",
                refusal=None,
                decided=False,
            )
        new = ShardClient(shard, self._job_id, self._worker, self._traffic)
        self._clients[shard_index] = new
        if client is not None:
            if client.shard.incarnation == shard.incarnation:
                new.segments = client.segments  # the same process, elsewhere
            await client.close()
        return new

    async def close(self) -> None:
        """Ends the channels to all shards."""
        clients = list(self._clients.values())
        self._clients.clear()
        await asyncio.gather(*(client.close() for client in clients))
