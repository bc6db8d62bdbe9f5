"""What became of the positions of an epoch, in numbers."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochAccount:
    """Every position of an epoch is in one of the counts.

    Of samples where a batch has a fixed number of them; of batches where their sizes
    differ, since nobody here knows how many samples they have.

    Attributes:
        loader: Name of the loader.
        epoch: Number of the epoch.
        position_count: Positions of the epoch.
        left_out_count: Of a last, smaller batch that the loader drops.
        seen_once_count: Behind a push that is part of the parameters.
        seen_again_count: Behind two of them: dealt again and used by both workers.
        torn_count: Of pushes that only some shards applied.
        dropped_count: Of pushes that were thrown away.
        skipped_count: Drawn from a loader and never pushed.
        never_count: The rest: not dealt, or dealt and not drawn.
        is_closed: Whether the epoch is over, so that no more is dealt of it.
    """

    loader: str
    epoch: int
    position_count: int
    left_out_count: int
    seen_once_count: int
    seen_again_count: int
    torn_count: int
    dropped_count: int
    skipped_count: int
    never_count: int
    is_closed: bool

    @property
    def is_plain(self) -> bool:
        """Whether all that was to be dealt was seen once."""
        return self.seen_once_count == self.position_count - self.left_out_count
