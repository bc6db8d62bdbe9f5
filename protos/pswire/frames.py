"""The hot path's protobuf, assembled and read by hand.

Going through a generated `bytes` field copies every payload twice and doubles the time
of a step. So the messages that carry chunks are built here from a small prefix and the
payload with one copy, and read as views of the received bytes with none. The bytes are
those of the generated code for the same fields; tests hold both against each other.

Pure. Everything that reads takes hostile bytes: it raises `Refusal` with
`MALFORMED_MESSAGE` or `LIMIT_EXCEEDED` and nothing else, skips what it does not know,
as protobuf demands, and never allocates by a length that it was sent.
Source: https://protobuf.dev/programming-guides/encoding
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Final

import xxhash

from pswire.encodings.known import BY_NUMBER
from pswire.limits import VALUES_PART_BYTES
from pswire.message_fields import (
    FIXED32,
    FIXED32_FORMAT,
    FIXED64,
    FIXED64_FORMAT,
    LENGTH,
    REMEMBERED_COUNT,
    VARINT,
    length_prefix,
    read_fields,
    varint,
)
from pswire.reasons import ErrorReason, Refusal
from pswire.shared_memory.segments import SharedRun

if TYPE_CHECKING:
    from typing_extensions import Buffer

REQUEST_HEADER_FIELD: Final = 1
"""`header` in `PushPullRequest`, `PushRequest` and `SeedRequest`."""

REQUEST_TRAILER_FIELD: Final = 2
"""`trailer` in `PushPullRequest` and `PushRequest`."""

REQUEST_CHUNK_FIELD: Final = 3
"""`chunk` in `PushPullRequest` and `PushRequest`."""

SEED_CHUNK_FIELD: Final = 2
"""`chunk` in `SeedRequest`."""

SEED_STATE_FIELD: Final = 3
"""`state` in `SeedRequest`."""

RESPONSE_CHUNK_FIELD: Final = 1
"""`chunk` in `PushPullResponse`, `PullResponse` and `PullSnapshotResponse`."""

RESPONSE_REPLY_FIELD: Final = 2
"""`reply` in `PushPullResponse` and `PullResponse`."""

RESPONSE_WAITING_FIELD: Final = 3
"""`waiting` in `PushPullResponse` and `PullResponse`."""

RESPONSE_STAGED_FIELD: Final = 4
"""`staged` in `PushPullResponse`."""

SHARED_CHUNKS_FIELD: Final = 40
"""`shared_chunks` in `PushPullRequest`, `PushRequest`, `PushPullResponse` and
`PullResponse`. Repeated: messages that hold nothing else may be joined."""

ENCODING_RAW: Final = 1
"""Little-endian elements in order."""

ENCODING_SPARSE_ROWS: Final = 2
"""The elements of some rows of a gradient; see `pswire.slice_rows`."""

ENCODING_CHANGE: Final = 21
"""Parameters only: how they differ from what was sent before; see
`pswire.encodings.change`."""

ENCODING_UNCHANGED: Final = 22
"""Parameters only, no data: the elements are those that the receiver has, as the digest
says."""
ENCODING_SHARED_MEMORY: Final = 8
"""Elements as of `ENCODING_RAW`, in shared memory, as `shared_memory.segments` says."""

_ENCODINGS: Final = {
    ENCODING_RAW: "raw",
    ENCODING_SPARSE_ROWS: "sparse rows",
    **{number: each.name for number, each in BY_NUMBER.items()},
    ENCODING_CHANGE: "change",
    ENCODING_UNCHANGED: "unchanged",
    ENCODING_SHARED_MEMORY: "shared memory",
}


DATA_ALIGNMENT_BYTES: Final = 16
"""`data` begins on a multiple of this from the start of a message that holds only a
chunk. A `bytes` object's content is so aligned itself, and a tensor over a received
chunk then takes PyTorch's aligned vector paths."""

_REMEMBERED_BYTES_MAX = 16

_INDEX, _PART, _LAST, _ENCODING, _DIGEST = 1, 2, 3, 4, 5
_PRESENCE, _ROW_INDICES, _PADDING, _DATA = 6, 7, 8, 9
_SHARED_SEGMENT, _SHARED_LENGTH, _SHARED_VERSION = 40, 41, 42


