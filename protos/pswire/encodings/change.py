"""Values as their difference from those that the receiver was sent before.

Both sides keep the values that were sent, which differ from the sender's own by what
the encodings have left out: the next difference includes it. By digests of the values
before and after, the receiver knows that it has what the sender added to, and that both
have the same then.
Source: Tang et al., "DoubleSqueeze: parallel stochastic gradient descent with
double-pass error-compensated compression", ICML 2019.
"""

import struct
from dataclasses import dataclass
from typing import Final

import torch
import xxhash

from pswire.encodings.known import BY_NUMBER, Encoding
from pswire.reasons import ErrorReason, Refusal
from pswire.torch_types import buffer_of

_HEADER: Final = struct.Struct("<QQQ")


@dataclass(frozen=True, slots=True)
class Change:
    """A difference of values.

    Attributes:
        before: Digest of the values that it is to be added to.
        after: Digest of the sum.
        encoding: How the difference is encoded.
        data: Elements of buffers as they are, then the encoded difference.
    """

    before: int
    after: int
    encoding: Encoding
    data: memoryview


def pack_change(before: int, after: int, encoding: Encoding) -> bytes:
    """The bytes before those of buffers and of the encoded difference."""
    return _HEADER.pack(before, after, encoding.number)


def unpack_change(data: memoryview) -> Change:
    """Reads the data of a chunk.

    Raises:
        Refusal: `CHUNK_INVALID`.
    """
    if len(data) < _HEADER.size:
        raise Refusal(
            ErrorReason.CHUNK_INVALID,
            f"a change of values has {len(data)} bytes, and begins with {_HEADER.size}",
        )
    before, after, number = _HEADER.unpack_from(data)
    encoding = BY_NUMBER.get(number)
    if encoding is None:
        raise Refusal(
            ErrorReason.CHUNK_INVALID,
            f"a change of values has the encoding {number}, which is none of "
            f"{', '.join(map(str, BY_NUMBER))}",
        )
    return Change(before, after, encoding, data[_HEADER.size :])


def digest_of(values: torch.Tensor) -> int:
    """XXH3-64 of values as they are in memory, 1-D, on the CPU."""
    return xxhash.xxh3_64_intdigest(buffer_of(values))
