"""The weighted mean of the gradients of one chunk, or their sum.

Sums run in the order of the contributions given, which the caller sorts by worker id,
so that a result does not depend on who came first. Elements of 16 bits are summed in
float32, which the mean stays in.

Whether the gradient is finite is checked on the mean, while it is in the cache. Only
when the mean fails are the contributions looked at one by one.
"""

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import compress
from operator import and_, not_
from typing import Final

import torch

from psserver.shard.tensors.contribution import Contribution, sum_dtype
from psserver.shard.tensors.shard_vectors import present_runs
from psserver.shard.tensors.sparse_mean import Positions, sparse_mean
from pswire.limits import GRADIENT_NORM_MAX
from pswire.placement import Chunk

_NORM_TOLERANCE: Final = 1e-3


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean that may be applied.

    Attributes:
        gradient: Elements of the present slices, 1-D, of the chunk's type or float32
            if that is wider; of a sparse slice those of its rows. May share memory
            with a contribution: read-only.
        presence: Slices that some contributor has.
        torn_worker_ids: Contributors left out since their data is not finite.
        positions: Where the elements of each sparse slice are.
    """

    gradient: torch.Tensor
    presence: tuple[bool, ...]
    torn_worker_ids: tuple[str, ...] = ()
    positions: Positions = field(default_factory=dict)


def weighted_mean(
    chunk: Chunk, contributions: Sequence[Contribution], total_weight: float | None
) -> tuple[torch.Tensor, tuple[bool, ...]]:
    """Adds up dense contributions of a chunk, each by its share of the weight.

    A slice that a contributor lacks counts as zeros from it.

    Args:
        chunk: The chunk.
        contributions: In the order to sum.
        total_weight: Weight of all contributors to the clock, those without this
            chunk too. More than 0. `None` adds them up without weights.

    Returns:
        The gradient of the slices that some contributor has, 1-D, and which they are.
    """
    counted = [each for each in contributions if each.weight > 0]
    if not counted:
        empty = torch.empty(0, dtype=sum_dtype(chunk.element_type))
        return empty, (False,) * len(chunk.slices)
    presence = counted[0].presence
    if all(each.presence == presence for each in counted):
        return _same_presence(chunk, counted, total_weight), presence
    union = tuple(
        any(bits) for bits in zip(*(each.presence for each in counted), strict=True)
    )
    return _mixed_presence(chunk, counted, total_weight, union), union


def finite_mean(
    chunk: Chunk, contributions: Sequence[Contribution], total_weight: float | None
) -> Mean:
    """The weighted mean, without contributors whose data is not finite.

    The weight of a contributor that is left out is taken from the divisor; a sum has
    none, `None`. When the mean is not finite though each contribution is, all of them
    are left out.
    """
    mean = mean_of(chunk, contributions, total_weight)
    # Of buffers alone there is no gradient, and maybe no floats.
    if not mean.gradient.numel() or is_finite(mean.gradient):
        return mean
    counted = [each for each in contributions if each.weight > 0]
    verdicts = [is_sound(chunk, each) for each in counted]
    sound = list(compress(counted, verdicts))
    torn = list(compress(counted, map(not_, verdicts)))
    remaining = total_weight
    if total_weight is not None:
        remaining = total_weight - math.fsum(each.weight for each in torn)
    if torn and (remaining is None or remaining > 0):
        mean = mean_of(chunk, sound, remaining)
        if is_finite(mean.gradient):
            return replace(mean, torn_worker_ids=tuple(each.worker_id for each in torn))
    return Mean(
        mean.gradient[:0],
        (False,) * len(chunk.slices),
        tuple(each.worker_id for each in counted),
    )


def mean_of(
    chunk: Chunk, contributions: Sequence[Contribution], total_weight: float | None
) -> Mean:
    """The weighted mean, or for `None` the sum, of dense and sparse contributions."""
    counted = [each for each in contributions if each.weight > 0]
    if any(each.rows for each in counted):
        gradient, presence, positions = sparse_mean(chunk, counted, total_weight)
        return Mean(gradient, presence, positions=positions)
    return Mean(*weighted_mean(chunk, contributions, total_weight))


def within(chunk: Chunk, mean: Mean, membership: Sequence[bool]) -> Mean:
    """A mean without the slices that are none of an optimizer's.

    Args:
        chunk: The chunk.
        mean: Of pushes, some of which were made by other declarations perhaps.
        membership: Slices that the optimizer takes.
    """
    wanted = tuple(map(and_, mean.presence, membership))
    if wanted == mean.presence:
        return mean
    sizes = [
        mean.positions[place].numel()
        if place in mean.positions
        else piece.element_count
        for place, piece in compress(enumerate(chunk.slices), mean.presence)
    ]
    parts = mean.gradient.split(sizes)
    kept = list(compress(parts, compress(wanted, mean.presence)))
    return replace(
        mean,
        gradient=torch.cat(kept) if kept else mean.gradient[:0],
        presence=wanted,
        positions={at: where for at, where in mean.positions.items() if wanted[at]},
    )


def is_finite(gradient: torch.Tensor) -> bool:
    """Whether a gradient's L2 norm is a number, and at most `GRADIENT_NORM_MAX`.

    The norm is accumulated in float32, or float64 for that type.
    """
    dtype = torch.float64 if gradient.dtype == torch.float64 else torch.float32
    norm = torch.linalg.vector_norm(gradient, dtype=dtype).item()
    return bool(norm <= GRADIENT_NORM_MAX)


def square_sum(gradient: torch.Tensor) -> float:
    """The sum of the squares of a gradient's elements, in float64."""
    if not gradient.numel():
        return 0.0
    norm: float = torch.linalg.vector_norm(gradient, dtype=torch.float64).item()
    return norm * norm


