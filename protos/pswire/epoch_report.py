"""What became of the data of an epoch, for users and their tools."""

from dataclasses import dataclass


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

    @property
    def is_complete(self) -> bool:
        """Whether all but what `drop_last` leaves out was seen once, and only once."""
        return self.seen_once == self.count - self.left_out
