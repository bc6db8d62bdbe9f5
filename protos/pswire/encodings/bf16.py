"""bfloat16: the upper half of a float32, rounded to the nearest. 2 bytes an element."""

from typing import Final

import torch
from typing_extensions import override

from pswire.encodings.codec import Codec
from pswire.schema import ElementType
from pswire.torch_types import buffer_of, tensor_from_buffer

_ELEMENT_BYTES: Final = 2


class Bf16(Codec):
    """Off by at most 2^-8 of an element, over the range of float32."""

    @override
    def byte_count(self, element_count: int) -> int:
        return _ELEMENT_BYTES * element_count

    @override
    def encode(self, values: torch.Tensor, *, seed: int | None = None) -> bytes:
        return bytes(buffer_of(values.to(torch.bfloat16)))

    @override
    def decode(self, data: memoryview, element_count: int) -> torch.Tensor:
        self.check(data, element_count)
        return tensor_from_buffer(data, ElementType.BFLOAT16).float()
