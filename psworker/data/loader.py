"""Loaders over leased data: the same iteration, shared between all workers."""

import contextlib
import inspect
import logging
import weakref
from collections import deque
from collections.abc import Generator, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

import torch
from torch.utils.data import DataLoader

from pswire.activity import Activity
from pswire.leased_data import EpochReport, Origin
from psworker.data.batch_tensors import BatchTensors
from psworker.data.counted import CountedLoader, is_split_by_user, is_stream
from psworker.data.leases import BATCH_COUNT_AHEAD, EpochLeases
from psworker.data.missed_epochs import MissedEpochs
from psworker.data.order import EpochDraw, EpochOrder, OrderSource
from psworker.data.source import DataSource
from psworker.data.user_loader import (
    PreparedLoader,
    end_processes,
    fetching,
    refuse_own_iteration,
)
from psworker.errors import ConfigurationError, EvictedError
from psworker.left_behind import reduced
from psworker.tracebacks import at_entrance
from psworker.transport.values import EpochRequest

if TYPE_CHECKING:
    from pswire.leased_data import DataRange


logger: Final = logging.getLogger("psworker")


class LeasedLoader(PreparedLoader):
    """A `DataLoader` whose batches are shared out between the workers of a job.

    Together the workers see every sample of an epoch once. Which worker gets which
    batch is decided while the epoch goes on: fast workers get more. Iterating opens
    the next epoch, or the one named with `set_epoch`; an epoch that the other workers
    have finished already yields nothing. All other attributes are those of the loader
    that was prepared.

    Prepare the loaders you train on, and iterate a loader for evaluation as it is: here
    each worker gets a part of the data. Batches that a backward pass has reached weigh
    the next `optimizer.step()`; what is skipped or drawn ahead does not.

    Attributes:
        draws_once: Whether an order that has a sample twice is refused.
    """

    draws_once = False

    def __init__(
        self, loader: DataLoader[Any], source: DataSource, *, name: str = "loader"
    ) -> None:
        refuse_own_iteration(loader)
        self._source = source
        self._name = name
        self._missed = MissedEpochs(name)
        self._orders = OrderSource(loader)
        self._epoch = 0
        self._present_epoch = 0
        self._was_over = False
        # Rejoins after which all epochs before the newest one were looked through.
        self._caught_up_count = 0
        self._report: EpochReport | None = None
        self._feed = _IndexFeed()
        self._fetcher: DataLoader[Any] | None = None
        self._seeds = torch.Generator()
        self._newest: weakref.ref[_EpochIterator] | None = None
        # Where the newest iteration has ended before its epoch, and what waits for the
        # end of that when it is iterated.
        self._open_end: tuple[_OpenEnd, Generator[Any, None, None]] | None = None
        self._loader = loader

    def __len__(self) -> int:
        """Batches of an epoch that this worker gets, if the workers stay the same.

        Exact in BSP, where the last round may not reach the later ranks. Otherwise its
        equal part, rounded up: fast workers get more, and slow ones less.
        `batch_count` is that of all workers.
        """
        return self._source.dealt_count(self.batch_count)

    @property
    def batch_count(self) -> int:
        """Batches of a whole epoch, over all workers."""
        return self._orders.shape().batch_count

    @property
    def report(self) -> EpochReport | None:
        """What became of the samples of the newest epoch that was iterated to its end.

        As of that end, over all workers; `None` before the first. An epoch ends for
        all workers at once: after an iteration that was drawn ahead of the steps, this
        waits for the others, once all that was drawn is trained.
        """
        if self._open_end and not self._source.pending.has_ahead(self._name):
            (leases, unit), _ = self._open_end
            # The next iteration hands out what a lost worker has given back, and also
            # joins again if this worker is lost itself.
            with contextlib.suppress(EvictedError):
                leases.wait()
            self._note_report(leases, unit)
        return self._report

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        """Refused: what it hands out is counted for this process."""
        return reduced(
            self._name,
            "what it hands out is counted for this process; copy the DataLoader that "
            "was given to prepare()",
        )

    @property
    def epoch(self) -> int:
        """Epoch, from 0, that its newest iteration is of.

        Before the first one, the first epoch of the job that is not over.
        """
        return self._present_epoch

    def note_first_epoch(self, epoch: int) -> None:
        """The job has trained all epochs before this one."""
        self._present_epoch = epoch

    def set_epoch(self, epoch: int) -> None:
        """Names the epoch, from 0, that the next iteration opens."""
        if epoch < 0:
            raise ValueError(f"epoch must be at least 0, not {epoch}")
        self._epoch = epoch

    def tell_missed(self) -> None:
        """Warns if the script is done and got no batch of what it iterated."""
        self._missed.end()

    def __iter__(self) -> "_EpochIterator":
        older = self._newest() if self._newest is not None else None
        if older is not None:
            older.give_up()
        epoch = self._present_epoch = self._epoch
        self._epoch += 1
        self._seed_processes()
        made = _EpochIterator(self._name, epoch, self._batches(epoch), self._source)
        self._newest = weakref.ref(made)
        return made

    def _seed_processes(self) -> None:
        """Takes the random number that a plain loader takes for worker processes.

        Once an iteration, however often a pipeline is filled, which begins with the
        same number. Processes that persist have it from the first one.
        """
        if self._loader.persistent_workers and self._fetcher is not None:
            return
        generator = self._loader.generator or torch.default_generator
        self._seeds.set_state(generator.get_state())
        torch.empty((), dtype=torch.int64).random_(generator=generator)

    def _batches(self, epoch: int) -> Generator[Any, None, None]:
        """Batches of an epoch, after what is left of the one before.

        A script that draws ahead has batches in hand when there are no more. The
        iteration ends at once, since it steps with these only then, and the others wait
        for its steps. The next iteration waits for the end of the epoch, unless the
        script draws ahead from one epoch into the next.
        """
        end, self._open_end = self._open_end, None
        if end is not None and self._source.pending.has_ahead(self._name):
            end[1].close()
        elif end is not None:
            yield from end[1]
        batches = self._batches_to_end(epoch)
        try:
            for batch in batches:
                if isinstance(batch, _OpenEnd):
                    self._open_end = batch, batches
                    return
                yield batch
        finally:
            if self._open_end is None:
                batches.close()

    def _batches_to_end(self, epoch: int) -> Generator[Any, None, None]:
        batch_count = 0
        rejoin_count = -1
        is_done = False
        worker_count = self._source.worker_count
        draw = self._orders.begin(epoch)
        try:
            # Once, and once more for each time that this worker has joined again.
            while rejoin_count != self._source.rejoin_count:
                rejoin_count = self._source.rejoin_count
                try:
                    for batch in self._batches_due(epoch, draw, rejoin_count):
                        if isinstance(batch, _OpenEnd):
                            is_done = True
                            draw.end()
                            yield batch
                            continue
                        batch_count += 1
                        self._missed.note_batch(epoch)
                        yield batch
                except EvictedError:
                    if rejoin_count == self._source.rejoin_count:
                        self._source.rejoin(rejoin_count)
            is_done = True
            draw.end()
            if not batch_count and draw.shape.batch_count:
                self._missed.add(
                    epoch,
                    batch_count=draw.shape.batch_count,
                    worker_count=max(worker_count, self._source.worker_count),
                    was_over=self._was_over,
                )
        finally:
            if not is_done and not self._source.has_gradient:
                self._source.pending.skip(self._name)
            if not self._loader.persistent_workers:
                self._fetcher = None

    def _batches_due(
        self, epoch: int, draw: EpochDraw, rejoin_count: int
    ) -> Iterator[Any]:
        """Batches of an epoch, for as long as this start of the worker may have any.

        First what is left of those before, if the job has returned to a checkpoint that
        lies in one of them.
        """
        is_back = rejoin_count != self._caught_up_count
        before = self._source.open_before(self._name, epoch) if is_back else ()
        for each in (*before, epoch):
            if rejoin_count != self._source.rejoin_count:
                return
            self._present_epoch = each
            if is_back:
                self._source.enter_again(self._name, each)
            if each == epoch:
                self._caught_up_count = rejoin_count
                yield from self._batches_held(epoch, draw)
            else:
                again = self._orders.begin(each)
                yield from self._batches_held(each, again)
                again.end()

    def _batches_held(self, epoch: int, draw: EpochDraw) -> Iterator[Any]:
        """Batches of an epoch for as long as this start of the worker may have any."""
        order = draw.order(self._open(epoch, draw))
        if self.draws_once:
            order.refuse_repeated(len(self._loader.dataset))  # type: ignore[arg-type]
        leases = EpochLeases(
            self._source,
            loader=self._name,
            epoch=epoch,
            shape=draw.shape,
            order_digest=order.digest,
            batch_count_ahead=BATCH_COUNT_AHEAD
            + self._loader.num_workers * (self._loader.prefetch_factor or 0),
        )
        self._feed.begin(order, leases)
        try:
            yield from self._fetched(leases, order.unit)
        finally:
            leases.close()
            self._was_over = leases.was_over
            self._note_report(leases, order.unit)

    def _note_report(self, leases: EpochLeases, unit: str) -> None:
        report = leases.take_report()
        if report is not None:
            self._report = replace(report, unit=unit)
            _warn_unused(self._report)

    def _open(self, epoch: int, draw: EpochDraw) -> Origin:
        if not self._source.pending.is_used_elsewhere(self._name):
            self._source.settle()
        report = self._source.pending.take_last_report(self._name)
        try:
            request = EpochRequest(
                loader=self._name,
                epoch=epoch,
                shape=draw.shape,
                origin=draw.own,
                report=report,
            )
            opening = self._source.open_epoch(request)
            return self._source.work.idle(opening.result)
        except BaseException:
            self._source.pending.unreported.put_back(report)
            raise

    def _fetched(self, leases: EpochLeases, unit: str) -> Iterator[Any]:
        """Batches as they are fetched, each noted as drawn when it's handed out.

        Ends early when the worker has joined again meanwhile: the ranges went back.
        """
        iterator: Iterator[Any] | None = None
        is_open_end = False
        rejoin_count = self._source.rejoin_count
        while rejoin_count == self._source.rejoin_count:
            is_empty = not self._feed.fetching
            if is_empty and not is_open_end and leases.are_out:
                is_open_end = self._source.pending.has_ahead(self._name)
                if is_open_end:
                    self._source.pending.end(self._name)
                    yield _OpenEnd(leases, unit)
                    continue
            # With nothing fetched or being fetched, waiting keeps data from nobody.
            if not self._feed.fetching and not leases.wait():
                self._source.pending.end(self._name)
                return
            try:
                if iterator is None:
                    iterator = iter(self._fetch_loader())
                batch = next(iterator)
            except StopIteration:
                # It ran dry and there is more now: fill its pipeline anew.
                iterator = None
                continue
            except BaseException:
                # A pipeline that has failed can't go on, not even with the next epoch:
                # torch would wait for a worker process that has ended.
                self._fetcher = None
                end_processes(iterator)
                raise
            data_range, sample_count = self._feed.fetching.popleft()
            memory = BatchTensors(batch)
            self._source.pending.draw(sample_count, data_range, memory=memory)
            yield batch
            del batch  # not held while the next is fetched

    def _fetch_loader(self) -> DataLoader[Any]:
        if self._fetcher is None:
            self._fetcher = fetching(self._loader, self._feed, seeds=self._seeds)
        return self._fetcher


