"""How the buffers of one push enter those of the job, in SSP and ASP."""

from collections.abc import Set as AbstractSet
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BufferAverage:
    """A running average: there is no clock whose pushes a mean could be taken over.

    Attributes:
        entry_indexes: Buffers that move towards the pushed value by one member's share.
            The others are replaced.
        member_count: Members of the job, at least 1.
    """

    entry_indexes: AbstractSet[int]
    member_count: int
