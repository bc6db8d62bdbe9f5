"""Memory that two processes of one user on one machine map at the same time.

A segment is a file without a name (`memfd_create`), handed over as a descriptor:
nothing appears in `/dev/shm`, nobody else can open it, and it is gone with the last
mapping, whatever becomes of the processes. Its size is sealed, so that reading from a
mapping can't fail because the other side has cut it, and its maker alone writes to it.
Source: https://man7.org/linux/man-pages/man2/memfd_create.2.html and
https://man7.org/linux/man-pages/man2/F_GET_SEALS.2const.html

A segment begins with a header that says what it is. Then come, in a shard's segment of
values, a table with the version of each chunk, and then the elements. Both sides work
out by themselves where things lie. No message carries an offset: a place follows from
the placement, so none can be wrong.
"""

import contextlib
import mmap
import os
import secrets
import struct
import sys
import threading
from dataclasses import dataclass
from enum import IntEnum
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pswire.placement import Chunk, Placement
from pswire.reasons import ErrorReason, Refusal
from pswire.schema import ElementType

if TYPE_CHECKING:
    from typing_extensions import Buffer

if sys.platform == "linux":
    import fcntl

SHARED_MEMORY_VARIABLE: Final = "PS_SHARED_MEMORY"
"""Environment variable that switches shared memory off with `0`, on either side."""

_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_SEAL_FUTURE_WRITE: Final = 0x10  # Linux 5.1; Python knows its name from 3.13 on

_LOCK: Final = threading.Lock()

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


def fence() -> None:
    """What this thread has read and written is so before what it will.

    On x86 loads and stores keep their order anyhow. On ARM a lock's acquisition holds
    back what comes after it, and its release waits for what came before, but not the
    other way round: two turns in a row keep both sides apart, at about 0.2 us.
    """
    for _ in range(2):
        with _LOCK:
            pass


class SegmentError(Exception):
    """A segment can't be made or mapped; the text says why."""


def is_wanted(setting: str) -> bool:
    """Whether a value of `PS_SHARED_MEMORY` leaves shared memory on."""
    return setting.strip().lower() not in {"0", "false", "no", "off"}


def boot_id() -> str:
    """Which start of which machine this is; empty where shared memory can't be used."""
    if sys.platform != "linux" or not hasattr(os, "memfd_create"):
        return ""
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return ""


class MemorySegment:
    """A segment that this process has mapped.

    Attributes:
        header: What it begins with.
        data: All of it. Read-only where another process has made it. Views of it keep
            the mapping alive.
    """

    def __init__(
        self, header: SegmentHeader, data: memoryview, descriptor: int | None = None
    ) -> None:
        """Takes over a mapping; `create` and `adopt` make them."""
        self.header = header
        self.data = data
        self._descriptor = descriptor

    @classmethod
    def create(cls, kind: SegmentKind, byte_count: int) -> "MemorySegment":
        """A new segment of zeros, to be written to by this process alone.

        Raises:
            SegmentError: The system has no such memory.
        """
        if sys.platform != "linux":
            raise SegmentError(f"{sys.platform} has no memfd_create")
        header = SegmentHeader(kind, secrets.randbits(63) | 1, byte_count)
        try:
            descriptor = os.memfd_create(
                f"paramserver-{kind.name.lower()}",
                os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING,
            )
        except OSError as error:
            raise SegmentError(f"memfd_create failed: {error}") from None
        try:
            os.ftruncate(descriptor, byte_count)
            mapping = mmap.mmap(descriptor, byte_count)
            mapping[: len(header.pack())] = header.pack()
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | _SEAL_FUTURE_WRITE
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals | fcntl.F_SEAL_SEAL)
        except (OSError, ValueError) as error:
            os.close(descriptor)
            raise SegmentError(
                f"a segment of {byte_count} bytes can't be made: {error}"
            ) from None
        return cls(header, memoryview(mapping), descriptor)

    @classmethod
    def adopt(cls, header: SegmentHeader, descriptor: int) -> "MemorySegment":
        """Maps a segment that another process has made, to be read.

        Args:
            header: What it should be.
            descriptor: As it was received. Closed here in any case.

        Raises:
            SegmentError: It is something else, or its size could change.
        """
        if sys.platform != "linux":
            raise SegmentError(f"{sys.platform} has no memfd_create")
        try:
            seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
            wanted = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
            if seals & wanted != wanted:
                raise SegmentError("its size is not sealed")
            size = os.fstat(descriptor).st_size
            if size != header.byte_count:
                raise SegmentError(
                    f"it has {size} bytes, and should have {header.byte_count}"
                )
            mapping = mmap.mmap(descriptor, size, prot=mmap.PROT_READ)
        except (OSError, ValueError) as error:
            raise SegmentError(f"it is no sealed memory: {error}") from None
        finally:
            os.close(descriptor)
        data = memoryview(mapping)
        if not header.is_at_start_of(data):
            raise SegmentError(
                f"it is not the {header.kind.name.lower()} segment that was announced"
            )
        return cls(header, data)

    @property
    def descriptor(self) -> int:
        """To hand it over, of one that was made here."""
        assert self._descriptor is not None, "only its maker hands a segment over"
        return self._descriptor

    def close(self) -> None:
        """Gives the descriptor back. The memory goes with the last view of it."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __del__(self) -> None:
        with contextlib.suppress(OSError):
            self.close()
