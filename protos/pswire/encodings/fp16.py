"""float16 with a power of two in front, so that nothing is too large for it.

4 bytes for the factor and 2 for each element. Gradients are often smaller than the
smallest float16, and values of a model that diverges larger than the largest: the
largest element is scaled to between 2^14 and 2^15, which loses no bits.
"""

import math
import struct
from typing import Final

import torch
from typing_extensions import override

from pswire.encodings.codec import Codec
from pswire.schema import ElementType
from pswire.torch_types import buffer_of, tensor_from_buffer

_ELEMENT_BYTES: Final = 2
_FACTOR: Final = struct.Struct("<f")
_TOP_EXPONENT: Final = 15
_EXPONENT_MAX: Final = 126  # of a factor whose inverse is no subnormal number


class Fp16(Codec):
    """Off by at most 2^-11 of an element, or 2^-39 of the largest one of its chunk."""

    @override
    def byte_count(self, element_count: int) -> int:
        return (_FACTOR.size + _ELEMENT_BYTES * element_count) if element_count else 0

    @override
    def encode(self, values: torch.Tensor, *, seed: int | None = None) -> bytes:
        if not values.numel():
            return b""
        low, high = values.aminmax()
        largest = max(-low.item(), high.item())
        exponent = 0
        if math.isfinite(largest):
            exponent = min(_TOP_EXPONENT - math.frexp(largest)[1], _EXPONENT_MAX)
        scaled = (values * 2.0**exponent).to(torch.float16)
        return b"".join((_FACTOR.pack(2.0**-exponent), buffer_of(scaled)))

    @override
    def decode(self, data: memoryview, element_count: int) -> torch.Tensor:
        self.check(data, element_count)
        if not element_count:
            return torch.empty(0)
        (factor,) = _FACTOR.unpack_from(data)
        scaled = tensor_from_buffer(data[_FACTOR.size :], ElementType.FLOAT16)
        return scaled.float().mul_(factor)
