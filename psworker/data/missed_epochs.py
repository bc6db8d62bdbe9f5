"""Epochs of which a worker got nothing, and why."""

import logging
from itertools import pairwise

_log = logging.getLogger(__name__)


class MissedEpochs:
    """What one loader says about them: one line for a run of epochs, not one for each.

    A worker that joins a job late, or once more, runs through the epochs that are
    trained already in no time. It's worth a warning only if that was all it did. That
    there are fewer batches than workers is said at once.
    """

    def __init__(self, loader: str) -> None:
        self._loader = loader
        self._missed: set[int] = set()
        self._had_batch = False
        self._is_told_few = False
        self._is_outrun = False

    def add(
        self, epoch: int, *, batch_count: int, worker_count: int, was_over: bool
    ) -> None:
        """An epoch that has batches ended without one for this worker.

        Args:
            epoch: Its number.
            batch_count: Batches that it has.
            worker_count: Workers that the job had for it.
            was_over: Whether it was over when this worker opened it.
        """
        if batch_count < worker_count:
            if not self._is_told_few:
                self._is_told_few = True
                _log.warning(
                    "this worker got no batch of epoch %d of %r: it has %d for %d "
                    "workers; make its batches smaller, or train with at most %d "
                    "workers",
                    *(epoch, self._loader, batch_count, worker_count, batch_count),
                )
            return
        self._missed.add(epoch)
        self._is_outrun = self._is_outrun or not was_over

    def note_batch(self, epoch: int) -> None:
        """A batch was handed out: the epochs missed before it are past."""
        self._had_batch = True
        if self._missed:
            _log.info(
                "%s of %r %s trained already: this worker goes on with epoch %d",
                _named(self._missed),
                self._loader,
                "is" if len(self._missed) == 1 else "are",
                epoch,
            )
            self._missed.clear()

    def end(self) -> None:
        """The script is done: warns if it never had a batch."""
        if self._missed and not self._had_batch and self._is_outrun:
            _log.warning(
                "this worker got no batch of %s of %r: the other workers had drawn all "
                "of %s before it asked; use fewer workers, or smaller batches",
                _named(self._missed),
                self._loader,
                "it" if len(self._missed) == 1 else "them",
            )
        elif self._missed and not self._had_batch:
            _log.warning(
                "this worker got no batch of %s of %r: the job's workers have trained "
                "all of %s; for a new run start a new coordinator and shards, with "
                "other --state-dir folders",
                _named(self._missed),
                self._loader,
                "it" if len(self._missed) == 1 else "them",
            )
        self._missed.clear()


def _named(epochs: set[int]) -> str:
    """As in `epoch 3`, `epochs 0 to 17` or `epochs 0 to 2, 5`."""
    ordered = sorted(epochs)
    starts = [ordered[0], *(b for a, b in pairwise(ordered) if b != a + 1)]
    stops = [*(a for a, b in pairwise(ordered) if b != a + 1), ordered[-1]]
    runs = [
        str(start) if start == stop else f"{start} to {stop}"
        for start, stop in zip(starts, stops, strict=True)
    ]
    return f"epoch{'s' if len(ordered) > 1 else ''} {', '.join(runs)}"
