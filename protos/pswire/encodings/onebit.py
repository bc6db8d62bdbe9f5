"""The sign of each element, and for each block the mean size of its elements.

1 bit for each element and 4 bytes for each block of 1,024. Of a zero the sign is plus.
Source: Karimireddy et al., "Error feedback fixes SignSGD and other gradient compression
schemes", ICML 2019 (scaled sign).
"""

from typing import Final

import numpy as np
import torch
from typing_extensions import override

from pswire.encodings.codec import Codec, block_count, in_blocks
from pswire.schema import ElementType
from pswire.torch_types import buffer_of, tensor_from_buffer

BLOCK: Final = 1024
"""Elements that share a size."""

_SIZE_BYTES: Final = 4


class OneBit(Codec):
    """Keeps at least 1 / BLOCK of a block's sum of squares, most often two thirds."""

    @override
    def byte_count(self, element_count: int) -> int:
        return (
            _SIZE_BYTES * block_count(element_count, BLOCK) + (element_count + 7) // 8
        )

    @override
    def encode(self, values: torch.Tensor, *, seed: int | None = None) -> bytes:
        count = values.numel()
        if not count:
            return b""
        sizes = in_blocks(values.abs(), BLOCK).mean(dim=1)
        if count % BLOCK:
            sizes[-1] *= BLOCK / (count % BLOCK)
        signs = np.packbits((values >= 0).numpy(), bitorder="little")
        return b"".join((buffer_of(sizes), signs.tobytes()))

    @override
    def decode(self, data: memoryview, element_count: int) -> torch.Tensor:
        self.check(data, element_count)
        start = _SIZE_BYTES * block_count(element_count, BLOCK)
        sizes = tensor_from_buffer(data[:start], ElementType.FLOAT32)
        bits = np.unpackbits(np.frombuffer(data[start:], np.uint8), bitorder="little")
        signs = torch.from_numpy(bits[:element_count]).float().mul_(2.0).sub_(1.0)
        return in_blocks(signs, BLOCK).mul_(sizes[:, None]).view(-1)[:element_count]

    @override
    def check(self, data: memoryview, element_count: int) -> None:
        super().check(data, element_count)
        if element_count % 8 and data[-1] >> (element_count % 8):
            self.refuse(f"bits are set beyond the {element_count} that there are")
