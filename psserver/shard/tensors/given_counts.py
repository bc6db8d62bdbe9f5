"""What has not changed since a worker was given it: a count of updates for each chunk.

Threads that work on different chunks may call at once; calls for one chunk are
serialised by the caller.
"""

import threading
from collections import Counter
from collections.abc import Collection

from pswire.membership import WorkerKey


class GivenCounts:
    """By worker and chunk, which update it has. Of workers that it was told of."""

    def __init__(self) -> None:
        self._updates: Counter[int] = Counter()
        self._given: dict[WorkerKey, dict[int, tuple[int, int]]] = {}
        self._lock = threading.Lock()

    def keep_only(self, workers: Collection[WorkerKey]) -> None:
        """Forgets all others, and from now on remembers what these are given."""
        with self._lock:
            self._given = {worker: self._given.get(worker, {}) for worker in workers}

    def note_update(self, chunk_index: int) -> None:
        """A chunk has other values now."""
        with self._lock:
            self._updates[chunk_index] += 1

    def give(self, worker: WorkerKey, chunk_index: int, sequence: int) -> bool:
        """A chunk is part of the answer to a push.

        A worker that pushes has had the answer to its push before. Of the answer to
        this one, which it asks for again after its call has broken, nobody knows what
        it has had.

        Returns:
            Whether the worker has its values already.
        """
        with self._lock:
            chunks = self._given.get(worker)
            if chunks is None:
                return False
            now = self._updates[chunk_index]
            known = chunks.get(chunk_index)
            if known is not None and known[0] < sequence and known[1] == now:
                return True
            chunks[chunk_index] = sequence, now
            return False
