"""How an epoch of data is cut, and what a worker leases and reports of it."""

from dataclasses import dataclass
from typing import NamedTuple

from pswire.reasons import ErrorReason, Refusal

Origin = int | bytes
"""What an epoch's order is drawn from: the job's seed, or a worker's random state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochShape:
    """How an epoch is cut, known before its order is drawn.

    Attributes:
        position_count: Positions of the epoch: samples, or batches where these
            differ in size.
        batch_size: Positions of a batch, at least 1.
        drop_last: Whether a last, smaller batch is left out.
    """

    position_count: int
    batch_size: int
    drop_last: bool

    def validate(self) -> None:
        """Checks a client's numbers.

        Raises:
            Refusal: `MALFORMED_MESSAGE`.
        """
        if self.position_count < 0 or self.batch_size < 1:
            raise Refusal(
                ErrorReason.MALFORMED_MESSAGE,
                f"an epoch of {self.position_count} positions in batches of "
                f"{self.batch_size} is none",
            )

    @property
    def usable_count(self) -> int:
        """Positions that are dealt."""
        if self.drop_last:
            return self.position_count - self.position_count % self.batch_size
        return self.position_count

    @property
    def batch_count(self) -> int:
        """Batches of the whole epoch, over all workers."""
        return -(-self.usable_count // self.batch_size)


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
