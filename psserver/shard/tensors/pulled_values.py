"""The values that each worker was last given: one copy of a shard for each worker.

Delay compensation needs them to tell how far the values have gone since a gradient
was computed. The copy of a chunk is made while the chunk is encoded for the worker, so
that it is what the worker will compute with.

Threads that work on different chunks may call at once; calls for one chunk are
serialised by the caller.
"""

import threading
from collections.abc import Collection

import torch

from pswire.membership import WorkerKey


class PulledValues:
    """Copies of chunks by worker. Holds nothing of workers that it was not told of."""

    def __init__(self) -> None:
        self._copies: dict[WorkerKey, dict[int, torch.Tensor]] = {}
        self._lock = threading.Lock()

    @property
    def byte_count(self) -> int:
        """Bytes of all copies."""
        with self._lock:
            return sum(
                copy.nbytes
                for chunks in self._copies.values()
                for copy in chunks.values()
            )

    def keep_only(self, workers: Collection[WorkerKey]) -> None:
        """Frees the copies of all others, and from now on keeps those of these."""
        with self._lock:
            self._copies = {worker: self._copies.get(worker, {}) for worker in workers}

    def note(self, worker: WorkerKey, chunk_index: int, values: torch.Tensor) -> None:
        """The worker is given these values of a chunk."""
        known = self.of(worker, chunk_index)
        if known is not None:
            known.copy_(values)
            return
        with self._lock:
            chunks = self._copies.get(worker)
            if chunks is not None:
                chunks[chunk_index] = values.clone()

    def of(self, worker: WorkerKey, chunk_index: int) -> torch.Tensor | None:
        """What the worker was last given of a chunk; None before it was given any."""
        with self._lock:
            return self._copies.get(worker, {}).get(chunk_index)
