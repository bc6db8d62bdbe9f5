"""What the streams that follow a job are still to be told, in order."""

import asyncio

from psserver.coordinator.core.coordinator_effects import CoordinatorEffect
from pswire.membership import WorkerKey

Event = CoordinatorEffect
"""What travels on a watch: the effects themselves, translated by the servicer."""

Queue = asyncio.Queue[Event]
"""What one stream is still to be told."""


class WatchQueues:
    """Queues of all open streams, at most one for each shard and worker."""

    def __init__(self) -> None:
        self._shards: dict[int, Queue] = {}
        self._workers: dict[WorkerKey, Queue] = {}

    def open_shard(self, index: int) -> Queue:
        """A shard's new stream; an older one of it is told nothing more."""
        self._shards[index] = queue = Queue()
        return queue

    def close_shard(self, index: int, queue: Queue) -> bool:
        """A shard's stream has ended; whether it was its newest."""
        if self._shards.get(index) is not queue:
            return False
        del self._shards[index]
        return True

    def open_worker(self, worker: WorkerKey) -> Queue:
        """A worker's new stream; an older one of it is told nothing more."""
        self._workers[worker] = queue = Queue()
        return queue

    def close_worker(self, worker: WorkerKey, queue: Queue) -> bool:
        """A worker's stream has ended; whether it was its newest."""
        if self._workers.get(worker) is not queue:
            return False
        del self._workers[worker]
        return True

    def tell_shards(self, event: Event) -> None:
        """Tells all shards that listen; the others get the whole state later."""
        for queue in self._shards.values():
            queue.put_nowait(event)

    def tell_workers(self, event: Event) -> None:
        """Tells all workers that listen."""
        for queue in self._workers.values():
            queue.put_nowait(event)

    def tell_everybody(self, event: Event) -> None:
        """Tells all that listen."""
        self.tell_shards(event)
        self.tell_workers(event)
