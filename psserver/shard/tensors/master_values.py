"""float32 values behind the 16-bit parameters of a shard.

An update is often smaller than the distance between two neighbours in 16 bits: added
to the parameter itself it would be lost. So optimizers work on a float32 copy, the
*master* values, with state of float32, and workers and snapshots are given the masters
cast down, to the nearest and to even between two. The masters begin as the seeded
values. Source: Micikevicius et al., "Mixed Precision Training", ICLR 2018, section 3.1.

Not thread-safe for one chunk; different chunks are independent.
"""

from collections.abc import Sequence

import torch

from psserver.shard.tensors.shard_vectors import (
    ShardVectors,
    memory_refusal,
    present_runs,
)
from pswire.placement import Chunk
from pswire.schema import NARROW_TYPES


class MasterValues:
    """What the optimizers of a shard update."""

    def __init__(self, vectors: ShardVectors, *, is_seeded: bool) -> None:
        """Holds nothing yet.

        Args:
            vectors: The values that are given out.
            is_seeded: Whether they are other than zeros.
        """
        self._vectors = vectors
        self._is_seeded = is_seeded
        self._masters: dict[int, torch.Tensor] = {}

    @property
    def byte_count(self) -> int:
        """Bytes of all master values. May be asked for during an update."""
        return sum(master.nbytes for master in list(self._masters.values()))

    def of(self, chunk_index: int) -> torch.Tensor:
        """Elements of a chunk to be updated, 1-D; made when first asked for.

        Returns:
            The values themselves where their type is wide enough. Of 16 bits: masters,
            which are published by `publish`.

        Raises:
            Refusal: `LIMIT_EXCEEDED` when there is no memory for them.
        """
        values = self._vectors.view(chunk_index)
        if self._vectors.chunk(chunk_index).element_type not in NARROW_TYPES:
            return values
        if chunk_index not in self._masters:
            try:
                # Memory of zeros is not taken before it is written to.
                master = torch.zeros(values.numel(), dtype=torch.float32)
            except (MemoryError, RuntimeError) as error:
                raise memory_refusal(self._vectors) from error
            self._masters[chunk_index] = (
                master.copy_(values) if self._is_seeded else master
            )
        return self._masters[chunk_index]

    def take(self, chunk: Chunk, presence: Sequence[bool]) -> None:
        """Goes on from the values of these slices, which were replaced."""
        master = self._masters.get(chunk.index)
        if master is None:
            return
        values = self._vectors.view(chunk.index)
        for start, stop in present_runs(chunk, presence):
            master[start:stop].copy_(values[start:stop])

    def publish(self, chunk: Chunk, presence: Sequence[bool]) -> None:
        """Gives out what an update has made of the present slices."""
        master = self._masters.get(chunk.index)
        if master is None:
            return
        values = self._vectors.view(chunk.index)
        for start, stop in present_runs(chunk, presence):
            values[start:stop].copy_(master[start:stop])