class _OpenEnd(NamedTuple):
    """In place of a batch: there are none but those in hand, and the epoch goes on.

    Attributes:
        leases: Of the epoch.
        unit: What its positions are, for people.
    """

    leases: EpochLeases
    unit: str


class _EpochIterator:
    """One iteration over an epoch; only the newest one of a loader goes on."""

    def __init__(
        self,
        loader: str,
        epoch: int,
        batches: Generator[Any, None, None],
        source: DataSource,
    ) -> None:
        self._source = source
        self._loader = loader
        self._epoch = epoch
        self._batches = batches
        self._end = ""

    def __iter__(self) -> Self:
        return self

    @at_entrance
    def __next__(self) -> Any:  # noqa: ANN401, a batch
        self._refuse_within("next(loader)")
        if self._end:
            raise ConfigurationError(
                f"this iteration of epoch {self._epoch} of {self._loader!r} is over: "
                f"{self._end}"
            )
        self._source.note_draw(self._loader, self._epoch)
        before = self._source.work.enter(Activity.LOADING)
        try:
            return next(self._batches)
        except StopIteration:
            raise
        except BaseException as error:
            self._end = (
                f"it was ended by {type(error).__name__}; begin a new one, which opens "
                "the next epoch"
            )
            raise
        finally:
            self._source.work.enter(before)

    def give_up(self) -> None:
        """Ends it for a newer iteration of the loader: its data goes to the others."""
        self._refuse_within("iter(loader)")
        self._batches.close()
        self._end = (
            "a newer one has begun, and a loader is iterated once at a time; prepare a "
            "second loader to draw from both"
        )

    def close(self) -> None:
        """Ends it: what was not drawn goes to the others."""
        self._batches.close()

    def _refuse_within(self, name: str) -> None:
        """Refuses a call while a batch is drawn, which is not lost by it."""
        if inspect.getgeneratorstate(self._batches) == inspect.GEN_RUNNING:
            raise ConfigurationError(
                f"{name} was called while a batch of {self._loader!r} is being drawn, "
                "as by a signal handler, a data set or another thread: nothing was "
                "done; prepare a second loader to draw from both, or set a flag in the "
                "handler and draw where the flag is seen"
            )


