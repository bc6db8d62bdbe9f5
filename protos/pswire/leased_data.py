"""Data of an epoch that a worker has leased, and what it says became of it."""

from dataclasses import dataclass
from typing import NamedTuple


class DataRange(NamedTuple):
    """Positions `[start, stop)` in the order of one epoch of one loader.

    Attributes:
        loader: Name of the loader.
        epoch: Epoch, from 0.
        start: First position.
        stop: One past the last position.
    """

    loader: str
    epoch: int
    start: int
    stop: int

    @property
    def position_count(self) -> int:
        """Positions in it."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class DataReport:
    """What became of data that a worker had, since its last report.

    Attributes:
        consumed: Ranges whose pushes were acknowledged: part of the parameters.
        dropped: Ranges whose pushes were dropped.
        incarnation: How often the worker had rejoined when this was noted.
        skipped: Ranges that were drawn and are behind no push.
    """

    consumed: tuple[DataRange, ...] = ()
    dropped: tuple[DataRange, ...] = ()
    incarnation: int = 0
    skipped: tuple[DataRange, ...] = ()

    @property
    def epochs(self) -> set[tuple[str, int]]:
        """Loaders and epochs that it is about."""
        pieces = (*self.consumed, *self.dropped, *self.skipped)
        return {(piece.loader, piece.epoch) for piece in pieces}
