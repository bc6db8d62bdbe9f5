"""Where things lie in the memory of a process of a host group, and who adds what.

Every process works it out by itself from the schema, and from who takes part.

Pure.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final, NamedTuple

from pswire.schema import EntryKind, ModelSchema
from pswire.shared_memory.layout import CHUNK_ALIGNMENT_BYTES, HEADER_BYTES

_CUT_ELEMENTS: Final = 64
"""A tensor is cut at a multiple of this many elements: no cache line has two owners."""


@dataclass(frozen=True, slots=True)
class HostLayout:
    """One process's segment: three areas, each with a place for every entry.

    Memory that is never written to costs nothing: only a leader's has values.

    Attributes:
        byte_count: Size of the segment.
        gradients: First byte of each entry's gradient, as this process has it.
        shares: First byte of each entry of the mean; a process writes its share.
        values: First byte of each entry's value.
    """

    byte_count: int
    gradients: tuple[int, ...]
    shares: tuple[int, ...]
    values: tuple[int, ...]

    @classmethod
    def of(cls, schema: ModelSchema) -> "HostLayout":
        """The layout for a model."""
        sizes = [_aligned(entry.byte_count) for entry in schema.entries]
        ends = list(accumulate(sizes * 3, initial=_aligned(HEADER_BYTES)))
        count = len(sizes)
        return cls(
            ends[-1],
            tuple(ends[:count]),
            tuple(ends[count : 2 * count]),
            tuple(ends[2 * count : 3 * count]),
        )


class Run(NamedTuple):
    """Elements `[start, stop)` of an entry, in C order."""

    entry_index: int
    start: int
    stop: int


def share_out(
    schema: ModelSchema, presence: Sequence[bool], count: int
) -> list[list[Run]]:
    """Cuts the present entries into shares of about as many bytes.

    Buffers are not cut.

    Args:
        schema: What is trained.
        presence: Entries that anybody brings.
        count: Number of shares.

    Returns:
        The runs of each share; together every element once.
    """
    present = [
        (index, entry)
        for index, (entry, is_present) in enumerate(
            zip(schema.entries, presence, strict=True)
        )
        if is_present and entry.element_count
    ]
    total = sum(entry.byte_count for _, entry in present)
    shares: list[list[Run]] = [[] for _ in range(count)]
    owner, before = 0, 0
    for index, entry in present:
        size = entry.element_type.byte_count
        start = 0
        while start < entry.element_count:
            limit = total * (owner + 1) // count
            stop = entry.element_count
            if owner + 1 < count and entry.kind is not EntryKind.BUFFER:
                room = -(-max(0, limit - before) // size)
                stop = min(stop, start + -(-room // _CUT_ELEMENTS) * _CUT_ELEMENTS)
            if stop > start:
                shares[owner].append(Run(index, start, stop))
            before += (stop - start) * size
            start = stop
            if before >= limit and owner + 1 < count:
                owner += 1
    return shares


def _aligned(size: int) -> int:
    return -(-size // CHUNK_ALIGNMENT_BYTES) * CHUNK_ALIGNMENT_BYTES
