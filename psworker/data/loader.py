"""Loaders over leased data: the same iteration, shared between all workers."""

from collections import deque
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader

from psworker.data.leases import BATCH_COUNT_AHEAD, EpochLeases
from psworker.data.missed_epochs import MissedEpochs
from psworker.data.order import (
    OrderSource,
    Positions,
    is_split_by_user,
    order_digest,
)
from psworker.data.source import DataSource, SampleCount
from psworker.errors import EvictedError

if TYPE_CHECKING:
    from psworker.pending import DataRange


class LeasedLoader:
    """A `DataLoader` whose batches are shared out between the workers of a job.

    Together the workers see every sample of an epoch once. Which worker gets which
    batch is decided while the epoch goes on: fast workers get more. Iterating opens
    the next epoch, or the one named with `set_epoch`; an epoch that the other workers
    have finished already yields nothing. All other attributes are those of the loader
    that was prepared.

    Prepare the loaders you train on. Iterate a loader for evaluation as it is:
    every batch drawn here counts towards the weight of the next `optimizer.step()`.
    """

    def __init__(
        self, loader: DataLoader[Any], source: DataSource, *, name: str = "loader"
    ) -> None:
        """Wraps a map-style loader.

        Raises:
            LoaderRefused: It can't be leased; the text says why and what to do.
        """
        self._loader = loader
        self._source = source
        self._name = name
        self._missed = MissedEpochs(name)
        self._orders = OrderSource(loader)
        self._epoch = 0
        self._feed = _IndexFeed()
        self._fetcher: DataLoader[Any] | None = None

    def __len__(self) -> int:
        """Batches of a whole epoch, over all workers: the most that can come here."""
        return self._orders.shape.batch_count

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401, the wrapped one's
        if name == "_loader":  # Not yet set while being unpickled or copied.
            raise AttributeError(name)
        return getattr(self._loader, name)

    def set_epoch(self, epoch: int) -> None:
        """Names the epoch, from 0, that the next iteration opens."""
        if epoch < 0:
            raise ValueError(f"epoch must be at least 0, not {epoch}")
        self._epoch = epoch

    def tell_missed(self) -> None:
        """Warns if the script is done and got no batch of what it iterated."""
        self._missed.end()

    def __iter__(self) -> Generator[Any, None, None]:
        epoch = self._epoch
        self._epoch += 1
        return self._batches(epoch)

    def _batches(self, epoch: int) -> Generator[Any, None, None]:
        batch_count = 0
        rejoin_count = -1
        try:
            # Once, and once more for each time that this worker has joined again.
            while rejoin_count != self._source.rejoin_count:
                rejoin_count = self._source.rejoin_count
                try:
                    for batch in self._batches_held(epoch):
                        batch_count += 1
                        self._missed.note_batch(epoch)
                        yield batch
                except EvictedError:
                    if rejoin_count == self._source.rejoin_count:
                        self._source.rejoin()
            if not batch_count and self._orders.shape.batch_count:
                self._missed.add(epoch)
        finally:
            if not self._loader.persistent_workers:
                self._fetcher = None

    def _batches_held(self, epoch: int) -> Iterator[Any]:
        """Batches of an epoch for as long as this start of the worker may have any."""
        order = self._orders.draw(self._open(epoch), epoch)
        leases = EpochLeases(
            self._source,
            loader=self._name,
            epoch=epoch,
            shape=self._orders.shape,
            order_digest=order_digest(order),
            batch_count_ahead=BATCH_COUNT_AHEAD + self._prefetch_count,
        )
        self._feed.begin(order, leases)
        try:
            yield from self._fetched(leases)
        finally:
            leases.close()

    def _open(self, epoch: int) -> int:
        report = self._source.pending.take_report()
        try:
            return self._source.open_epoch(
                self._name, epoch, self._orders.shape, report
            ).result()
        except BaseException:
            self._source.pending.return_report(report)
            raise

    def _fetched(self, leases: EpochLeases) -> Iterator[Any]:
        """Batches as they are fetched, each noted as drawn when it's handed out.

        Ends early when the worker has joined again meanwhile: the ranges went back.
        """
        iterator: Iterator[Any] | None = None
        rejoin_count = self._source.rejoin_count
        while rejoin_count == self._source.rejoin_count:
            # With nothing fetched or being fetched, waiting keeps nothing from anyone.
            if not self._feed.fetching and not leases.wait():
                return
            if iterator is None:
                iterator = iter(self._fetch_loader())
            try:
                batch = next(iterator)
            except StopIteration:
                # It ran dry and there is more now: fill its pipeline anew.
                iterator = None
                continue
            data_range = self._feed.fetching.popleft()
            self._source.pending.draw(data_range.stop - data_range.start, data_range)
            yield batch

    @property
    def _prefetch_count(self) -> int:
        return self._loader.num_workers * (self._loader.prefetch_factor or 0)

    def _fetch_loader(self) -> DataLoader[Any]:
        if self._fetcher is None:
            user = self._loader
            self._fetcher = DataLoader(
                user.dataset,
                batch_sampler=self._feed,
                num_workers=user.num_workers,
                collate_fn=user.collate_fn,
                pin_memory=user.pin_memory,
                timeout=user.timeout,
                worker_init_fn=user.worker_init_fn,
                multiprocessing_context=user.multiprocessing_context,
                generator=user.generator,
                prefetch_factor=user.prefetch_factor,
                # Its pipeline may run dry and start again within one epoch.
                persistent_workers=user.num_workers > 0,
            )
        return self._fetcher


