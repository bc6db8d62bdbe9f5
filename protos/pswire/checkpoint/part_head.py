"""The head of a part, a safetensors file: which tensors it has, and where.

What is read is checked as far as the format goes, since it may be any bytes: nothing it
says is used before it fits the file. The head of a shard's part has a digest of each
tensor, and the manifest one of the head: each byte of a file is hashed once.
"""

import json
from collections.abc import Mapping
from io import RawIOBase
from math import prod
from typing import Any, Final, NamedTuple

from xxhash import xxh3_64, xxh3_128_hexdigest

from pswire.checkpoint.errors import UNREADABLE, DamagedError
from pswire.checkpoint.manifest import FilePart
from pswire.limits import DIMENSION_COUNT_MAX
from pswire.names import printable
from pswire.schema import ElementType

HEAD_BYTES_MAX: Final = 100_000_000
"""Longest head, as safetensors has it."""

TENSOR_COUNT_MAX: Final = 2_000_000
"""Most tensors of a part: ten for each of as many as a model may have."""

_LENGTH_BYTES: Final = 8
_METADATA: Final = "__metadata__"

DIGESTS: Final = "paramserver.digests"
"""Where the metadata of a shard's part have the XXH3-64 of each tensor, as JSON."""

_READ_BYTES: Final = 8 << 20
"""What is read at once of a file that is read whole."""

_ELEMENT_TYPES: Final[Mapping[str, ElementType]] = {
    "F32": ElementType.FLOAT32,
    "F64": ElementType.FLOAT64,
    "F16": ElementType.FLOAT16,
    "BF16": ElementType.BFLOAT16,
    "I64": ElementType.INT64,
    "I32": ElementType.INT32,
    "I16": ElementType.INT16,
    "I8": ElementType.INT8,
    "U8": ElementType.UINT8,
    "BOOL": ElementType.BOOL,
}
_NAMES: Final = {element_type: name for name, element_type in _ELEMENT_TYPES.items()}


class TensorPlace(NamedTuple):
    """A tensor of a file: its type and shape, and where its bytes are."""

    element_type: ElementType
    shape: tuple[int, ...]
    start: int
    byte_count: int


class PartHead(NamedTuple):
    """What a part says of itself.

    Attributes:
        digest: XXH3-128 of its bytes.
    """

    tensors: Mapping[str, TensorPlace]
    metadata: Mapping[str, str]
    digest: str


class DigestedHead(NamedTuple):
    """The head of a part of a shard.

    Attributes:
        metadata: Texts of the shard.
        digests: XXH3-64 of each tensor.
    """

    tensors: Mapping[str, TensorPlace]
    metadata: Mapping[str, str]
    digests: Mapping[str, str]


def read_digested_head(file: RawIOBase, part: FilePart) -> DigestedHead:
    """Reads the head of a part of a shard.

    Raises:
        DamagedError: It is not the one that was written.
    """
    head = read_head(file, part.byte_count)
    if head.digest != part.digest:
        raise DamagedError(
            f"the digest of its head is {head.digest}, and was {part.digest} when it "
            "was written"
        )
    metadata = dict(head.metadata)
    try:
        digests = json.loads(metadata.pop(DIGESTS))
        is_whole = digests.keys() == head.tensors.keys()
    except UNREADABLE as error:
        raise DamagedError("it has no digests of its tensors") from error
    if not is_whole:
        raise DamagedError("its digests are of other tensors")
    return DigestedHead(head.tensors, metadata, digests)


def check_contents(file: RawIOBase, part: FilePart) -> None:
    """Reads all of a part of a shard, in its order.

    Args:
        file: The part, at its start.
        part: What it is to be.

    Raises:
        DamagedError: Its bytes are not those that were written.
    """
    head = read_digested_head(file, part)
    buffer = memoryview(bytearray(min(_READ_BYTES, part.byte_count)))
    read = buffer[:0]
    for name, place in sorted(head.tensors.items(), key=lambda item: item[1].start):
        digest = xxh3_64()
        missing = place.byte_count
        while missing:
            read = read or buffer[: file.readinto(buffer) or 0]
            if not read:
                break
            digest.update(read[:missing])
            taken = min(missing, len(read))
            missing, read = missing - taken, read[taken:]
        check_digest(digest.hexdigest(), head, name)


