"""Which elements are the largest, without sorting them all.

The magnitudes of float32 compare as their bits do, as integers. A sample gives a bound
that a few more than are wanted lie above; the smallest that is wanted is searched among
these alone. If the sample has misled, it is searched among all.
"""

import math
from typing import Final

import numpy as np
import numpy.typing as npt

_MAGNITUDE_BITS: Final = 0x7FFF_FFFF

_SAMPLE_STRIDE: Final = 61
"""One element in so many is looked at: few beside the pass over all. A prime, so that
what repeats in a tensor at its width is not always hit at the same place."""

_DEVIATIONS: Final = 4.0
"""How many standard deviations of the sample its bound lies lower: at random too few
elements lie above it in 1 of 30,000 chunks."""


def places_of_largest(
    elements: npt.NDArray[np.float32], count: int
) -> npt.NDArray[np.int64]:
    """Places of the `count` largest magnitudes, ascending; fewer if others are zero.

    Of equal ones the first. What is no number counts as the largest.

    Args:
        elements: 1-D, contiguous.
        count: At most all.
    """
    if not count:
        return np.empty(0, np.int64)
    magnitudes = np.bitwise_and(elements.view(np.int32), _MAGNITUDE_BITS)
    places = np.flatnonzero(magnitudes >= _lower_bound(magnitudes, count))
    if len(places) < count:
        places = np.flatnonzero(magnitudes)
    surplus = len(places) - count
    if surplus <= 0:
        return places
    candidates = magnitudes[places]
    smallest = np.partition(candidates, surplus)[surplus]
    is_wanted = candidates >= smallest
    surplus = int(np.count_nonzero(is_wanted)) - count
    if surplus:
        equal = np.flatnonzero(candidates == smallest)
        is_wanted[equal[-surplus:]] = False
    wanted: npt.NDArray[np.int64] = places[is_wanted]
    return wanted


def _lower_bound(magnitudes: npt.NDArray[np.int32], count: int) -> int:
    """A magnitude above zero that most likely at least `count` are not below."""
    sample = magnitudes[::_SAMPLE_STRIDE]
    expected = count * len(sample) / len(magnitudes)
    rank = math.ceil(expected + _DEVIATIONS * math.sqrt(expected) + 1)
    if rank >= len(sample):
        return 1
    place = len(sample) - rank
    return max(int(np.partition(sample, place)[place]), 1)
