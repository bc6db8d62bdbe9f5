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


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochReport:
    """Every position of an epoch is in one of the counts.

    Attributes:
        loader: Name of the loader.
        epoch: Number of the epoch, from 0.
        count: Samples of the epoch, over all workers.
        seen_once: Behind a step that is part of the parameters.
        seen_again: Behind two of them, which takes a defect somewhere.
        torn: Behind a step of a lost worker that only some shards have applied.
        dropped: Behind steps that were thrown away: those of backup workers that came
            too late, and of workers that were evicted in the middle of one.
        skipped: Drawn from the loader and behind no step.
        never: Not drawn by anybody.
        left_out: Of a last, smaller batch, with `drop_last=True`.
        is_over: Whether the epoch is over on all workers.
        unit: What is counted: `samples`, or `batches` where a batch sampler's batches
            differ in size.
        held: Of `never`, what workers hold and have not reported yet.
    """

    loader: str
    epoch: int
    count: int
    seen_once: int
    seen_again: int
    torn: int
    dropped: int
    skipped: int
    never: int
    left_out: int
    is_over: bool
    unit: str = "samples"
    held: int = 0

    @property
    def is_complete(self) -> bool:
        """Whether all but what `drop_last` leaves out was seen once, and only once."""
        return self.seen_once == self.count - self.left_out


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedSplit:
    """A split under its name.

    Attributes:
        name: Its name in the job.
        recipe: How to draw it again, as JSON; empty in a list of all.
        digest: SHA-256 of its positions, in hexadecimal.
        item_count: Positions that there are.
        recorder: Id of the worker that recorded it; empty before it is recorded.
    """

    name: str
    digest: str
    item_count: int
    recipe: str = ""
    recorder: str = ""