class _IndexFeed:
    """A batch sampler that yields the indices of leases as they come.

    An iterator whose end isn't final: a fetching loader asks again for each batch it
    hands out, so the pipeline goes on when there are leases again.
    """

    def __init__(self) -> None:
        self.fetching: deque[DataRange] = deque()
        self._order: Positions | None = None
        self._leases: EpochLeases | None = None

    def begin(self, order: Positions, leases: EpochLeases) -> None:
        """Starts an epoch; what was still being fetched is given up."""
        self.fetching.clear()
        self._order = order
        self._leases = leases

    def __iter__(self) -> "_IndexFeed":
        return self

    def __next__(self) -> list[int]:
        assert self._leases is not None
        assert self._order is not None
        data_range = self._leases.take()
        if data_range is None:
            raise StopIteration
        self.fetching.append(data_range)
        indices: list[int] = self._order[data_range.start : data_range.stop].tolist()
        return indices


class CountedLoader:
    """A loader that the user has split between workers, with its samples counted.

    Its batches are its own; only their sizes are noted, as the weight of the next
    `optimizer.step()`.
    """

    def __init__(self, loader: DataLoader[Any], source: SampleCount) -> None:
        self._loader = loader
        self._source = source

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401, the wrapped one's
        if name == "_loader":
            raise AttributeError(name)
        return getattr(self._loader, name)

    def set_epoch(self, epoch: int) -> None:
        """Passes the epoch on to the sampler."""
        sampler: Any = self._loader.sampler
        sampler.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        sampler: Any = self._loader.sampler
        batch_size = self._loader.batch_size
        assert batch_size is not None
        left = len(sampler)
        for batch in self._loader:
            sample_count = min(batch_size, left)
            left -= sample_count
            self._source.pending.draw(sample_count)
            yield batch


def prepare_loader(
    loader: DataLoader[Any], source: DataSource, *, name: str = "loader"
) -> LeasedLoader | CountedLoader:
    """The loader that `prepare` returns for the user's.

    Raises:
        LoaderRefused: It can't be leased; the text says why and what to do.
    """
    if is_split_by_user(loader) and loader.batch_size is not None:
        return CountedLoader(loader, source)
    return LeasedLoader(loader, source, name=name)
