"""Signed bytes with a scale for each block, rounded at random without bias.

1 byte for each element and 4 for each block of 256. An element between two levels
goes to either with the probability of the other's distance, so that its expectation is
the element and no residual is needed.
Source: Alistarh et al., "QSGD", NIPS 2017.
"""

from typing import Final

import numpy as np
import torch
from typing_extensions import override

from pswire.encodings.codec import Codec, block_count, in_blocks
from pswire.schema import ElementType
from pswire.torch_types import buffer_of, tensor_from_buffer

BLOCK: Final = 256
"""Elements that share a scale. A chunk may hold tensors of quite different sizes."""

_LEVEL_MAX: Final = 127
_SCALE_BYTES: Final = 4
_SCALE_MIN: Final = 2.0**-120
"""A block whose scale were below counts as zeros: the inverse would overflow."""


class Int8(Codec):
    """Off by less than one level: the largest element of its block, divided by 127.

    Without a seed by at most half a level.
    """

    @override
    def byte_count(self, element_count: int) -> int:
        return element_count + _SCALE_BYTES * block_count(element_count, BLOCK)

    @override
    def encode(self, values: torch.Tensor, *, seed: int | None = None) -> bytes:
        count = values.numel()
        if not count:
            return b""
        blocks = in_blocks(values, BLOCK)
        low, high = blocks.aminmax(dim=1, keepdim=True)
        scales = torch.maximum(-low, high) / _LEVEL_MAX
        scales[scales < _SCALE_MIN] = 0.0
        inverse = torch.where(scales > 0, scales.reciprocal(), 0.0)
        levels = blocks * inverse
        levels.add_(0.5 if seed is None else _uniform(seed, levels.shape)).floor_()
        levels.clamp_(-_LEVEL_MAX, _LEVEL_MAX)
        data = levels.to(torch.int8).view(-1)[:count]
        return b"".join((buffer_of(scales), buffer_of(data)))

    @override
    def decode(self, data: memoryview, element_count: int) -> torch.Tensor:
        self.check(data, element_count)
        start = _SCALE_BYTES * block_count(element_count, BLOCK)
        scales = tensor_from_buffer(data[:start], ElementType.FLOAT32)
        levels = tensor_from_buffer(data[start:], ElementType.INT8).float()
        decoded = in_blocks(levels, BLOCK).mul_(scales[:, None])
        return decoded.view(-1)[:element_count]


def _uniform(seed: int, shape: torch.Size) -> torch.Tensor:
    """Numbers in [0, 1), the same for the same seed."""
    generator = np.random.Generator(np.random.SFC64(seed))
    return torch.from_numpy(generator.random(tuple(shape), dtype=np.float32))
