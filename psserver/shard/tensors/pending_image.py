"""The image of a cut while it is copied chunk by chunk, beside training."""

import logging
import threading
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

log = logging.getLogger("psserver.shard")

Copied = TypeVar("Copied")


class PendingImage(Generic[Copied]):
    """Which chunks of a cut are copied, and which are still owed.

    A chunk is copied before it is first changed after the cut: by whoever is about to
    change it, or before that by the thread that goes through all of them. Threads may
    call at once for different chunks; whoever calls for one holds its lock.

    Args:
        chunk_indexes: Chunks of the cut.
        copy: Copies a chunk as it is now.

    Attributes:
        chunks: What is copied, by chunk.
        failure: Why there will be no image; empty while there may be one.
    """

    def __init__(
        self, chunk_indexes: Iterable[int], copy: Callable[[int], Copied]
    ) -> None:
        self.chunks: dict[int, Copied] = {}
        self.failure = ""
        self._owed = set(chunk_indexes)
        self._copy = copy
        self._guard = threading.Lock()

    def take(self, chunk_index: int) -> None:
        """Copies a chunk that is owed. An error ends the image, and nothing else."""
        if chunk_index not in self._owed:
            return
        try:
            copied = self._copy(chunk_index)
        except Exception as error:
            log.error("chunk %d of a cut is not copied", chunk_index, exc_info=error)
            self.abandon(type(error).__name__)
            return
        with self._guard:
            # Somebody may have abandoned it meanwhile.
            if chunk_index in self._owed:
                self._owed.remove(chunk_index)
                self.chunks[chunk_index] = copied

    def abandon(self, failure: str) -> None:
        """Owes nothing any more, and frees what is copied.

        Args:
            failure: Why, for whoever waits for it.
        """
        with self._guard:
            self.failure = self.failure or failure
            self._owed = set()
            self.chunks = {}
