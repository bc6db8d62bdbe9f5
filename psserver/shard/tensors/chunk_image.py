"""All numbers of a chunk, as a shard holds them and as a checkpoint has them.

The image of a cut is copied chunk by chunk, beside training.
"""

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

import torch

from pswire.checkpoint.parts import PartKey
from pswire.optimizer_states import ChunkState

log = logging.getLogger("psserver.shard")

Copied = TypeVar("Copied")


class HeldState(NamedTuple):
    """State that an optimizer has of a chunk.

    Attributes:
        spec_digest: The declaration that it was last updated under.
        state: The state.
    """

    spec_digest: str
    state: ChunkState


def copy_of(tensor: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor:
    """A copy, in memory of another tensor that is not needed any more, where it fits.

    The system zeroes new memory page by page, which takes longer than the copy.
    """
    if into is None or into.dtype != tensor.dtype or into.shape != tensor.shape:
        return tensor.clone()
    return into.copy_(tensor)


@dataclass(frozen=True, slots=True)
class ChunkImage:
    """All numbers of a chunk.

    Attributes:
        values: Its elements, 1-D.
        master: Where optimizers update values of 16 bits in float32, those, 1-D.
        states: By optimizer, of those that have any.
    """

    values: torch.Tensor
    master: torch.Tensor | None = None
    states: Mapping[str, HeldState] = field(default_factory=dict)

    @property
    def is_finite(self) -> bool:
        """Whether all of its values are."""
        # A sum is finite only if they are, and costs a tenth of looking at each.
        values = self.values
        return bool(values.sum().isfinite()) or bool(values.isfinite().all())

    def named(self, chunk_index: int) -> Iterator[tuple[str, torch.Tensor]]:
        """Its tensors, by their names in a part."""
        yield PartKey.value(chunk_index).text, self.values
        if self.master is not None:
            yield PartKey.master(chunk_index).text, self.master
        for optimizer, held in self.states.items():
            for key, value in held.state.items():
                yield PartKey.state_of(optimizer, chunk_index, key).text, value


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