@dataclass(frozen=True, slots=True)
class ChunkFrame:
    """A received chunk: `GradientChunk` or `ParameterChunk`.

    Attributes:
        index: Index of the chunk in the placement.
        part: Number of this part of the chunk, from 0.
        last: Whether it is the chunk's last part.
        encoding: How `data` was made.
        digest: XXH3-64 of `row_indices` and `data`, as the sender says.
        presence: One bit for each slice; see `bits_from_bytes`.
        row_indices: Of `ENCODING_SPARSE_ROWS` only, else empty. A view of the message.
        data: Encoded elements. A view of the message, which it keeps alive.
        shared: Of `ENCODING_SHARED_MEMORY` only, where the elements are.
    """

    index: int
    part: int
    last: bool
    encoding: int
    digest: int
    presence: bytes
    row_indices: memoryview
    data: memoryview
    shared: SharedRun | None = None

    def verify(self) -> None:
        """Checks the bytes against their digest.

        Raises:
            Refusal: `CHUNK_DIGEST_MISMATCH`.
        """
        digest = _digest(self.row_indices, self.data)
        if digest != self.digest:
            raise Refusal(
                ErrorReason.CHUNK_DIGEST_MISMATCH,
                f"the {len(self.row_indices) + len(self.data)} bytes of chunk "
                f"{self.index} have the digest "
                f"{digest:016x}, their sender computed {self.digest:016x}",
                chunk_index=self.index,
            )

    def check_whole(self) -> None:
        """Checks that the present slices are there with all elements.

        Raises:
            Refusal: `CHUNK_INVALID`.
        """
        if self.encoding != ENCODING_RAW:
            raise Refusal(
                ErrorReason.CHUNK_INVALID,
                f"chunk {self.index} comes as {_ENCODINGS[self.encoding]}, and must be "
                "raw here",
            )


def encode_chunk(
    outer_field: int,
    *,
    index: int,
    presence: bytes,
    data: "Buffer",
    part: int = 0,
    last: bool = True,
    encoding: int = ENCODING_RAW,
    row_indices: bytes = b"",
    digest: int | None = None,
) -> bytes:
    """Builds a message that holds only a chunk, with one copy of the payload.

    Args:
        outer_field: Field number of `chunk` in the message around it.
        index: Index of the chunk in the placement.
        presence: One bit for each slice; see `bits_to_bytes`.
        data: Encoded elements of the present slices; contiguous, of any format.
        part: Number of this part of the chunk.
        last: Whether it is the chunk's last part.
        encoding: How `data` was made.
        row_indices: Which rows `data` holds; `GradientChunk` alone has them.
        digest: XXH3-64 of `row_indices` and `data` where the caller has it already.
    """
    payload = _byte_view(data)
    if digest is None:
        digest = _digest(row_indices, payload)
    fields = b"".join(
        (
            b"\x0d" + FIXED32_FORMAT.pack(index) if index else b"",
            b"\x15" + FIXED32_FORMAT.pack(part) if part else b"",
            b"\x18\x01" if last else b"",
            b"\x20" + varint(encoding) if encoding else b"",
            b"\x29" + FIXED64_FORMAT.pack(digest) if digest else b"",
            length_prefix(_PRESENCE, len(presence)) + presence if presence else b"",
            length_prefix(_ROW_INDICES, len(row_indices)) if row_indices else b"",
            row_indices,
        )
    )
    if not payload:
        return length_prefix(outer_field, len(fields)) + fields
    prefix = _aligned_prefix(outer_field, fields, len(payload))
    return b"".join((prefix, payload))


def encode_parts(
    outer_field: int, *, index: int, presence: bytes, data: "Buffer"
) -> Iterator[bytes]:
    """Builds messages that each hold a part of a chunk's raw elements, in order.

    All parts but the last are of `VALUES_PART_BYTES`, a multiple of every element.
    """
    payload = _byte_view(data)
    for part in range(part_count(len(payload))):
        yield encode_part(
            outer_field, index=index, presence=presence, data=payload, part=part
        )


