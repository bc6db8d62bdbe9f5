"""What a process that trains alone has drawn, and which steps took it."""

from dataclasses import dataclass, field

from psworker.epoch_report import EpochReport


@dataclass(slots=True, eq=False)
class EpochDraws:
    """Batches of one epoch of one loader.

    Attributes:
        sizes: Samples of each batch that was handed out.
        stepped: Which of these a step took.
    """

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
    """Batches of all loaders that were drawn since the last step."""

    def __init__(self) -> None:
        self._drawn: list[tuple[EpochDraws, int]] = []

    def draw(self, epoch: EpochDraws, size: int) -> None:
        """Notes a batch at the moment it is handed to the script."""
        self._drawn.append((epoch, len(epoch.sizes)))
        epoch.sizes.append(size)

    def note_step(self) -> None:
        """A step took all that was drawn since the one before."""
        for epoch, batch in self._drawn:
            epoch.stepped.add(batch)
        self._drawn.clear()


def _differ(sizes: list[int]) -> bool:
    """Whether batches differ in size, but for a last one that is smaller."""
    first = sizes[0] if sizes else 0
    return any(size != first for size in sizes[:-1]) or sizes[-1:] > [first]
