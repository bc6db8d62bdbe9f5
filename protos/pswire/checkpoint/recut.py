"""Elements of one placement in another: onto another number of shards, or chunk size.

Both cut the same schema, so that chunks of both are slices of the same entries.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from pswire.placement import Chunk, Placement


class Run(NamedTuple):
    """Elements that lie side by side both in an old chunk and in a new one.

    Attributes:
        chunk_index: The old chunk.
        slice_index: Which of its slices they are of.
        start: Where they begin in the old chunk, in elements.
        new_slice_index: Which slice of the new chunk they are of.
        new_start: Where they begin in the new chunk, in elements.
        element_count: How many there are.
    """

    chunk_index: int
    slice_index: int
    start: int
    new_slice_index: int
    new_start: int
    element_count: int


class _OldSlice(NamedTuple):
    entry_start: int
    entry_stop: int
    chunk_index: int
    slice_index: int
    chunk_start: int


class Recut:
    """Where the elements of chunks are in an old placement of the same schema."""

    def __init__(self, old: Placement) -> None:
        self._slices: dict[int, list[_OldSlice]] = defaultdict(list)
        for chunk in old.chunks:
            start = 0
            for slice_index, piece in enumerate(chunk.slices):
                self._slices[piece.entry_index].append(
                    _OldSlice(piece.start, piece.stop, chunk.index, slice_index, start)
                )
                start += piece.element_count

    def runs(self, chunk: Chunk) -> Iterator[Run]:
        """The runs that a new chunk is made of, in the order of its elements."""
        new_start = 0
        for new_slice_index, piece in enumerate(chunk.slices):
            # In the order of elements, since chunks are in schema order.
            held = self._slices[piece.entry_index]
            position = bisect_right(
                held, piece.start, key=lambda each: each.entry_start
            )
            start = piece.start
            while start < piece.stop:
                old = held[position - 1]
                count = min(piece.stop, old.entry_stop) - start
                yield Run(
                    chunk_index=old.chunk_index,
                    slice_index=old.slice_index,
                    start=old.chunk_start + start - old.entry_start,
                    new_slice_index=new_slice_index,
                    new_start=new_start,
                    element_count=count,
                )
                start += count
                new_start += count
                position += 1
