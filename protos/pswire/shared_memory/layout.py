"""Where things lie in a segment of shared memory; both sides work it out by themselves.

A segment begins with a header that says what it is. Then come, in a shard's segment of
values, a table with the version of each chunk, and then the elements.
No message carries an offset: a place follows from the placement, so none can be wrong.

Pure.
"""

import struct
from dataclasses import dataclass
from enum import IntEnum
from itertools import accumulate
from typing import TYPE_CHECKING, Final

from pswire.placement import Chunk, Placement
from pswire.reasons import ErrorReason, Refusal
from pswire.schema import ElementType

if TYPE_CHECKING:
    from typing_extensions import Buffer

HEADER_BYTES: Final = 64
"""Of a segment, at its start."""

CHUNK_ALIGNMENT_BYTES: Final = 64
"""Each chunk and each vector of a segment begins on a cache line."""

SHARED_BYTES_MIN: Final = 64 << 10
"""Smaller chunks go in messages: a copy of theirs costs less than a look elsewhere."""

_WORD_BYTES: Final = 8

_HEADER: Final = struct.Struct("<8sIIQQ")
_MAGIC: Final = b"psshmem\x02"


class SegmentKind(IntEnum):
    """What a segment holds."""

    GRADIENT = 1
    VALUES = 2
    HOST = 3  # gradients and values of one process, between workers of one host


@dataclass(frozen=True, slots=True)
class SegmentHeader:
    """The first bytes of a segment.

    Attributes:
        kind: What it holds.
        number: Drawn by who made it, so that no other segment is taken for it.
        byte_count: Size of all of it.
    """

    kind: SegmentKind
    number: int
    byte_count: int

    def pack(self) -> bytes:
        """The bytes."""
        return _HEADER.pack(_MAGIC, self.kind, 0, self.number, self.byte_count)

    def is_at_start_of(self, data: "Buffer") -> bool:
        """Whether a segment begins as it should: it is readable, and the right one."""
        return bytes(memoryview(data)[: _HEADER.size]) == self.pack()


@dataclass(frozen=True, slots=True)
class SharedRun:
    """What a message says of elements in shared memory.

    Attributes:
        segment: Number of the segment.
        length: Bytes, from the chunk's place on.
        version: Of values: version of the chunk, or an earlier one.
    """

    segment: int
    length: int
    version: int = 0


@dataclass(frozen=True, slots=True)
class GradientLayout:
    """Where the chunks of a gradient lie, of one shard.

    Attributes:
        byte_count: Size of the segment.
        starts: First byte of each chunk, by its index.
        sizes: Bytes that each has room for.
    """

    byte_count: int
    starts: dict[int, int]
    sizes: dict[int, int]

    @classmethod
    def of(cls, placement: Placement, shard_index: int) -> "GradientLayout":
        """The layout for a shard's part of a job."""
        chunks = placement.chunks_by_shard[shard_index]
        sizes = {chunk.index: chunk.byte_count for chunk in chunks}
        padded = map(_aligned, sizes.values())
        ends = list(accumulate(padded, initial=_aligned(HEADER_BYTES)))
        return cls(ends[-1], dict(zip(sizes, ends, strict=False)), sizes)

    def run(self, chunk_index: int, length: int) -> slice:
        """Where the elements of a chunk are.

        Raises:
            Refusal: `CHUNK_INVALID` for a chunk of another shard, or more bytes than
                it has room for.
        """
        size = self.sizes.get(chunk_index)
        if size is None:
            raise Refusal(
                ErrorReason.CHUNK_INVALID,
                f"chunk {chunk_index} has no place in this shard's gradient segment",
            )
        if length > size:
            raise Refusal(
                ErrorReason.CHUNK_INVALID,
                f"{length} bytes of chunk {chunk_index} are said to be in shared "
                f"memory, where it has room for {size}",
            )
        start = self.starts[chunk_index]
        return slice(start, start + length)


@dataclass(frozen=True, slots=True)
class ValuesLayout:
    """Where the values of a shard lie.

    Attributes:
        byte_count: Size of the segment.
        vector_starts: First byte of the vector of each element type.
        table: Bytes of the table: for each chunk of the shard, in the order of the
            placement, 64 bits with its version, odd while it is being changed.
        entries: Word of each chunk in the table, by its index.
        runs: Bytes of each chunk, by its index.
    """

    byte_count: int
    vector_starts: dict[ElementType, int]
    table: slice
    entries: dict[int, int]
    runs: dict[int, slice]

    @classmethod
    def of(cls, placement: Placement, shard_index: int) -> "ValuesLayout":
        """The layout of a shard."""
        chunks = placement.chunks_by_shard[shard_index]
        table_start = _aligned(HEADER_BYTES)
        table_stop = table_start + _WORD_BYTES * len(chunks)
        end = _aligned(table_stop)
        starts: dict[ElementType, int] = {}
        sizes: dict[ElementType, int] = {}
        for chunk in chunks:
            sizes[chunk.element_type] = max(
                sizes.get(chunk.element_type, 0), _vector_stop(chunk)
            )
        for element_type, size in sizes.items():
            starts[element_type] = end
            end = _aligned(end + size)
        return cls(
            end,
            starts,
            slice(table_start, table_stop),
            {chunk.index: position for position, chunk in enumerate(chunks)},
            {chunk.index: _run(chunk, starts[chunk.element_type]) for chunk in chunks},
        )


def is_worth_sharing(byte_count: int) -> bool:
    """Whether a chunk of this size goes through shared memory where there is any."""
    return byte_count >= SHARED_BYTES_MIN


def _vector_stop(chunk: Chunk) -> int:
    """First byte of its vector behind a chunk."""
    stop = chunk.vector_start + chunk.element_count
    return stop * chunk.element_type.byte_count


def _run(chunk: Chunk, vector_start: int) -> slice:
    stop = vector_start + _vector_stop(chunk)
    return slice(stop - chunk.byte_count, stop)


def _aligned(position: int) -> int:
    return -(-position // CHUNK_ALIGNMENT_BYTES) * CHUNK_ALIGNMENT_BYTES
