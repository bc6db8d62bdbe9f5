"""The values that each worker was last given, where they are not quite the shard's own.

In a job that pulls changes each worker has values of its own: those that it was given,
which lack what the encoding has left out so far. Workers that were given the same
share one copy of them, as all that began together do in BSP.

Threads that work on different chunks may call at once; calls for one chunk are
serialised by the caller.
"""

import threading
from collections.abc import Collection
from dataclasses import dataclass

import torch

from pswire.membership import WorkerKey


@dataclass(frozen=True, slots=True, eq=False)
class Given:
    """What a worker was given of the parameters of a chunk.

    Attributes:
        values: Elements, 1-D.
        digest: Of these.
        source: Digest of the shard's own values at that time, buffers included.
        message: What was sent, None where it was all of them.
        presence: Slices that the message has.
    """

    values: torch.Tensor
    digest: int
    source: int
    message: bytes | None = None
    presence: tuple[bool, ...] = ()


class GivenValues:
    """By worker and chunk. Holds nothing of workers that it was not told of."""

    def __init__(self) -> None:
        self._given: dict[WorkerKey, dict[int, tuple[int, Given]]] = {}
        self._newest: dict[int, tuple[int, Given]] = {}
        self._lock = threading.Lock()

    @property
    def byte_count(self) -> int:
        """Bytes of all values and messages, those that are shared once."""
        with self._lock:
            all_given = {
                id(given): given
                for chunks in self._given.values()
                for _, given in chunks.values()
            }
        return sum(
            given.values.nbytes + len(given.message or b"")
            for given in all_given.values()
        )

    def keep_only(self, workers: Collection[WorkerKey]) -> None:
        """Frees what was given to all others, and from now on keeps that of these."""
        with self._lock:
            self._given = {worker: self._given.get(worker, {}) for worker in workers}

    def of(self, worker: WorkerKey, chunk_index: int) -> tuple[int, Given] | None:
        """What a worker was given last, and with which push; None before the first."""
        with self._lock:
            return self._given.get(worker, {}).get(chunk_index)

    def note(
        self, worker: WorkerKey, chunk_index: int, sequence: int, given: Given
    ) -> None:
        """A worker is given values of a chunk in the answer to a push, 0 for a pull."""
        with self._lock:
            chunks = self._given.get(worker)
            if chunks is not None:
                chunks[chunk_index] = sequence, given

    def newest(self, chunk_index: int, before: int, source: int) -> Given | None:
        """What was made last of a chunk, if it was made of the same.

        Args:
            chunk_index: The chunk.
            before: Digest of what the worker has.
            source: Digest of the shard's own values, buffers included.
        """
        with self._lock:
            known = self._newest.get(chunk_index)
        if known is not None and known[0] == before and known[1].source == source:
            return known[1]
        return None

    def note_newest(self, chunk_index: int, before: int, given: Given) -> None:
        """This was made of what a worker had."""
        with self._lock:
            self._newest[chunk_index] = before, given
