"""What an update of a chunk came to."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AppliedChunk:
    """What became of the contributions to a chunk.

    Attributes:
        presence: Slices that were updated; none when nothing was.
        torn_worker_ids: Contributors left out, since their data is not finite.
    """

    presence: tuple[bool, ...]
    torn_worker_ids: tuple[str, ...]
