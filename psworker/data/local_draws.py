"""What a process that trains alone has drawn, and which steps took it."""

from dataclasses import dataclass, field
from itertools import count
from weakref import WeakValueDictionary

from pswire.leased_data import DataRange, EpochReport
from psworker.data.batch_tensors import BatchTensors
from psworker.data.pending import PendingData


@dataclass(slots=True, eq=False, weakref_slot=True)
class EpochDraws:
    """Batches of one epoch of one loader.

    Attributes:
        sizes: Samples of each batch that was handed out.
        stepped: Which of these a step took.
        number: Tells it from all other epochs; given when it is drawn from.
    """

    number: int
    sizes: list[int] = field(default_factory=list)
    stepped: set[int] = field(default_factory=set)

    def report(
        self, loader: str, epoch: int, *, is_by_batch: bool, left_out: int
    ) -> EpochReport:
        """What became of the epoch, as of now.

        Args:
            loader: Name of the loader.
            epoch: Number of the epoch.
            is_by_batch: Whether a batch sampler of the user's own cuts batches: where
                these differ in size batches are counted, as a job does.
            left_out: Samples of a last batch that the loader drops.
        """
        is_ragged = is_by_batch and _differ(self.sizes)
        sizes = [1] * len(self.sizes) if is_ragged else self.sizes
        seen = sum(sizes[batch] for batch in self.stepped)
        return EpochReport(
            loader=loader,
            epoch=epoch,
            count=sum(sizes) + left_out,
            seen_once=seen,
            seen_again=0,
            torn=0,
            dropped=0,
            skipped=sum(sizes) - seen,
            never=0,
            left_out=left_out,
            is_over=True,
            unit="batches" if is_ragged else "samples",
        )


class LocalDraws:
    """Batches of all loaders, until a step takes those that are behind its gradient."""

    def __init__(self) -> None:
        self.pending = PendingData()
        self._epochs: WeakValueDictionary[int, EpochDraws] = WeakValueDictionary()
        self._numbers = count()

    def begin(self) -> EpochDraws:
        """An iteration over an epoch begins."""
        epoch = EpochDraws(next(self._numbers))
        self._epochs[epoch.number] = epoch
        return epoch

    def draw(self, loader: str, epoch: EpochDraws, size: int, batch: object) -> None:
        """Notes a batch at the moment it is handed to the script."""
        position = len(epoch.sizes)
        epoch.sizes.append(size)
        where = DataRange(loader, epoch.number, position, position + 1)
        self.pending.draw(size, where, memory=BatchTensors(batch))

    def end(self, loader: str) -> None:
        """A loader has no more for the script."""
        self.pending.end(loader)

    def has_ahead(self, loader: str) -> bool:
        """Whether the script goes on with what it has drawn before it draws more."""
        return self.pending.has_ahead(loader)

    def note_step(self) -> None:
        """A step took what is behind its gradient."""
        for taken in self.pending.take().ranges:
            epoch = self._epochs.get(taken.epoch)
            if epoch is not None:
                epoch.stepped.add(taken.start)
        self.pending.unreported.take()  # there is nobody to tell


def _differ(sizes: list[int]) -> bool:
    """Whether batches differ in size, but for a last one that is smaller."""
    first = sizes[0] if sizes else 0
    return any(size != first for size in sizes[:-1]) or sizes[-1:] > [first]
