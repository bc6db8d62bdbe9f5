"""Aggregates that tolerate gradients which nobody trusts, of one chunk.

Where a worker lacks a slice that others have, it counts as zeros, as in the mean. See
`pswire.aggregation` for the rules and their sources.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import compress
from operator import not_
from typing import Final

import torch

from psserver.shard.tensors.aggregate import Mean, is_sound, mean_of
from psserver.shard.tensors.contribution import Contribution, sum_dtype
from psserver.shard.tensors.shard_vectors import present_runs
from pswire.aggregation import Aggregation
from pswire.placement import Chunk

PRODUCT_BLOCK_COUNT: Final = 1 << 16
"""Elements of each gradient that are widened to float64 at a time."""


def coordinatewise(
    aggregation: Aggregation,
    chunk: Chunk,
    contributions: Sequence[Contribution],
    worker_count: float,
) -> Mean:
    """The median, or the trimmed mean, of each element of a chunk.

    A contributor whose data is not finite is left out, as if it were not there.

    Args:
        aggregation: A rule that is coordinate-wise.
        chunk: The chunk.
        contributions: Dense ones, each of weight 1.
        worker_count: Workers that count, those without this chunk too.
    """
    counted = [each for each in contributions if each.weight > 0]
    verdicts = [is_sound(chunk, each) for each in counted]
    sound = list(compress(counted, verdicts))
    torn = tuple(each.worker_id for each in compress(counted, map(not_, verdicts)))
    dtype = sum_dtype(chunk.element_type)
    if not sound:
        nothing = (False,) * len(chunk.slices)
        return Mean(torch.empty(0, dtype=dtype), nothing, torn)
    presence = tuple(
        any(bits) for bits in zip(*(each.presence for each in sound), strict=True)
    )
    count = max(len(sound), round(worker_count) - len(torn))
    rows = torch.zeros(count, chunk.element_count, dtype=dtype)
    for row, each in zip(rows, sound, strict=False):
        spread(chunk, mean_of(chunk, [each], None), row)
    ascending = _ascending(list(rows))
    if aggregation.name == "median":
        low, high = ascending[(count - 1) // 2], ascending[count // 2]
        found = low if low is high else low.add_(high).mul_(0.5)
    else:
        trim_count = aggregation.trim_count(count)
        found, *others = ascending[trim_count : count - trim_count]
        for other in others:
            found.add_(other)
        found.div_(1 + len(others))
    if not all(presence):
        runs = present_runs(chunk, presence)
        found = torch.cat([found[start:stop] for start, stop in runs])
    return Mean(found, presence, torn)


def median_of(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The median of each element, in float64.

    What is no number counts as the largest, and is the median where most have none: a
    few that send it change no more than by any other value.
    """
    rows = [part.double().clone() for part in parts]
    none_counts = sum((row.isnan() for row in rows), torch.tensor(0))
    for row in rows:
        row.masked_fill_(row.isnan(), torch.inf)
    ascending = _ascending(rows)
    low, high = ascending[(len(parts) - 1) // 2], ascending[len(parts) // 2]
    found = low if low is high else low.mul(0.5).add_(high, alpha=0.5)
    return found.masked_fill_(2 * none_counts > len(parts), torch.nan)


def products_of(
    gradients: Sequence[torch.Tensor], *, has_pairs: bool
) -> list[list[float]]:
    """Inner products of gradients in float64; without pairs, of each with itself.

    Args:
        gradients: 1-D, of the same length. What is not finite stays so, and spoils
            only the products that it is in.
        has_pairs: Whether also of each with each other.
    """
    count = len(gradients)
    total = torch.zeros(count, count, dtype=torch.float64)
    for start in range(0, gradients[0].numel(), PRODUCT_BLOCK_COUNT):
        stop = start + PRODUCT_BLOCK_COUNT
        block = torch.stack([each[start:stop].double() for each in gradients])
        if has_pairs:
            total += block @ block.T
        else:
            total.diagonal().add_(torch.linalg.vecdot(block, block))
    found: list[list[float]] = total.tolist()
    return found


def spread(chunk: Chunk, mean: Mean, row: torch.Tensor) -> torch.Tensor:
    """Writes a gradient to its places among all elements of a chunk, which are 0."""
    position = start = 0
    for place, (piece, present) in enumerate(
        zip(chunk.slices, mean.presence, strict=True)
    ):
        if present:
            where = mean.positions.get(place)
            count = piece.element_count if where is None else where.numel()
            part = mean.gradient[position : position + count]
            into = row[start : start + piece.element_count]
            into.copy_(part) if where is None else into.index_copy_(
                0, where, part.to(row.dtype)
            )
            position += count
        start += piece.element_count
    return row


def _ascending(rows: list[torch.Tensor]) -> list[torch.Tensor]:
    """Sorts each element over rows of the same length, which are overwritten.

    A sorting network: some twenty times faster than `torch.sort` over few rows.
    """
    spare = torch.empty_like(rows[0])
    for low, high in _comparators(len(rows)):
        torch.minimum(rows[low], rows[high], out=spare)
        torch.maximum(rows[low], rows[high], out=rows[high])
        rows[low], spare = spare, rows[low]
    return rows


@lru_cache(maxsize=256)
def _comparators(count: int) -> tuple[tuple[int, int], ...]:
    """Pairs to compare, by Batcher's odd-even merge sort.

    Source: Batcher, "Sorting networks and their applications", AFIPS 1968; Knuth, The
    Art of Computer Programming 3, 5.2.2, algorithm M.
    """
    found = []
    width = 1
    while width < count:
        step = width
        while step >= 1:
            found += [
                (start + offset, start + offset + step)
                for start in range(step % width, count - step, 2 * step)
                for offset in range(min(step, count - start - step))
                if (start + offset) // (2 * width)
                == (start + offset + step) // (2 * width)
            ]
            step //= 2
        width *= 2
    return tuple(found)
