"""Clipping by the global norm: the arithmetic that all sides must agree on.

As `torch.nn.utils.clip_grad_norm_`, whose norm is that of all gradients taken together.
Workers, shards and the coordinator use Python's floats, so that the same sums give the
same scale everywhere, bit by bit.
Source: Pascanu et al., "On the difficulty of training recurrent neural networks",
ICML 2013; the addend in the divisor is torch's.
"""

import math
import sys
from collections.abc import Iterable
from typing import Final

_NORM_ADDEND: Final = 1e-6


def is_clip_norm(value: float) -> bool:
    """Whether a gradient can be clipped to this norm: finite, more than 0."""
    return math.isfinite(value) and value >= sys.float_info.min


def sum_of_parts(sums_of_squares: Iterable[float]) -> float:
    """The sum of squares of a whole gradient, from those of its parts."""
    return math.fsum(sums_of_squares)


def norm_of(sum_of_squares: float) -> float:
    """The L2 norm."""
    return math.sqrt(sum_of_squares)


def gradient_scale(norm: float, clip_grad_norm: float) -> float:
    """What a gradient is multiplied by.

    Args:
        norm: Its L2 norm, finite.
        clip_grad_norm: The largest norm that is left as it is; 0 clips nothing.

    Returns:
        More than 0, at most 1.
    """
    if not clip_grad_norm:
        return 1.0
    scale = clip_grad_norm / (norm + _NORM_ADDEND)
    return min(1.0, max(scale, sys.float_info.min))
