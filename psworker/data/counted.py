"""Loaders that the user splits between workers: only their samples are counted."""

import logging
import os
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from psworker.data.batch_tensors import BatchTensors
from psworker.data.source import SampleCount
from psworker.data.user_loader import PreparedLoader, counting, refuse_own_iteration
from psworker.left_behind import reduced

_log = logging.getLogger(__name__)


class CountedLoader(PreparedLoader):
    """A loader over a stream, or one whose sampler gives each worker its own part.

    Its batches are its own; only their sizes are noted, as the weight of the next
    `optimizer.step()`. Nothing is leased, so that a lost worker's part is not trained
    by the others, and workers may end an epoch at different times: who is done goes
    on, and leaves the job when its script ends.

    With `batch_size=None` each item counts as one sample: name another weight in
    `optimizer.step(weight=n)`.
    """

    def __init__(
        self, loader: DataLoader[Any], source: SampleCount, *, name: str = "loader"
    ) -> None:
        refuse_own_iteration(loader)
        self._counting: DataLoader[Any] | None = None
        self._source = source
        self._name = name
        self._worker_count: int | None = None
        self._loader = loader

    def __len__(self) -> int:
        """Batches of the user's loader, which are this worker's alone."""
        return len(self._loader)

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        """Refused: what it hands out is counted for this process."""
        return reduced(
            self._name,
            "what it hands out is counted for this process; copy the DataLoader that "
            "was given to prepare()",
        )

    def set_epoch(self, epoch: int) -> None:
        """Passes the epoch on to what has a `set_epoch`: the sampler, or the stream."""
        pass_epoch_on(self._loader, epoch)

    @property
    def report(self) -> None:
        """`None`: nothing is leased, so that what became of an epoch is not known."""
        return None

    def __iter__(self) -> Iterator[Any]:
        self._warn_of_split()
        # Anew each time: what the script has set on its loader since counts.
        self._counting = counting(self._loader, older=self._counting)
        is_done = False
        try:
            for sample_count, batch in self._source.work.loading(self._counting):
                memory = BatchTensors(batch)
                self._source.pending.draw(
                    sample_count, loader=self._name, memory=memory
                )
                yield batch
            is_done = True
            self._source.pending.end(self._name)
        finally:
            if not is_done and not self._source.has_gradient:
                self._source.pending.skip(self._name)

    def _warn_of_split(self) -> None:
        """Warns once of what the user must see to, and again if workers changed."""
        now = self._source.worker_count
        before, self._worker_count = self._worker_count, now
        if before is None and is_stream(self._loader):
            _log.warning(
                "%s: an IterableDataset has no positions to lease, so every worker "
                "reads its own stream; let the dataset give each its part by ps.rank "
                "of ps.worker_count, or all train on the same samples",
                self._name,
            )
        elif before is None:
            self._check_split(now)
        elif before != now:
            _log.warning(
                "%s: the job has %d workers now and had %d, and its data is split by "
                "%s: samples may be trained more than once or never; build it anew for "
                "the workers that are there, or use shuffle=True, whose data is leased",
                self._name,
                now,
                before,
                "the dataset" if is_stream(self._loader) else "a DistributedSampler",
            )

    def _check_split(self, worker_count: int) -> None:
        """Warns of a split that is not for these workers, or not this worker's."""
        split = _split_of(self._loader)
        if split is None:
            return
        if split.num_replicas != worker_count:
            _log.warning(
                "%s: its DistributedSampler splits the data set for %d worker%s, and "
                "this job has %d: samples are trained more than once or never; build "
                "it with num_replicas=ps.worker_count and rank=ps.rank, or use "
                "shuffle=True, whose data is leased",
                self._name,
                split.num_replicas,
                "" if split.num_replicas == 1 else "s",
                worker_count,
            )
        elif split.rank != self._source.rank and str(split.rank) != os.environ.get(
            "RANK"  # of a launcher that counts otherwise: each has its own
        ):
            _log.warning(
                "%s: its DistributedSampler draws the part of rank %d, and this worker "
                "has rank %d of %d: where two draw the same part its samples are "
                "trained twice and others never; build it with rank=ps.rank",
                self._name,
                split.rank,
                self._source.rank,
                worker_count,
            )


def pass_epoch_on(loader: DataLoader[Any], epoch: int) -> None:
    """Calls the first `set_epoch` of batch sampler, sampler and data set."""
    for each in _parts(loader):
        set_epoch = getattr(each, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)
            return


def is_stream(loader: DataLoader[Any]) -> bool:
    """Whether the loader reads an `IterableDataset`."""
    return isinstance(loader.dataset, IterableDataset)


def is_split_by_user(loader: DataLoader[Any]) -> bool:
    """Whether the loader's sampler gives each process its own part already."""
    return _split_of(loader) is not None


def _split_of(loader: DataLoader[Any]) -> DistributedSampler[Any] | None:
    splits = (e for e in _parts(loader) if isinstance(e, DistributedSampler))
    return next(splits, None)


def _parts(loader: DataLoader[Any]) -> list[Any]:
    """Where the user's own split may be: samplers from the outside in, the dataset."""
    batch_sampler: Any = loader.batch_sampler
    inner = getattr(batch_sampler, "sampler", None)
    return [batch_sampler, inner, loader.sampler, loader.dataset]
