"""The optimizers of a shard at work: of each the state and arithmetic of every chunk.

Updates of one chunk are serialised by the caller; different chunks are independent.
"""

from collections.abc import Callable, Collection, Mapping, Sequence

import torch

from psserver.shard.tensors.aggregate import Mean, within
from psserver.shard.tensors.chunk_image import copy_of
from psserver.shard.tensors.chunk_optimizer import ChunkOptimizer
from psserver.shard.tensors.declared_optimizers import DeclaredOptimizers
from psserver.shard.tensors.shard_vectors import (
    ShardVectors,
    memory_refusal,
    present_runs,
)
from pswire.optimizers import SUPPORTED, SparseGradients
from pswire.placement import Chunk
from pswire.schema import NARROW_TYPES, OptimizerSpec


class MasterValues:
    """What the optimizers of a shard update.

    Args:
        vectors: The values that workers read.
        is_seeded: Whether they are other than zeros.
        masters: By chunk, masters that are known already; kept.
    """

    def __init__(
        self,
        vectors: ShardVectors,
        *,
        is_seeded: bool,
        masters: Mapping[int, torch.Tensor] | None = None,
    ) -> None:
        self._vectors = vectors
        self._is_seeded = is_seeded
        self._masters = dict(masters or {})

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

    def copy(
        self, chunk_index: int, into: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """A copy of a chunk's masters; None where the values are updated.

        Args:
            chunk_index: The chunk.
            into: As for `copy_of`.
        """
        master = self._masters.get(chunk_index)
        return None if master is None else copy_of(master, into)

    def take(self, chunk: Chunk, presence: Sequence[bool]) -> None:
        """Goes on from the values of these slices, which were replaced."""
        master = self._masters.get(chunk.index)
        if master is None:
            return
        values = self._vectors.view(chunk.index)
        for start, stop in present_runs(chunk, presence):
            master[start:stop].copy_(values[start:stop])

    def publish(self, chunk: Chunk, presence: Sequence[bool]) -> None:
        """Publishes what an update has made of the present slices."""
        master = self._masters.get(chunk.index)
        if master is None:
            return
        values = self._vectors.view(chunk.index)
        for start, stop in present_runs(chunk, presence):
            values[start:stop].copy_(master[start:stop])


ValuesOf = Callable[[Chunk, Collection[int]], torch.Tensor]
"""Of a chunk and the entries that are updated: the elements to update."""


class ShardOptimizers:
    """Optimizers by name and chunk, each as it was declared for its last update."""

    def __init__(
        self,
        declared: DeclaredOptimizers,
        chunks: Sequence[Chunk],
        values_of: ValuesOf,
    ) -> None:
        """Begins without state, under the first declarations."""
        self._declared = declared
        self._chunks = {chunk.index: chunk for chunk in chunks}
        self._values_of = values_of
        self._held = {
            name: {index: self._made(spec, index) for index in self._chunks}
            for name, spec in declared.first.items()
        }
        self._memberships: dict[str, dict[int, tuple[bool, ...]]] = {}
        self._updatable: dict[int, tuple[bool, ...]] = {}
        self.note_declared()

    @property
    def state_byte_count(self) -> int:
        """Bytes of all state. May be asked for during an update."""
        return sum(
            held.state_byte_count
            for chunks in list(self._held.values())
            for held in list(chunks.values())
        )

    def note_declared(self) -> None:
        """Something was declared: pushes may have other slices from now on."""
        chunks = self._chunks.values()
        self._memberships = {
            name: self._declared.memberships(chunks, name) for name in self._held
        }
        self._updatable = self._declared.memberships(chunks)

    def membership(self, name: str, chunk_index: int) -> tuple[bool, ...]:
        """Slices of a chunk that pushes of an optimizer may have."""
        return self._memberships[name][chunk_index]

    def updatable(self, chunk_index: int) -> tuple[bool, ...]:
        """Slices of a chunk that some optimizer has."""
        return self._updatable[chunk_index]

    def held(self, name: str, chunk_index: int) -> ChunkOptimizer:
        """An optimizer of a chunk, as it was declared for its last update."""
        return self._held[name][chunk_index]

    def under(self, spec: OptimizerSpec, chunk_index: int) -> ChunkOptimizer:
        """An optimizer of a chunk as it is declared here; nobody else updates it now.

        State goes on where groups were changed, also that of slices which this
        declaration lacks, and begins anew where another optimizer took the place.
        """
        held = self.held(spec.name, chunk_index)
        if held.spec is spec:
            return held
        made = self._made(spec, chunk_index)
        if spec.goes_on_from(held.spec):
            made.load(held.export())
        self._held[spec.name][chunk_index] = made
        return made

    def within(self, spec: OptimizerSpec, chunk: Chunk, mean: Mean) -> Mean:
        """What a declaration takes of pushes, of which some were made by others."""
        if self._declared.is_alone(spec.name):
            return mean
        members = self._declared.group_of(spec)
        is_sparse = SUPPORTED[spec.class_name].sparse is SparseGradients.REQUIRED
        membership = [
            piece.entry_index in members and (place in mean.positions or not is_sparse)
            for place, piece in enumerate(chunk.slices)
        ]
        return within(chunk, mean, membership)

    def step_counts(self, name: str, entry_index: int) -> tuple[int, ...]:
        """Updates so far of each of an entry's slices on this shard."""
        return tuple(
            held.step_count(position)
            for chunk_index, held in self._held[name].items()
            for position, piece in enumerate(self._chunks[chunk_index].slices)
            if piece.entry_index == entry_index
        )

    def _made(self, spec: OptimizerSpec, chunk_index: int) -> ChunkOptimizer:
        chunk = self._chunks[chunk_index]
        group_of = self._declared.group_of(spec)
        known = self._declared.known_groups(spec)
        values = self._values_of(chunk, known)
        return ChunkOptimizer(spec, chunk, group_of, values, stateful_entries=known)