def part_count(byte_count: int) -> int:
    """In how many parts so many bytes of a chunk are sent: at least one."""
    return max(1, -(-byte_count // VALUES_PART_BYTES))


def encode_part(
    outer_field: int, *, index: int, presence: bytes, data: "Buffer", part: int
) -> bytes:
    """Builds the message of one part of a chunk's raw elements.

    Args:
        outer_field: As for `encode_chunk`.
        index: As for `encode_chunk`.
        presence: As for `encode_chunk`.
        data: All elements of the chunk, of which nothing is kept.
        part: Which part, from 0.
    """
    payload = _byte_view(data)
    start = part * VALUES_PART_BYTES
    return encode_chunk(
        outer_field,
        index=index,
        presence=presence,
        data=payload[start : start + VALUES_PART_BYTES],
        part=part,
        last=part == part_count(len(payload)) - 1,
    )


def _aligned_prefix(outer_field: int, fields: bytes, payload_length: int) -> bytes:
    """All that comes before the payload, padded so that the payload is aligned.

    The length of the outer message is itself a varint whose size may grow with the
    padding, so sizes are tried in turn. Of 32 in a row at least 16 leave that varint
    alone, and one of these fits.
    """
    outer_prefix, inner_prefix = _prefixes(outer_field, len(fields), payload_length)
    return b"".join((outer_prefix, fields, inner_prefix))


@lru_cache(REMEMBERED_COUNT)
def _prefixes(
    outer_field: int, fields_length: int, payload_length: int
) -> tuple[bytes, bytes]:
    """What comes before the fields, and between them and the payload."""
    data_prefix = length_prefix(_DATA, payload_length)
    unpadded = fields_length + len(data_prefix)
    for padding_size in (0, *range(3, 35)):
        inner_length = unpadded + padding_size + payload_length
        outer_prefix = length_prefix(outer_field, inner_length)
        start = len(outer_prefix) + unpadded + padding_size
        if start % DATA_ALIGNMENT_BYTES == 0:
            padding = b""
            if padding_size:
                padding = length_prefix(_PADDING, padding_size - 2)
                padding += bytes(padding_size - 2)
            return outer_prefix, padding + data_prefix
    raise AssertionError("some padding always fits")


def join_fields(*fields: tuple[int, bytes]) -> bytes:
    """Builds a message from length-delimited fields, in ascending order.

    Protobuf messages concatenate: `join_fields(...)` before or after a message of
    `encode_chunk` is one message with the fields of both. Only a chunk at the start
    keeps its alignment.

    Args:
        fields: Field number and serialized value of each.
    """
    numbers = [number for number, _ in fields]
    assert numbers == sorted(set(numbers)), "fields go in ascending order"
    parts: list[bytes] = []
    for number, value in fields:
        parts += (length_prefix(number, len(value)), value)
    return b"".join(parts)


_SHARED_OUTER: Final = b"\xc2\x02"
_LAST_AND_ENCODING: Final = b"\x18\x01\x20" + bytes([ENCODING_SHARED_MEMORY])


def encode_shared_chunk(
    *, index: int, presence: bytes, digest: int, shared: SharedRun
) -> bytes:
    """Builds a message that holds only a chunk whose elements are in shared memory.

    A step sends one for each MiB both ways, so that it too is built by hand. Such
    messages may be joined to one that holds several.

    Args:
        index: Index of the chunk in the placement.
        presence: One bit for each slice; see `bits_to_bytes`.
        digest: XXH3-64 of the elements.
        shared: Where they are.
    """
    fields = b"".join(
        (
            b"\x0d" + FIXED32_FORMAT.pack(index) if index else b"",
            _LAST_AND_ENCODING,
            _fixed64(b"\x29", digest),
            join_fields((_PRESENCE, presence)) if presence else b"",
            _fixed64(b"\xc1\x02", shared.segment),
            _fixed64(b"\xc9\x02", shared.length),
            _fixed64(b"\xd1\x02", shared.version),
        )
    )
    return join_fields((SHARED_CHUNKS_FIELD, fields))


def is_shared_chunk(message: bytes) -> bool:
    """Whether a message of one chunk may be joined to others like it."""
    return message.startswith(_SHARED_OUTER)


def _fixed64(tag: bytes, value: int) -> bytes:
    return tag + FIXED64_FORMAT.pack(value) if value else b""


MESSAGE_FIELD_COUNT_MAX: Final = 32_768
"""Most fields side by side in a message that is read by hand. `REFERENCES_BYTES_MAX`
leaves room for 25,000 of chunks in shared memory, the only ones that are many."""

CHUNK_FIELD_COUNT_MAX: Final = 64
"""Most fields of a chunk, which has a dozen. Reading one costs what its fields do."""


def split_fields(message: bytes) -> list[tuple[int, memoryview]]:
    """Splits a message into its length-delimited fields, without copying.

    A field that occurs twice is there twice: protobuf would merge the two, and a
    receiver must refuse it or take the last.

    Raises:
        Refusal: `MALFORMED_MESSAGE`, with the byte at which it is broken, or
            `LIMIT_EXCEEDED`.
    """
    found = read_fields(
        memoryview(message), "message", count_max=MESSAGE_FIELD_COUNT_MAX
    )
    return [
        (number, value)
        for number, wire_type, value in found
        if wire_type == LENGTH and isinstance(value, memoryview)
    ]


def decode_chunk(view: memoryview) -> ChunkFrame:
    """Reads a chunk, without copying its payload.

    Args:
        view: Value of a `chunk` field, from `split_fields`.

    Raises:
        Refusal: `MALFORMED_MESSAGE`, with the byte at which it is broken, or with the
            encoding that this release does not read. `LIMIT_EXCEEDED` for more fields
            than `CHUNK_FIELD_COUNT_MAX`.
    """
    numbers = dict.fromkeys(_NUMBERS, 0)
    nothing = view[:0]
    runs = {_PRESENCE: nothing, _ROW_INDICES: nothing, _DATA: nothing}
    found = read_fields(view, "chunk", count_max=CHUNK_FIELD_COUNT_MAX)
    for number, wire_type, value in found:
        # As in the generated code: the last one counts, and a known number with
        # another wire type is an unknown field.
        if wire_type != _CHUNK_WIRE_TYPES.get(number):
            continue
        if isinstance(value, memoryview):
            runs[number] = value
        else:
            numbers[number] = value
    encoding = numbers[_ENCODING]
    if encoding not in _ENCODINGS:
        known = ", ".join(f"{key} ({name})" for key, name in _ENCODINGS.items())
        raise Refusal(
            ErrorReason.MALFORMED_MESSAGE,
            f"chunk {numbers[_INDEX]} has the encoding {encoding}, this release reads "
            f"{known}",
        )
    if encoding != ENCODING_SPARSE_ROWS and runs[_ROW_INDICES]:
        raise Refusal(
            ErrorReason.MALFORMED_MESSAGE,
            f"chunk {numbers[_INDEX]} is {_ENCODINGS[encoding]} and has "
            f"{len(runs[_ROW_INDICES])} bytes of row indices, which only sparse rows "
            "have",
        )
    is_shared = encoding == ENCODING_SHARED_MEMORY
    if is_shared and runs[_DATA]:
        raise Refusal(
            ErrorReason.MALFORMED_MESSAGE,
            f"chunk {numbers[_INDEX]} is in shared memory and has {len(runs[_DATA])} "
            "bytes of data too",
        )
    return ChunkFrame(
        index=numbers[_INDEX],
        part=numbers[_PART],
        last=bool(numbers[_LAST]),
        encoding=encoding,
        digest=numbers[_DIGEST],
        presence=bytes(runs[_PRESENCE]),
        row_indices=runs[_ROW_INDICES],
        data=runs[_DATA],
        shared=SharedRun(
            numbers[_SHARED_SEGMENT],
            numbers[_SHARED_LENGTH],
            numbers[_SHARED_VERSION],
        )
        if is_shared
        else None,
    )


_NUMBERS: Final = (
    *(_INDEX, _PART, _LAST, _ENCODING, _DIGEST),
    *(_SHARED_SEGMENT, _SHARED_LENGTH, _SHARED_VERSION),
)

_CHUNK_WIRE_TYPES: Final = {
    _INDEX: FIXED32,
    _PART: FIXED32,
    _LAST: VARINT,
    _ENCODING: VARINT,
    _DIGEST: FIXED64,
    _SHARED_SEGMENT: FIXED64,
    _SHARED_LENGTH: FIXED64,
    _SHARED_VERSION: FIXED64,
    _PRESENCE: LENGTH,
    _ROW_INDICES: LENGTH,
    _DATA: LENGTH,
}


def bits_to_bytes(bits: Sequence[bool]) -> bytes:
    """Packs bits, the lowest bit of the first byte first."""
    if len(bits) <= 8 * _REMEMBERED_BYTES_MAX:
        return _packed(tuple(bits))
    return _packed.__wrapped__(bits)


@lru_cache(REMEMBERED_COUNT)
def _packed(bits: Sequence[bool]) -> bytes:
    packed = bytearray((len(bits) + 7) // 8)
    for position, bit in enumerate(bits):
        if bit:
            packed[position >> 3] |= 1 << (position & 7)
    return bytes(packed)


def bits_from_bytes(data: "Buffer", count: int) -> tuple[bool, ...]:
    """Unpacks `count` bits.

    Raises:
        Refusal: `MALFORMED_MESSAGE` for another length, or bits set beyond `count`.
    """
    packed = _byte_view(data)
    if len(packed) != (count + 7) // 8:
        raise Refusal(
            ErrorReason.MALFORMED_MESSAGE,
            f"got {len(packed)} bytes for {count} bits, expected {(count + 7) // 8}",
        )
    if count % 8 and packed[-1] >> (count % 8):
        raise Refusal(
            ErrorReason.MALFORMED_MESSAGE,
            f"bits beyond the {count} that there are: last byte is {packed[-1]:#04x}",
        )
    if len(packed) <= _REMEMBERED_BYTES_MAX:
        return _unpacked(bytes(packed), count)
    return _unpacked.__wrapped__(packed, count)


@lru_cache(REMEMBERED_COUNT)
def _unpacked(packed: bytes, count: int) -> tuple[bool, ...]:
    return tuple(
        bool(packed[position >> 3] >> (position & 7) & 1) for position in range(count)
    )


def _digest(row_indices: "Buffer", payload: memoryview) -> int:
    if not row_indices:
        return xxhash.xxh3_64_intdigest(payload)
    state = xxhash.xxh3_64(row_indices)
    state.update(payload)
    return state.intdigest()


def _byte_view(data: "Buffer") -> memoryview:
    view = memoryview(data)
    if view.format == "B" and view.ndim == 1 and view.c_contiguous:
        return view
    # `cast` refuses shapes with a zero in them.
    return view.cast("B") if view.nbytes else memoryview(b"")
