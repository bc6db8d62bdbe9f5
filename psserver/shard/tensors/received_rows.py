"""Checks of the sparse gradients that workers send."""

from collections.abc import Collection, Sequence
from typing import NoReturn

from psserver.shard.tensors.contribution import ChunkRows
from pswire.optimizers import SUPPORTED, SparseGradients
from pswire.placement import Chunk
from pswire.reasons import ErrorReason, Refusal
from pswire.schema import OptimizerSpec
from pswire.slice_rows import unpack_rows


def read_rows(
    chunk: Chunk,
    presence: Sequence[bool],
    row_indices: memoryview | None,
    *,
    row_lengths: Sequence[int],
    membership: Sequence[bool],
    specs: Collection[OptimizerSpec],
) -> ChunkRows:
    """Reads which rows a received chunk holds.

    Args:
        chunk: The chunk.
        presence: Which of its slices came.
        row_indices: As they came; None for a dense chunk.
        row_lengths: Elements of a row of each tensor of the schema.
        membership: Which slices the optimizer has; others that came are buffers.
        specs: All declarations of the optimizer: the trailer says which one it is by.

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
        if is_member and not is_sparse and takes == {SparseGradients.REQUIRED}:
            _refuse(chunk, spec, "is dense, and it takes sparse gradients only")
    return rows


def _refuse(chunk: Chunk, spec: OptimizerSpec, what: str) -> NoReturn:
    raise Refusal(
        ErrorReason.CHUNK_INVALID,
        f"{spec.name[:64]!r} is {spec.class_name}: a slice of chunk {chunk.index} "
        f"{what}",
    )
