"""Which tensors lie over the same memory, element by element.

By addresses and strides alone: no element is read, so that they may be on any device.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
import torch

_WORK_MAX: Final = 1 << 20
"""Steps of the search for a common address. Interleaved views take a few of them."""

_LISTED_ELEMENTS_MAX: Final = 1 << 24
"""Of a tensor with odd strides, whose addresses are compared one by one."""


def overlapping_pairs(tensors: Sequence[torch.Tensor]) -> Iterator[tuple[int, int]]:
    """Pairs of tensors that have a byte of memory in common, by their positions.

    Two views that take turns in one memory, such as the columns of a matrix, have none.
    """
    by_device: dict[torch.device, list[tuple[int, int, int]]] = {}
    for position, tensor in enumerate(tensors):
        if tensor.numel():
            start = tensor.data_ptr()
            known = by_device.setdefault(tensor.device, [])
            known.append((start, start + _extent(tensor), position))
    for ranges in by_device.values():
        ranges.sort()
        open_ranges: list[tuple[int, int]] = []
        for start, stop, position in ranges:
            open_ranges = [each for each in open_ranges if each[0] > start]
            for _, other in open_ranges:
                if _share(tensors[other], tensors[position]):
                    yield min(other, position), max(other, position)
            open_ranges.append((stop, position))


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether several elements are one number in memory, as in an expanded view."""
    if tensor.is_contiguous() or not tensor.numel():
        return False
    dimensions = sorted(
        (stride, size)
        for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
        if size > 1
    )
    reach = 0
    for stride, size in dimensions:
        if stride <= reach:
            return _has_twice(tensor)
        reach += stride * (size - 1)
    return False


def _extent(tensor: torch.Tensor) -> int:
    """Bytes from the first element to the end of the last one."""
    pairs = zip(tensor.stride(), tensor.shape, strict=True)
    return (sum(s * (n - 1) for s, n in pairs) + 1) * tensor.element_size()


def _share(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors whose ranges meet have a byte in common."""
    if one.is_contiguous() and other.is_contiguous():
        return True
    try:
        # Its stub knows of two special numbers only.
        shares: Any = np.shares_memory
        return bool(shares(_bytes(one), _bytes(other), _WORK_MAX))
    except np.exceptions.TooHardError:
        return True  # such strides are most unlikely


def _has_twice(tensor: torch.Tensor) -> bool:
    if 0 in (s for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1):
        return True
    if tensor.numel() > _LISTED_ELEMENTS_MAX:
        return True  # as good as certain, and the lists would take gigabytes
    places = np.zeros(1, np.int64)
    for stride, size in zip(tensor.stride(), tensor.shape, strict=True):
        places = np.add.outer(places, np.arange(size) * stride).reshape(-1)
    return len(np.unique(places)) < len(places)


class _Described:
    """Memory, described for numpy."""

    def __init__(self, tensor: torch.Tensor) -> None:
        size = tensor.element_size()
        self.__array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "data": (tensor.data_ptr(), True),
            "shape": (*tensor.shape, size),
            "strides": (*(stride * size for stride in tensor.stride()), 1),
        }


def _bytes(tensor: torch.Tensor) -> Any:  # noqa: ANN401, an array that nobody may read
    return np.asarray(_Described(tensor))
