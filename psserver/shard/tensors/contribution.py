"""What one worker has pushed of one chunk, as it was received."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch

from psserver.shard.tensors.compressed_gradients import CompressedPayload
from pswire.aggregation import MEAN, Aggregation
from pswire.optimizers import SUPPORTED, SparseGradients
from pswire.placement import Chunk
from pswire.reasons import ErrorReason, Refusal
from pswire.schema import NARROW_TYPES, ElementType, OptimizerSpec
from pswire.slice_rows import SliceRows, unpack_rows
from pswire.torch_types import TORCH_DTYPES, tensor_from_buffer

ChunkRows = tuple[SliceRows | None, ...]
"""For each slice of a chunk, the rows that a sparse gradient holds; None for a slice
that is dense or absent. Empty when no slice is sparse."""


@dataclass(frozen=True, slots=True)
class SparsePayload:
    """What is staged of a chunk with sparse slices; of others, the bytes alone.

    Attributes:
        data: Elements, as `Contribution` has them.
        rows: Which rows they are.
        chunk_bytes: Bytes of the whole chunk.
    """

    data: memoryview
    rows: ChunkRows
    chunk_bytes: int

    @property
    def byte_count(self) -> int:
        """Bytes of the elements and of the numbers of their rows."""
        rows = sum(each.rows.nbytes for each in self.rows if each is not None)
        return len(self.data) + rows


def byte_count_of(payload: object) -> int:
    """Bytes that a staged payload holds."""
    if isinstance(payload, SparsePayload | CompressedPayload):
        return payload.byte_count
    assert isinstance(payload, memoryview)
    return len(payload)


def sum_dtype(element_type: ElementType) -> torch.dtype:
    """Type that gradients are added up in: of 16 bits, float32."""
    return torch.float32 if element_type in NARROW_TYPES else TORCH_DTYPES[element_type]


@dataclass(frozen=True, slots=True, kw_only=True)
class Contribution:
    """One worker's gradient of one chunk, or values of some of its slices.

    Attributes:
        worker_id: Who sent it.
        weight: Samples behind it, finite and at least 0. 0 counts for nothing.
        presence: Which slices of the chunk it holds.
        data: Elements of the present slices, in schema order; of a sparse slice those
            of its rows.
        loss_scale: Factor the gradient still carries; 0 and 1 mean none.
        factor: What the gradient is multiplied by.
        rows: Rows of the sparse slices.
        element_type: Type that `data` is in where it is not the chunk's.
        value_entries: Tensors of which it has values and no gradient.
        is_source: Whether its values count where others have sent different ones.
    """

    worker_id: str
    weight: float
    presence: tuple[bool, ...]
    data: memoryview
    loss_scale: float = 1.0
    factor: float = 1.0
    rows: ChunkRows = ()
    element_type: ElementType | None = None
    value_entries: frozenset[int] = frozenset()
    is_source: bool = False

    def values(self, chunk: Chunk) -> tuple[bool, ...]:
        """For each slice of a chunk, whether it has values of it."""
        return tuple(
            present and piece.entry_index in self.value_entries
            for piece, present in zip(chunk.slices, self.presence, strict=True)
        )

    def elements(self, chunk: Chunk) -> torch.Tensor:
        """All that it holds, 1-D, sharing memory: read-only."""
        return tensor_from_buffer(self.data, self.element_type or chunk.element_type)

    def share(self, total_weight: float | None) -> float:
        """Factor that its elements go into a mean with, or, for `None`, into a sum."""
        part = 1.0 if total_weight is None else self.weight / total_weight
        return part * self.factor / (self.loss_scale or 1.0)

    def element_counts(self, chunk: Chunk) -> list[int]:
        """Elements that `data` has of each slice; 0 of one that is absent."""
        counts = [
            piece.element_count * present
            for piece, present in zip(chunk.slices, self.presence, strict=True)
        ]
        for position, each in enumerate(self.rows):
            if each is not None and self.presence[position]:
                counts[position] = each.element_count
        return counts


def present_count(
    chunk: Chunk,
    presence: tuple[bool, ...],
    membership: tuple[bool, ...],
    optimizer: str,
) -> int:
    """Elements of the slices that came.

    Args:
        chunk: The chunk.
        presence: Which of its slices came.
        membership: Slices that may come.
        optimizer: Whose push it is, for the text.

    Raises:
        Refusal: `CHUNK_INVALID` for a slice that may not.
    """
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


def read_rows(
    chunk: Chunk,
    presence: Sequence[bool],
    row_indices: memoryview | None,
    *,
    row_lengths: Sequence[int],
    membership: Sequence[bool],
    specs: Collection[OptimizerSpec],
    aggregation: Aggregation = MEAN,
) -> ChunkRows:
    """Reads which rows a received chunk holds.

    Args:
        chunk: The chunk.
        presence: Which of its slices came.
        row_indices: As they came; None for a dense chunk.
        row_lengths: Elements of a row of each tensor of the schema.
        membership: Which slices the optimizer has; others that came are buffers.
        specs: All declarations of the optimizer: the trailer says which one it is by.
        aggregation: What the gradients of a clock become.

    Raises:
        Refusal: `CHUNK_INVALID` or `MALFORMED_MESSAGE`; nothing is kept.
    """
    *_, spec = specs
    takes = {SUPPORTED[each.class_name].sparse for each in specs}
    rows: ChunkRows = ()
    if row_indices is not None:
        rows = unpack_rows(row_indices, chunk, presence, row_lengths)
    elif takes != {SparseGradients.REQUIRED}:
        return rows
    for position, is_member in enumerate(membership):
        if not presence[position]:
            continue
        is_sparse = bool(rows) and rows[position] is not None
        if is_sparse and not is_member:
            _refuse(chunk, spec, "is of a buffer, whose values come whole")
        if is_sparse and takes == {SparseGradients.REFUSED}:
            _refuse(chunk, spec, "is sparse, and it takes dense gradients only")
        if is_sparse and aggregation.rule.is_coordinatewise:
            _refuse(
                chunk,
                spec,
                f"is sparse, and the job has --aggregation {aggregation}: a row that "
                "most workers lack would never change; use dense gradients or another "
                "rule",
            )
        if is_member and not is_sparse and takes == {SparseGradients.REQUIRED}:
            _refuse(chunk, spec, "is dense, and it takes sparse gradients only")
    return rows


def _refuse(chunk: Chunk, spec: OptimizerSpec, what: str) -> NoReturn:
    raise Refusal(
        ErrorReason.CHUNK_INVALID,
        f"{spec.name[:64]!r} is {spec.class_name}: a slice of chunk {chunk.index} "
        f"{what}",
    )
