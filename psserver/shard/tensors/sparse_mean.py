"""The weighted mean of contributions of which some are sparse.

A slice that all of its senders sent as rows has a sparse mean over the union of these
rows, as the sum of sparse gradients has in one process; a single dense contribution
makes it dense. Each row is summed in the order of the contributions, so that the
result is the same in every run.
"""

from collections.abc import Sequence

import torch

from psserver.shard.tensors.contribution import Contribution, sum_dtype
from pswire.placement import Chunk, Slice
from pswire.slice_rows import SliceRows

Positions = dict[int, torch.Tensor]
"""For each sparse slice, by its position in the chunk: where its elements are in the
slice, 1-D int64, ascending."""

Part = tuple[torch.Tensor, SliceRows | None]
"""A contribution's elements of one slice, scaled by its share, and their rows."""


def sparse_mean(
    chunk: Chunk, counted: Sequence[Contribution], total_weight: float | None
) -> tuple[torch.Tensor, tuple[bool, ...], Positions]:
    """Adds up contributions of a chunk, each by its share of the weight.

    Args:
        chunk: The chunk.
        counted: Contributions with weight, in the order to sum.
        total_weight: Weight of all contributors to the clock; `None` for a sum.

    Returns:
        The elements of the present slices, 1-D, of the chunk's type or float32 if that
        is wider, of a sparse slice those of its rows; which slices they are; and where
        those of sparse ones are.
    """
    wide = sum_dtype(chunk.element_type)
    columns = [_parts(chunk, each, total_weight, wide) for each in counted]
    sums: list[torch.Tensor] = []
    positions: Positions = {}
    presence = []
    for place, piece in enumerate(chunk.slices):
        parts = [part for column in columns if (part := column[place]) is not None]
        presence.append(bool(parts))
        if not parts:
            continue
        rows = [each for _, each in parts if each is not None]
        if len(rows) == len(parts):
            union = rows[0].united(rows[1:]) if len(rows) > 1 else rows[0]
            sums.append(_sum_of_rows(parts, union, wide))
            positions[place] = torch.from_numpy(union.positions())
        else:
            sums.append(_dense_sum(piece, parts, wide))
    gradient = torch.cat(sums) if sums else torch.empty(0, dtype=wide)
    return gradient, tuple(presence), positions


def elements_of(
    values: torch.Tensor, chunk: Chunk, presence: Sequence[bool], positions: Positions
) -> torch.Tensor:
    """The values of a chunk at the elements that a mean has.

    Args:
        values: Elements of the chunk, 1-D.
        chunk: The chunk.
        presence: Slices of the mean.
        positions: Where its elements of sparse slices are.
    """
    parts = []
    start = 0
    for place, piece in enumerate(chunk.slices):
        part = values[start : start + piece.element_count]
        if presence[place]:
            where = positions.get(place)
            parts.append(part if where is None else part[where])
        start += piece.element_count
    return torch.cat(parts)


def _parts(
    chunk: Chunk,
    contribution: Contribution,
    total_weight: float | None,
    wide: torch.dtype,
) -> list[Part | None]:
    """What a contribution has of each slice."""
    scaled = contribution.elements(chunk).to(wide)
    share = contribution.share(total_weight)
    if share != 1.0:
        scaled = scaled * share
    all_rows = contribution.rows or (None,) * len(chunk.slices)
    pieces = torch.split(scaled, contribution.element_counts(chunk))
    return [
        (elements, rows) if is_present else None
        for elements, rows, is_present in zip(
            pieces, all_rows, contribution.presence, strict=True
        )
    ]


def _sum_of_rows(
    parts: Sequence[Part], union: SliceRows, wide: torch.dtype
) -> torch.Tensor:
    if len(parts) == 1:
        return parts[0][0]
    total = torch.zeros(union.element_count, dtype=wide)
    for elements, rows in parts:
        assert rows is not None, "all parts are sparse"
        total.index_add_(0, torch.from_numpy(rows.positions_in(union)), elements)
    return total


def _dense_sum(piece: Slice, parts: Sequence[Part], wide: torch.dtype) -> torch.Tensor:
    total = torch.zeros(piece.element_count, dtype=wide)
    for elements, rows in parts:
        if rows is None:
            total.add_(elements)
        else:
            total.index_add_(0, torch.from_numpy(rows.positions()), elements)
    return total
