"""The values that a shard holds: one flat tensor for each element type.

A chunk is a run of elements of one vector and a slice a run of elements of its chunk,
so that reading, writing and updating them are views. Nothing here locks: whoever
calls sees to it that a chunk is not read while it is being updated.
"""

import mmap
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Final

import torch

from pswire.frames import bits_to_bytes, encode_shared_chunk
from pswire.placement import Chunk, Placement
from pswire.reasons import ErrorReason, Refusal
from pswire.schema import ElementType
from pswire.shared_memory.segments import (
    MemorySegment,
    SegmentError,
    SegmentKind,
    SharedRun,
    ValuesLayout,
    fence,
    is_worth_sharing,
)
from pswire.torch_types import TORCH_DTYPES, buffer_of, tensor_from_buffer

VectorMemory = Callable[[Placement, int], "ValuesSegment | None"]
"""Makes the memory of a shard's vectors; None where it shall not be shared."""


class ValuesSegment:
    """Memory of the vectors of one shard.

    Attributes:
        segment: The memory.
    """

    def __init__(self, placement: Placement, shard_index: int) -> None:
        """Zeros, of version 2.

        Raises:
            SegmentError: The system has no such memory.
        """
        self._layout = ValuesLayout.of(placement, shard_index)
        self.segment = MemorySegment.create(SegmentKind.VALUES, self._layout.byte_count)
        # Words of 64 bits are written in one piece.
        self._table = self.segment.data[self._layout.table].cast("Q")
        for entry in self._layout.entries.values():
            self._table[entry] = 2

    def vector(self, element_type: ElementType, element_count: int) -> torch.Tensor:
        """Elements of a type, 1-D, over the memory."""
        start = self._layout.vector_starts[element_type]
        stop = start + element_count * element_type.byte_count
        return tensor_from_buffer(self.segment.data[start:stop], element_type)

    @contextmanager
    def updating(self, chunk_index: int) -> Iterator[None]:
        """A chunk changes meanwhile: who reads it reads it again."""
        entry = self._layout.entries[chunk_index]
        self._table[entry] += 1
        fence()
        try:
            yield
        finally:
            fence()
            self._table[entry] += 1

    def reference(self, chunk_index: int) -> SharedRun:
        """Place of a chunk, and its version now."""
        run = self._layout.runs[chunk_index]
        version = self._table[self._layout.entries[chunk_index]]
        return SharedRun(self.segment.header.number, run.stop - run.start, version)


def shared_memory(placement: Placement, shard_index: int) -> ValuesSegment | None:
    """Memory that can be shared, where the system has it."""
    try:
        return ValuesSegment(placement, shard_index)
    except SegmentError:
        return None


def private_memory(_placement: Placement, _shard_index: int) -> ValuesSegment | None:
    """None: the vectors are in memory of the shard alone."""
    return None


_MAPPED_BYTES_MIN: Final = 1 << 20
"""Vectors of at least this size are mapped by themselves, from a page's start."""


