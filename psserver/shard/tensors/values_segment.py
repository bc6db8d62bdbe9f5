"""The values of a shard in memory that workers on the same machine can read.

The shard updates them in place, as it does without: nothing is copied to be published.
A reader finds out by the version of a chunk whether it changed while it was read.
Nothing here locks; see `ShardVectors`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from pswire.memory_fence import fence
from pswire.memory_segments import MemorySegment, SegmentError
from pswire.placement import Placement
from pswire.schema import ElementType
from pswire.shared_layout import SegmentKind, SharedRun, ValuesLayout
from pswire.torch_types import tensor_from_buffer

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