def check_digest(digest: str, head: DigestedHead, name: str) -> None:
    """Compares the digest of a tensor.

    Raises:
        DamagedError: It is another one than that of what was written.
    """
    if digest != head.digests[name]:
        place = head.tensors[name]
        raise DamagedError(
            f"the {place.byte_count} bytes of tensor {printable(name)[:64]} from byte "
            f"{place.start} on are not those that were written"
        )


def encode_head(
    tensors: Mapping[str, tuple[ElementType, tuple[int, ...]]],
    metadata: Mapping[str, str],
) -> bytes:
    """The head of a file in which these tensors follow each other, in this order."""
    head: dict[str, object] = {_METADATA: dict(metadata)}
    start = 0
    for name, (element_type, shape) in tensors.items():
        stop = start + prod(shape) * element_type.byte_count
        head[name] = {
            "dtype": _NAMES[element_type],
            "shape": shape,
            "data_offsets": (start, stop),
        }
        start = stop
    text = json.dumps(head, separators=(",", ":"), ensure_ascii=False).encode()
    # Spaces after it let the first tensor begin at a multiple of 8.
    text += b" " * (-len(text) % _LENGTH_BYTES)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def read_head(file: RawIOBase, byte_count: int) -> PartHead:
    """Reads and checks the head of a file.

    Args:
        file: The file, at its start.
        byte_count: Its size.

    Raises:
        DamagedError: It is no safetensors file, or not a whole one.
    """
    prefix = file.read(_LENGTH_BYTES) or b""
    length = int.from_bytes(prefix, "little")
    if byte_count < _LENGTH_BYTES:
        raise DamagedError(f"it has {byte_count} bytes, too few for safetensors")
    if length > min(HEAD_BYTES_MAX, byte_count - _LENGTH_BYTES):
        raise DamagedError(
            f"it is no safetensors file: its head would have {length} bytes, the file "
            f"has {byte_count}"
        )
    text = file.read(length) or b""
    # Each `{` costs far more than its byte; it is not read before they are few.
    if len(text) < length or text.count(b"{") > TENSOR_COUNT_MAX:
        raise DamagedError("its head is cut off, or has too many tensors")
    try:
        head = json.loads(text)
        metadata = head.pop(_METADATA, {})
        if not all(isinstance(value, str) for value in metadata.values()):
            raise TypeError("its metadata is no text")
        # JSON may escape what is no text in UTF-8, which nobody could write again.
        "".join((*head, *metadata, *metadata.values())).encode()
        first = _LENGTH_BYTES + length
        tensors = {name: _place(entry, first) for name, entry in head.items()}
        _check_covered(tensors, first, byte_count)
    except UNREADABLE as error:
        raise DamagedError(
            f"it is no safetensors file: {type(error).__name__}, "
            f"{printable(str(error))[:128]}"
        ) from error
    return PartHead(tensors, metadata, xxh3_128_hexdigest(prefix + text))


def _place(entry: Mapping[str, Any], first: int) -> TensorPlace:
    element_type = _ELEMENT_TYPES[entry["dtype"]]
    shape, (start, stop) = tuple(entry["shape"]), entry["data_offsets"]
    numbers = (*shape, start, stop)
    if len(shape) > DIMENSION_COUNT_MAX or not all(
        type(number) is int and number >= 0 for number in numbers
    ):
        raise ValueError("a shape or an offset is no list of numbers")
    if stop - start != prod(shape) * element_type.byte_count:
        raise ValueError(f"a tensor {list(shape)} has {stop - start} bytes")
    return TensorPlace(element_type, shape, first + start, stop - start)


def _check_covered(
    tensors: Mapping[str, TensorPlace], first: int, byte_count: int
) -> None:
    """Tensors follow each other without gaps and end with the file."""
    expected = first
    for place in sorted(
        tensors.values(), key=lambda each: (each.start, each.byte_count)
    ):
        if place.start != expected:
            raise ValueError("tensors overlap, or leave a gap")
        expected += place.byte_count
    if expected != byte_count:
        raise ValueError(f"its tensors end at {expected}, the file at {byte_count}")