class NormLimit:
    """What a push of SSP and ASP may still change on a shard.

    Its worker says the norm of its whole gradient, and by that it is scaled or skipped.
    The shard sums up what it applies of it, and leaves out what would go beyond the
    largest norm. So whoever lies has on each shard at most what the norm allows.

    Attributes:
        is_exact: Whether what goes beyond it was a lie. What comes out of a lossy
            encoding may be larger than what went in.
    """

    def __init__(self, norm_max: float, *, is_exact: bool) -> None:
        self.is_exact = is_exact
        # Workers accumulate the norm in float32.
        self._left = (norm_max * (1 + _NORM_TOLERANCE)) ** 2
        self._lock = threading.Lock()

    def admits(self, square: float) -> bool:
        """Whether a part of the push with this sum of squares may be applied."""
        with self._lock:
            if not square <= self._left:
                return False
            self._left -= square
            return True


def is_sound(chunk: Chunk, contribution: Contribution) -> bool:
    """Whether one contribution is finite, without its loss scale; see `is_finite`."""
    gradient = contribution.elements(chunk)
    if contribution.loss_scale not in (0.0, 1.0):
        gradient = gradient / contribution.loss_scale
    return is_finite(gradient)


def _same_presence(
    chunk: Chunk, counted: Sequence[Contribution], total_weight: float | None
) -> torch.Tensor:
    first, *others = counted
    dtype = sum_dtype(chunk.element_type)
    sent = first.elements(chunk)
    total = sent.to(dtype)
    share = first.share(total_weight)
    if share == 1.0 and not others:
        return total
    # What was sent stays as it is; a conversion is this function's own.
    total = total.mul(share) if total is sent else total.mul_(share)
    for each in others:
        addend = each.elements(chunk)
        total.add_(addend.to(dtype), alpha=each.share(total_weight))
    return total


def _mixed_presence(
    chunk: Chunk,
    counted: Sequence[Contribution],
    total_weight: float | None,
    union: tuple[bool, ...],
) -> torch.Tensor:
    dtype = sum_dtype(chunk.element_type)
    total = torch.zeros(chunk.element_count, dtype=dtype)
    for each in counted:
        addend = each.elements(chunk).to(dtype)
        share = each.share(total_weight)
        position = 0
        for start, stop in present_runs(chunk, each.presence):
            count = stop - start
            total[start:stop].add_(addend[position : position + count], alpha=share)
            position += count
    if not all(union):
        total = torch.cat(
            [total[start:stop] for start, stop in present_runs(chunk, union)]
        )
    return total
