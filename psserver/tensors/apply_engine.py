"""Everything a shard holds and does with numbers.

Calls for different chunks may run in different threads at once; calls for one chunk,
and seeding, are serialised by the caller. Torch releases the GIL during kernels. The
daemon calls `torch.set_num_threads(1)` once, since chunks are the unit of parallelism
here and torch's own threads would only compete with them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from psserver.tensors.aggregate import Contribution, finite_mean
from psserver.tensors.chunk_optimizer import ChunkOptimizer
from psserver.tensors.shard_vectors import ShardVectors
from psserver.tensors.supported_optimizers import (
    check_hyperparameters,
    check_optimizer,
)
from pswire.placement import Chunk, Placement
from pswire.reasons import ErrorReason, Refusal
from pswire.schema import ModelSchema, OptimizerSpec


@dataclass(frozen=True, slots=True)
class AppliedChunk:
    """What became of the contributions to a chunk.

    Attributes:
        presence: Slices that were updated; none when nothing was.
        torn_worker_ids: Contributors left out, since their data is not finite.
    """

    presence: tuple[bool, ...]
    torn_worker_ids: tuple[str, ...]


class ApplyEngine:
    """Values and optimizers of one shard."""

    def __init__(
        self,
        schema: ModelSchema,
        placement: Placement,
        shard_index: int,
        optimizers: Sequence[OptimizerSpec],
    ) -> None:
        """Starts with zeros, to be seeded.

        Raises:
            Refusal: For an optimizer that this shard can't run.
        """
        self._placement = placement
        self._shard_index = shard_index
        self._specs = {spec.name: spec for spec in optimizers}
        for spec in optimizers:
            check_optimizer(spec)
            _check_entries(schema, spec)
        self._staging: ShardVectors | None = None
        self._install(ShardVectors(placement, shard_index))

    @property
    def byte_count(self) -> int:
        """Bytes of values."""
        return self._vectors.byte_count

    @property
    def state_byte_count(self) -> int:
        """Bytes of optimizer state."""
        return sum(
            held.state_byte_count
            for chunks in self._optimizers.values()
            for held in chunks.values()
        )

    def check_chunk(
        self,
        chunk_index: int,
        presence: tuple[bool, ...],
        byte_count: int,
        *,
        optimizer: str,
    ) -> None:
        """Checks a received chunk before it is staged; changes nothing.

        Raises:
            Refusal: `CHUNK_INVALID`, with what was expected; `OPTIMIZER_MISMATCH` for
                an optimizer that the job does not have.
        """
        chunk = self._vectors.chunk(chunk_index)
        optimizer_of_chunk = self._optimizer(optimizer, chunk_index)
        membership = optimizer_of_chunk.membership
        if len(presence) != len(membership):
            raise Refusal(
                ErrorReason.CHUNK_INVALID,
                f"chunk {chunk_index} has {len(membership)} slices, the presence "
                f"bits are {len(presence)}",
            )
        if presence == membership:
            expected = optimizer_of_chunk.element_count
        else:
            expected = _present_count(chunk, presence, membership, optimizer)
        expected *= chunk.element_type.byte_count
        if byte_count != expected:
            raise Refusal(
                ErrorReason.CHUNK_INVALID,
                f"the present slices of chunk {chunk_index} take {expected} bytes, "
                f"{byte_count} came",
            )

    def check_hyperparameters(
        self, optimizer: str, hyperparameters: Sequence[Sequence[float]]
    ) -> None:
        """Checks a trailer's hyperparameters before it is staged.

        Raises:
            Refusal: `HYPERPARAMETER_INVALID` or `OPTIMIZER_MISMATCH`.
        """
        check_hyperparameters(self._spec(optimizer), hyperparameters)

    def apply(
        self,
        chunk_index: int,
        *,
        optimizer: str,
        contributions: Sequence[Contribution],
        total_weight: float,
        hyperparameters: Sequence[Sequence[float]],
    ) -> AppliedChunk:
        """Updates a chunk by the weighted mean of its contributions.

        Args:
            chunk_index: A chunk of this shard.
            optimizer: Name of the optimizer.
            contributions: Checked by `check_chunk`, sorted by worker id.
            total_weight: Weight of all contributors to the clock, those without this
                chunk too. 0 updates nothing.
            hyperparameters: Values of each group, checked.
        """
        chunk = self._vectors.chunk(chunk_index)
        mean = finite_mean(chunk, contributions, total_weight)
        if any(mean.presence):
            self._optimizer(optimizer, chunk_index).apply(
                mean.gradient,
                mean.presence,
                tuple(tuple(values) for values in hyperparameters),
            )
        return AppliedChunk(mean.presence, mean.torn_worker_ids)

    def read(
        self, chunk_index: int, presence: tuple[bool, ...] | None = None
    ) -> memoryview | bytes:
        """Bytes of a chunk's present slices; see `ShardVectors.read`."""
        return self._vectors.read(chunk_index, presence)

    def image(self) -> ShardVectors:
        """A copy of all values. No chunk may be applied meanwhile."""
        return self._vectors.copy()

    def begin_seed(self) -> None:
        """Makes room for first values, dropping any that are staged."""
        self._staging = ShardVectors(self._placement, self._shard_index)

    def write_seed(self, chunk_index: int, data: memoryview) -> None:
        """Stages first values of a chunk.

        Raises:
            Refusal: `CHUNK_INVALID`; nothing is written.
        """
        self._staged().write(chunk_index, data)

    def commit_seed(self) -> None:
        """Makes the staged values current, with optimizers that have no state."""
        self._install(self._staged())
        self._staging = None

    def discard_seed(self) -> None:
        """Drops staged values, if any."""
        self._staging = None

    def step_counts(self, optimizer: str, entry_index: int) -> tuple[int, ...]:
        """Updates so far of each of an entry's slices on this shard."""
        return tuple(
            held.step_count(position)
            for chunk_index, held in self._optimizers[optimizer].items()
            for position, piece in enumerate(self._vectors.chunk(chunk_index).slices)
            if piece.entry_index == entry_index
        )

    def run_count(self, optimizer: str, chunk_index: int) -> int:
        """Runs of a chunk: what an update of it costs beside its bytes."""
        return self._optimizer(optimizer, chunk_index).run_count

    def _install(self, vectors: ShardVectors) -> None:
        self._vectors = vectors
        self._optimizers: dict[str, dict[int, ChunkOptimizer]] = {}
        for spec in self._specs.values():
            group_of_entry = {
                entry_index: position
                for position, group in enumerate(spec.groups)
                for entry_index in group.entry_indexes
            }
            self._optimizers[spec.name] = {
                chunk.index: ChunkOptimizer(
                    spec, chunk, group_of_entry, vectors.view(chunk.index)
                )
                for chunk in self._placement.chunks_by_shard[self._shard_index]
            }

    def _staged(self) -> ShardVectors:
        assert self._staging is not None, "begin_seed comes first"
        return self._staging

    def _spec(self, optimizer: str) -> OptimizerSpec:
        try:
            return self._specs[optimizer]
        except KeyError:
            raise Refusal(
                ErrorReason.OPTIMIZER_MISMATCH,
                f"the job has no optimizer {optimizer[:64]!r}; it has "
                + ", ".join(repr(name[:64]) for name in self._specs),
            ) from None

    def _optimizer(self, optimizer: str, chunk_index: int) -> ChunkOptimizer:
        return self._optimizers[self._spec(optimizer).name][chunk_index]


def _present_count(
    chunk: Chunk,
    presence: tuple[bool, ...],
    membership: tuple[bool, ...],
    optimizer: str,
) -> int:
    count = 0
    for piece, present, is_member in zip(
        chunk.slices, presence, membership, strict=True
    ):
        if present and not is_member:
            raise Refusal(
                ErrorReason.CHUNK_INVALID,
                f"chunk {chunk.index} has a slice of tensor {piece.entry_index}, "
                f"which {optimizer[:64]!r} does not update",
            )
        count += piece.element_count * present
    return count


def _check_entries(schema: ModelSchema, spec: OptimizerSpec) -> None:
    for group in spec.groups:
        for entry_index in group.entry_indexes:
            if not 0 <= entry_index < len(schema.entries):
                raise Refusal(
                    ErrorReason.MALFORMED_MESSAGE,
                    f"{spec.name[:64]!r} names tensor {entry_index}, the model has "
                    f"{len(schema.entries)}",
                )
            entry = schema.entries[entry_index]
            if not entry.element_type.is_floating:
                raise Refusal(
                    ErrorReason.MALFORMED_MESSAGE,
                    f"{spec.name[:64]!r} updates {entry.name[:64]!r}, which is "
                    f"{entry.described}",
                )
