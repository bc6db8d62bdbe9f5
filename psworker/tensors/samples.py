"""Some elements of tensors, which show whether their values have changed.

Cheap enough for each step: half a microsecond for each tensor in host memory. Writes
through `.data`, which torch does not count, are seen too. An edit of a few elements of
a large tensor may not be.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np
import torch

from pswire.torch_types import bytes_of

_COUNT: Final = 32
"""Elements of each tensor that are compared, and up to twice as many."""

_ROUNDING_COUNT: Final = 4
"""Roundings that adding and taking away again may have made."""

_PERTURBATION: Final = 0.1
"""Size of what is added and taken away, beside that of the values themselves."""

Look = tuple[int, int, bytes]
"""Where a tensor is, torch's count of writes to it, and the bytes of its sample."""


class Samples:
    """Looks at the same elements of the same tensors again and again."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors = tensors
        self._addresses = [0] * len(tensors)
        self._parts: list[Any] = [_NOTHING] * len(tensors)
        self._elsewhere: dict[int, torch.Tensor] = {}

    def looks(self) -> list[Look]:
        """Of each tensor, how it looks now."""
        addresses = [each.data_ptr() for each in self.tensors]
        if addresses != self._addresses:
            self._find(addresses)
        bits = [part.tobytes() for part in self._parts]
        if self._elsewhere:
            here = bytes_here(self._elsewhere.values())
            for position, part in zip(self._elsewhere, here, strict=True):
                bits[position] = part.numpy().tobytes()
        versions = [each._version for each in self.tensors]
        return list(zip(addresses, versions, bits, strict=True))

    def _find(self, addresses: list[int]) -> None:
        """Takes views of tensors that are elsewhere now."""
        pairs = enumerate(zip(addresses, self._addresses, strict=True))
        for position, (new, old) in pairs:
            if new == old:
                continue
            view = _view(self.tensors[position])
            self._elsewhere.pop(position, None)
            if view is None or view.device.type != "cpu":
                self._parts[position] = _NOTHING
                if view is not None:
                    self._elsewhere[position] = view
            else:
                self._parts[position] = view.numpy()
        self._addresses = addresses


_NOTHING: Final = np.empty(0, dtype=np.uint8)
_BITS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def are_close(old: bytes, new: bytes, dtype: torch.dtype) -> bool:
    """Whether floats differ by no more than adding and taking away again rounds."""
    if len(old) != len(new):
        return False
    if old == new:
        return True
    before, now = (
        torch.frombuffer(bytearray(each), dtype=dtype).double() for each in (old, new)
    )
    finite = before[before.isfinite()].abs()
    largest = float(finite.max()) if len(finite) else 0.0
    limit = torch.finfo(dtype).eps * _ROUNDING_COUNT * (largest + _PERTURBATION)
    is_close = (before == now) | (before.isnan() & now.isnan())
    return bool((is_close | ((now - before).abs() <= limit)).all())


@torch.no_grad()
def bytes_here(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The bytes of each tensor, 1-D in host memory: one transfer from each device."""
    found = [bytes_of(each) for each in tensors]
    positions_by_device: dict[torch.device, list[int]] = {}
    for position, part in enumerate(found):
        if part.device.type != "cpu":
            positions_by_device.setdefault(part.device, []).append(position)
    for positions in positions_by_device.values():
        parts = [found[position] for position in positions]
        fetched = torch.cat(parts).cpu().split([len(part) for part in parts])
        for position, part in zip(positions, fetched, strict=True):
            found[position] = part
    return found


@torch.no_grad()
def _view(tensor: torch.Tensor) -> torch.Tensor | None:
    """The bits of elements at equal distances in memory, 1-D.

    None of a tensor whose elements are no run of memory, or that has none.
    """
    count = tensor.numel()
    if not count or not _is_dense(tensor):
        return None
    distance = max(1, count // _COUNT)
    length = (count - 1) // distance + 1
    whole = tensor.detach().view(_BITS[tensor.itemsize])
    return whole.as_strided((length,), (distance,), whole.storage_offset())


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether its elements are a run of memory, in whatever order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return True
