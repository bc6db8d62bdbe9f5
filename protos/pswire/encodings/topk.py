"""The largest elements alone, as they are; the others wait until they are large enough.

Places are counted in blocks of 65,536 elements: 4 bytes for the number of elements of
each block that are sent, and 6 for each of these, what it is and where in its block.
Zeros are never sent.
Source: Aji and Heafield, "Sparse communication for distributed gradient descent",
EMNLP 2017; Stich et al., "Sparsified SGD with memory", NeurIPS 2018.
"""

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from typing_extensions import override

from pswire.encodings.codec import Codec, added, block_count
from pswire.encodings.largest import places_of_largest

BLOCK: Final = 1 << 16
"""Elements whose places take two bytes."""

_COUNT_TYPE: Final = np.dtype("<u4")
_PLACE_TYPE: Final = np.dtype("<u2")
_VALUE_TYPE: Final = np.dtype("<f4")
_ELEMENT_BYTES: Final = _PLACE_TYPE.itemsize + _VALUE_TYPE.itemsize


@dataclass(frozen=True, slots=True)
class TopK(Codec):
    """Exact in what it sends.

    Attributes:
        ratio: Share of the elements of a chunk that are sent, rounded up.
    """

    ratio: float

    @override
    def byte_count(self, element_count: int) -> int:
        counts = _COUNT_TYPE.itemsize * block_count(element_count, BLOCK)
        return counts + _ELEMENT_BYTES * self._sent_count(element_count)

    @override
    def encode(self, values: torch.Tensor, *, seed: int | None = None) -> bytes:
        elements = values.numpy()
        return _packed(elements, self._places(elements))

    @override
    def take(self, values: torch.Tensor, *, seed: int | None = None) -> bytes:
        elements = values.numpy()
        places = self._places(elements)
        data = _packed(elements, places)
        elements[places] = 0.0
        return data

    @override
    def decode(self, data: memoryview, element_count: int) -> torch.Tensor:
        places, sent = self._parts(data, element_count)
        decoded = torch.zeros(element_count)
        decoded.numpy()[places] = sent
        return decoded

    @override
    def add_to(self, values: torch.Tensor, data: memoryview) -> None:
        places, sent = self._parts(data, values.numel())
        if values.dtype is torch.float32:
            values.numpy()[places] += sent
        else:
            at = torch.from_numpy(places)
            values[at] = added(values[at], torch.from_numpy(sent.copy()))

    @override
    def check(self, data: memoryview, element_count: int) -> None:
        self._parts(data, element_count)

    def _parts(
        self, data: memoryview, element_count: int
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """Where the elements are, and what they are.

        Raises:
            Refusal: `CHUNK_INVALID`.
        """
        values_start = _COUNT_TYPE.itemsize * block_count(element_count, BLOCK)
        if len(data) < values_start:
            self.refuse(
                f"{len(data)} bytes came, and the numbers of {element_count} take "
                f"{values_start}",
            )
        counts = np.frombuffer(data[:values_start], _COUNT_TYPE)
        count = int(counts.sum(dtype=np.uint64))
        if count > element_count:
            self.refuse(f"{count} of {element_count} elements came")
        self.check_size(data, count, values_start + _ELEMENT_BYTES * count)
        places_start = values_start + _VALUE_TYPE.itemsize * count
        places = np.frombuffer(data[places_start:], _PLACE_TYPE).astype(np.int64)
        places += np.repeat(np.arange(len(counts)) * BLOCK, counts)
        if count and not (
            (places[1:] > places[:-1]).all() and places[-1] < element_count
        ):
            self.refuse(f"their places are not ascending and below {element_count}")
        return places, np.frombuffer(data[values_start:places_start], _VALUE_TYPE)

    def _sent_count(self, element_count: int) -> int:
        return min(math.ceil(element_count * self.ratio), element_count)

    def _places(self, elements: npt.NDArray[np.float32]) -> npt.NDArray[np.int64]:
        return places_of_largest(elements, self._sent_count(len(elements)))


def _packed(elements: npt.NDArray[np.float32], places: npt.NDArray[np.int64]) -> bytes:
    """Elements at ascending places."""
    edges = np.arange(block_count(len(elements), BLOCK) + 1) * BLOCK
    counts = np.diff(np.searchsorted(places, edges))
    return b"".join(
        (
            counts.astype(_COUNT_TYPE).tobytes(),
            elements[places].astype(_VALUE_TYPE, copy=False).tobytes(),
            (places % BLOCK).astype(_PLACE_TYPE).tobytes(),
        )
    )