class ShardVectors:
    """Flat tensors of all chunks of a shard, zero until written.

    Raises:
        Refusal: `LIMIT_EXCEEDED` when there is no memory for them.

    Attributes:
        placement: Placement of the job.
        shard_index: Which of its shards.
        shared: The memory, where workers on the same machine can read it.
    """

    def __init__(
        self,
        placement: Placement,
        shard_index: int,
        memory: VectorMemory = private_memory,
    ) -> None:
        self.placement = placement
        self.shard_index = shard_index
        self._memory = memory
        self._chunks = {
            chunk.index: chunk for chunk in placement.chunks_by_shard[shard_index]
        }
        sizes: dict[ElementType, int] = {}
        for chunk in self._chunks.values():
            sizes[chunk.element_type] = (
                sizes.get(chunk.element_type, 0) + chunk.element_count
            )
        try:
            self._vectors = {
                element_type: _zeros(element_type, size)
                for element_type, size in sizes.items()
            }
            # Memory to be shared is promised without a look at how much there is. The
            # zeros were refused if there is not enough, and no page of them was taken.
            self.shared: ValuesSegment | None = memory(placement, shard_index)
            if self.shared is not None:
                self._vectors = {
                    element_type: self.shared.vector(element_type, size)
                    for element_type, size in sizes.items()
                }
        except (MemoryError, RuntimeError, OSError) as error:
            # torch has no class of its own for it, and says it at length.
            raise memory_refusal(self) from error

    @property
    def byte_count(self) -> int:
        """Bytes of all values."""
        return sum(vector.nbytes for vector in self._vectors.values())

    def chunk(self, chunk_index: int) -> Chunk:
        """A chunk of this shard.

        Raises:
            Refusal: `CHUNK_INVALID` when the shard does not hold it.
        """
        try:
            return self._chunks[chunk_index]
        except KeyError:
            raise Refusal(
                ErrorReason.CHUNK_INVALID,
                f"chunk {chunk_index} is not one of shard {self.shard_index}'s "
                f"{len(self._chunks)} chunks",
            ) from None

    def view(self, chunk_index: int) -> torch.Tensor:
        """Elements of a chunk, 1-D, sharing memory."""
        chunk = self.chunk(chunk_index)
        stop = chunk.vector_start + chunk.element_count
        return self._vectors[chunk.element_type][chunk.vector_start : stop]

    def updating(self, chunk_index: int) -> AbstractContextManager[None]:
        """Readers of shared memory see that a chunk changes meanwhile."""
        return self.shared.updating(chunk_index) if self.shared else nullcontext()

    def reference(
        self, chunk_index: int, presence: tuple[bool, ...] | None = None
    ) -> bytes | None:
        """A message that says where a chunk's values are; None: they go in messages.

        Args:
            chunk_index: A chunk of this shard.
            presence: Which slices are meant, `None` for all.
        """
        chunk = self.chunk(chunk_index)
        if self.shared is None or not is_worth_sharing(chunk.byte_count):
            return None
        bits = (True,) * len(chunk.slices) if presence is None else presence
        return encode_shared_chunk(
            index=chunk_index,
            presence=bits_to_bytes(bits),
            digest=0,
            shared=self.shared.reference(chunk_index),
        )

    def read(
        self, chunk_index: int, presence: tuple[bool, ...] | None = None
    ) -> memoryview | bytes:
        """Bytes of a chunk's present slices, in schema order.

        Args:
            chunk_index: A chunk of this shard.
            presence: Which slices, `None` for all.

        Returns:
            A view of the live values when every slice is present, to be copied by
            the caller before the chunk is next updated; else a copy.
        """
        whole = buffer_of(self.view(chunk_index))
        if presence is None or all(presence):
            return whole
        chunk = self.chunk(chunk_index)
        size = chunk.element_type.byte_count
        return b"".join(
            whole[start * size : stop * size]
            for start, stop in present_runs(chunk, presence)
        )

    def write(self, chunk_index: int, data: memoryview) -> None:
        """Replaces all elements of a chunk.

        Raises:
            Refusal: `CHUNK_INVALID` for a chunk that is not held or another size;
                nothing is written.
        """
        chunk = self.chunk(chunk_index)
        if data.nbytes != chunk.byte_count:
            raise Refusal(
                ErrorReason.CHUNK_INVALID,
                f"chunk {chunk_index} takes {chunk.byte_count} bytes, "
                f"{data.nbytes} came",
            )
        self.view(chunk_index).copy_(tensor_from_buffer(data, chunk.element_type))

    def fresh(self) -> "ShardVectors":
        """Zeros of the same shape, in memory of the same kind."""
        return ShardVectors(self.placement, self.shard_index, self._memory)


def _zeros(element_type: "ElementType", element_count: int) -> torch.Tensor:
    """Zeros of which no page is taken before it is written.

    `torch.zeros` writes them all: values that nobody has seeded yet would take as much
    memory as those that are staged to replace them.
    """
    size = element_count * element_type.byte_count
    if size < _MAPPED_BYTES_MIN:
        return torch.zeros(element_count, dtype=TORCH_DTYPES[element_type])
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return tensor_from_buffer(memoryview(memory), element_type)


def memory_refusal(vectors: ShardVectors) -> Refusal:
    """What a shard says that has no memory for its part of the model."""
    size = vectors.placement.byte_count_of_shard(vectors.shard_index)
    return Refusal(
        ErrorReason.LIMIT_EXCEEDED,
        f"shard {vectors.shard_index} has no memory for its {size / 2**20:,.0f} MiB of "
        "the model",
        cure="start the job with more shards, or on a larger machine",
    )


def present_runs(chunk: Chunk, presence: Sequence[bool]) -> Iterator[tuple[int, int]]:
    """Maximal `(start, stop)` of adjacent present slices, in elements of the chunk."""
    position = run_start = run_stop = 0
    for piece, present in zip(chunk.slices, presence, strict=True):
        following = position + piece.element_count
        if present:
            if run_stop != position:
                if run_stop > run_start:
                    yield run_start, run_stop
                run_start = position
            run_stop = following
        position = following
    if run_stop > run_start:
        yield run_start, run_stop