class _IndexFeed:
    """A batch sampler that yields the indices of leases as they come.

    An iterator whose end isn't final: a fetching loader asks again for each batch it
    hands out, so the pipeline goes on when there are leases again.

    Attributes:
        fetching: Ranges that were handed to the fetching loader, each with its number
            of samples, oldest first.
    """

    def __init__(self) -> None:
        self.fetching: deque[tuple[DataRange, int]] = deque()
        self._order: EpochOrder | None = None
        self._leases: EpochLeases | None = None

    def begin(self, order: EpochOrder, leases: EpochLeases) -> None:
        """Starts an epoch, and forgets what was still being fetched."""
        self.fetching.clear()
        self._order = order
        self._leases = leases

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> list[int] | int:
        assert self._leases is not None
        assert self._order is not None
        data_range = self._leases.take()
        if data_range is None:
            raise StopIteration
        indices = self._order.at(data_range.start, data_range.stop)
        self.fetching.append((data_range, len(indices)))
        return indices if self._order.is_batched else indices[0]


def prepare_loader(
    loader: DataLoader[Any], source: DataSource, *, name: str = "loader"
) -> LeasedLoader | CountedLoader:
    """The loader that `prepare` returns for the user's.

    Raises:
        LoaderRefused: It can't be leased; the text says why and what to do.
    """
    if is_split_by_user(loader) or is_stream(loader):
        return CountedLoader(loader, source, name=name)
    return LeasedLoader(loader, source, name=name)


def _warn_unused(report: EpochReport) -> None:
    """Warns of a loader that no step follows, as one for evaluation."""
    if report.count and report.skipped == report.count - report.left_out:
        logger.warning(
            "no step was behind any batch of %s in epoch %d, and this worker saw its "
            "share of them only; iterate loaders for evaluation without prepare()",
            report.loader,
            report.epoch,
        )
