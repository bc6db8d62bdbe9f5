"""The loader of a process that trains alone: the user's own, with a report."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sized
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Self
from weakref import WeakValueDictionary

from torch.utils.data import BatchSampler, DataLoader

from pswire.leased_data import DataRange, EpochReport
from psworker.data.batch_tensors import BatchTensors
from psworker.data.counted import is_split_by_user, is_stream, pass_epoch_on
from psworker.data.pending import PendingData
from psworker.data.user_loader import PreparedLoader, noting
from psworker.transport.values import DrawnData


@dataclass(slots=True, eq=False, weakref_slot=True)
class EpochDraws:
    """Batches of one epoch of one loader.

    Attributes:
        sizes: Samples of each batch that was handed out.
        stepped: Which of these a step took.
        number: Its place among the epochs of all loaders.
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
            is_by_batch: Whether a batch sampler of the user's own cuts batches: if
                these differ in size, batches are counted, as in a job.
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
    """Batches of all loaders, until a step takes those that are behind its gradient.

    Attributes:
        pending: What was drawn, and no step took.
        end_round: Called when a loader has no more, as in a job.
    """

    def __init__(self) -> None:
        self.pending = PendingData()
        self.end_round: Callable[[], None] = lambda: None
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

    def note_step(self, optimizer: str = "") -> DrawnData:
        """A step took what is behind its gradient."""
        drawn = self.pending.take(optimizer)
        for taken in drawn.ranges:
            epoch = self._epochs.get(taken.epoch)
            if epoch is not None:
                epoch.stepped.add(taken.start)
        self.pending.unreported.take()  # to nobody
        return drawn


class LocalLoader(PreparedLoader):
    """A `DataLoader` that notes what it hands out, and which steps took it.

    Its batches, and the random numbers that are drawn for them, are those of the loader
    that was prepared. All other attributes are that loader's.
    """

    def __init__(
        self, loader: DataLoader[Any], draws: LocalDraws, *, name: str = "loader"
    ) -> None:
        self._draws = draws
        self._name = name
        self._epoch = 0
        self._report: EpochReport | None = None
        self._ended: tuple[int, EpochDraws] | None = None
        self._feed = _NotingSampler(loader)
        self._fetcher: DataLoader[Any] | None = None
        self._loader = loader

    def __len__(self) -> int:
        """Batches of an epoch."""
        return len(self._loader)

    @property
    def batch_count(self) -> int:
        """Batches of an epoch: there are no other workers."""
        return len(self._loader)

    @property
    def report(self) -> EpochReport | None:
        """What became of the samples of the newest epoch that was iterated to its end.

        As of that end, or of the step on the last batch where a script draws ahead;
        `None` before the first.
        """
        if self._ended is not None and not self._draws.pending.has_ahead(self._name):
            (number, epoch), self._ended = self._ended, None
            batch_sampler = self._loader.batch_sampler
            self._report = epoch.report(
                self._name,
                number,
                is_by_batch=type(batch_sampler) is not BatchSampler,
                left_out=_left_out(batch_sampler),
            )
        return self._report

    def set_epoch(self, epoch: int) -> None:
        """Names the epoch, from 0, also for a sampler that has a `set_epoch`."""
        self._epoch = epoch
        pass_epoch_on(self._loader, epoch)

    def __iter__(self) -> "_LocalIteration":
        epoch = self._epoch
        self._epoch += 1
        # Anew each time: what the script has set on its loader since counts.
        self._fetcher = noting(self._loader, self._feed, older=self._fetcher)
        # Begun at once, not with the first batch: so the plain loader draws its seeds.
        batches = iter(self._fetcher)
        return _LocalIteration(self, epoch, batches, self._feed.sizes)

    def _end(self, number: int, epoch: EpochDraws) -> None:
        self._draws.pending.end(self._name)
        if not self._draws.pending.has_ahead(self._name):
            self._draws.end_round()
        self._report, self._ended = None, (number, epoch)
        _ = self.report  # as of now, if nothing is to come


class _LocalIteration:
    """One iteration over an epoch."""

    def __init__(
        self,
        loader: LocalLoader,
        number: int,
        batches: Iterator[Any],
        sizes: deque[int],
    ) -> None:
        self._loader = loader
        self._number = number
        self._batches = batches
        self._sizes = sizes
        self._epoch = loader._draws.begin()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:  # noqa: ANN401, a batch
        try:
            batch = next(self._batches)
        except StopIteration:
            self._loader._end(self._number, self._epoch)
            raise
        loader, size = self._loader, self._sizes.popleft()
        loader._draws.draw(loader._name, self._epoch, size, batch)
        return batch


class _NotingSampler:
    """The user's sampler, or batch sampler; notes how much each batch is.

    Attributes:
        sizes: Of the batches that the newest iteration has drawn and not handed out.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        batch_sampler: Any = loader.batch_sampler
        self._inner: Any = loader.sampler if batch_sampler is None else batch_sampler
        self.sizes: deque[int] = deque()

    def __len__(self) -> int:
        return len(self._inner)

    def __iter__(self) -> Iterator[Any]:
        self.sizes = deque()
        # The user's is begun here and not with its first batch, as without this one.
        return _noted(iter(self._inner), self.sizes)


def _noted(batches: Iterable[Any], sizes: deque[int]) -> Iterator[Any]:
    for batch in batches:
        sizes.append(len(batch) if isinstance(batch, Sized) else 1)
        yield batch


def _differ(sizes: list[int]) -> bool:
    """Whether batches differ in size, but for a last one that is smaller."""
    first = sizes[0] if sizes else 0
    return any(size != first for size in sizes[:-1]) or sizes[-1:] > [first]


def _left_out(batch_sampler: object) -> int:
    """Samples of a last batch that is dropped."""
    if type(batch_sampler) is not BatchSampler or not batch_sampler.drop_last:
        return 0
    sampler = batch_sampler.sampler
    count = len(sampler) if isinstance(sampler, Sized) else 0
    return count % batch_sampler.batch_size


def local_loader(loader: DataLoader[Any], draws: LocalDraws, *, name: str) -> Any:  # noqa: ANN401
    """What `prepare` returns for a loader where there is no job.

    A loader that has no report in a job, or would be refused there, stays as it is,
    with the names that a script may use of one that a job leases.
    """
    has_own_iteration = type(loader).__iter__ is not DataLoader.__iter__
    if not (has_own_iteration or is_stream(loader) or is_split_by_user(loader)):
        return LocalLoader(loader, draws, name=name)

    def set_epoch(epoch: int) -> None:
        pass_epoch_on(loader, epoch)

    if not hasattr(loader, "set_epoch"):
        loader.set_epoch = set_epoch
    if not hasattr(loader, "report"):
        loader.report = None
    return loader
