"""The largest elements alone, as they are; the others wait until they are large enough.

4 bytes for their number, and 8 for each: where it is and what it is.
Source: Aji and Heafield, "Sparse communication for distributed gradient descent",
EMNLP 2017; Stich et al., "Sparsified SGD with memory", NeurIPS 2018.
"""

import math
import struct
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from typing_extensions import override

from pswire.encodings.encoding import Encoding, check_size, refuse
from pswire.frames import ENCODING_TOPK

_COUNT: Final = struct.Struct("<I")
_INDEX_TYPE: Final = np.dtype("<u4")
_VALUE_TYPE: Final = np.dtype("<f4")
_ELEMENT_BYTES: Final = _INDEX_TYPE.itemsize + _VALUE_TYPE.itemsize


@dataclass(frozen=True, slots=True)
class TopK(Encoding):
    """Exact in what it sends.

    Attributes:
        ratio: Share of the elements of a chunk that are sent, rounded up.
    """

    ratio: float = 0.01

    @property
    @override
    def number(self) -> int:
        return ENCODING_TOPK

    @property
    @override
    def keeps_residual(self) -> bool:
        return True

    @override
    def byte_count(self, element_count: int) -> int:
        if not element_count:
            return 0
        return _COUNT.size + _ELEMENT_BYTES * self._sent_count(element_count)

    @override
    def encode(self, values: torch.Tensor, *, seed: int | None = None) -> bytes:
        if not values.numel():
            return b""
        elements = values.numpy()
        count = self._sent_count(len(elements))
        # Five times as fast as torch's topk; what is no number counts as the largest.
        rest = len(elements) - count
        indices = np.argpartition(np.abs(elements), rest - 1 if rest else 0)[rest:]
        indices.sort()
        return b"".join(
            (
                _COUNT.pack(count),
                indices.astype(_INDEX_TYPE).tobytes(),
                elements[indices].astype(_VALUE_TYPE, copy=False).tobytes(),
            )
        )

    @override
    def decode(self, data: memoryview, element_count: int) -> torch.Tensor:
        indices, values = _parts(data, element_count)
        decoded = torch.zeros(element_count)
        decoded.numpy()[indices] = values
        return decoded

    @override
    def check(self, data: memoryview, element_count: int) -> None:
        _parts(data, element_count)

    def _sent_count(self, element_count: int) -> int:
        return min(math.ceil(element_count * self.ratio), element_count)


def _parts(
    data: memoryview, element_count: int
) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.float32]]:
    """Where the elements are, and what they are; views.

    Raises:
        Refusal: `CHUNK_INVALID`.
    """
    if not element_count:
        check_size("topk", data, element_count, 0)
        return np.empty(0, _INDEX_TYPE), np.empty(0, _VALUE_TYPE)
    if len(data) < _COUNT.size:
        refuse("topk", f"{len(data)} bytes came, which is too short for their number")
    (count,) = _COUNT.unpack_from(data)
    if count > element_count:
        refuse("topk", f"{count} of {element_count} elements came")
    check_size("topk", data, count, _COUNT.size + _ELEMENT_BYTES * count)
    middle = _COUNT.size + _INDEX_TYPE.itemsize * count
    indices = np.frombuffer(data[_COUNT.size : middle], _INDEX_TYPE)
    if count and not (
        (indices[1:] > indices[:-1]).all() and indices[-1] < element_count
    ):
        refuse(
            "topk",
            f"their places are not ascending and below {element_count}",
        )
    return indices, np.frombuffer(data[middle:], _VALUE_TYPE)
