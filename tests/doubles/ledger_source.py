"""A worker's connection as its loaders see it, over the coordinator's real ledger."""

import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING

from psserver.coordinator.core.data.epoch_ledger import EpochLedger
from psserver.coordinator.core.data.ledger import DataLedger
from pswire.leased_data import DataRange, DataReport
from pswire.membership import WorkerKey
from psworker.data import Lease, LeaseRequest
from psworker.data.pending import PendingData
from psworker.data.source import part_in_rounds
from psworker.errors import EvictedError
from psworker.event_loop import LoopFuture
from psworker.transport.values import DrawnData, EpochRequest
from psworker.work_log import WorkLog

if TYPE_CHECKING:
    from pswire.leased_data import Origin


class LedgerJob:
    """The coordinator's side: one ledger, and requests that wait for it."""

    def __init__(
        self, worker_count: int, *, in_rounds: bool = False, job_seed: int = 0
    ) -> None:
        self.ledger = DataLedger(job_seed)
        self.keys = [WorkerKey(f"w{index}", 1) for index in range(worker_count)]
        self.in_rounds = in_rounds
        self.lock = threading.RLock()
        self.waiting: list[tuple[WorkerKey, LeaseRequest, LoopFuture[Lease]]] = []

    def lease(self, key: WorkerKey, request: LeaseRequest) -> "LoopFuture[Lease]":
        with self.lock:
            book = self.ledger.register_order(
                key, request.loader, request.epoch, request.order_digest
            )
            self.take_report(key, request.report)
            participants = tuple(self.keys) if self.in_rounds else ()
            ranges = book.lease(key, participants, request.batch_count_max)
            future: LoopFuture[Lease] = LoopFuture()
            if request.wait and not ranges and not book.is_closed:
                self.waiting.append((key, request, future))
            else:
                future.set_result(_lease(ranges, book))
            self.retry()
            return future

    def take_report(self, key: WorkerKey, report: DataReport) -> None:
        self.ledger.take_report(key, report)

    def retry(self) -> None:
        with self.lock:
            for key, request, future in list(self.waiting):
                book = self.ledger.register_order(
                    key, request.loader, request.epoch, request.order_digest
                )
                ranges = book.lease(key, (), request.batch_count_max)
                if ranges or book.is_closed:
                    self.waiting.remove((key, request, future))
                    future.set_result(_lease(ranges, book))


def _lease(ranges: list[DataRange], book: EpochLedger) -> Lease:
    told = tuple(DataRange(*each) for each in ranges)
    return Lease(told, book.is_closed, book.report if book.is_closed else None)


class LedgerSource:
    """One worker's connection. Clocks wait for it when a test says so."""

    def __init__(self, job: LedgerJob, index: int) -> None:
        self.job = job
        self.key = job.keys[index]
        self.pending = PendingData()
        self.work = WorkLog()
        self.requests: list[LeaseRequest] = []
        self.entered_again: list[int] = []
        self.contribution: LoopFuture[None] = LoopFuture()
        self.empty_push_count = 0
        self.pushed_nothing = threading.Event()
        self.is_broken = False
        self.is_lost = False
        self.rejoin_count = 0
        self.sharer_count = 0
        self.worker_count = len(job.keys)
        self.rank = index
        self.has_gradient = False

    def evict(self) -> None:
        """The others get what the worker holds, and it does not know yet."""
        self.is_lost = True
        self.job.ledger.retire(self.key)
        self.job.retry()

    def note_draw(self, loader: str, epoch: int) -> None:
        """Nobody registers state here."""

    def settle(self) -> None:
        """No step is ever under way here."""

    def rejoin(self, rejoin_count: int) -> None:
        assert rejoin_count == self.rejoin_count, "nothing else joins again"
        self.is_lost = False
        self.rejoin_count += 1
        self.key = WorkerKey(self.key.worker_id, self.key.incarnation + 1)
        self.pending.start_over()

    def enter_again(self, loader: str, epoch: int) -> None:
        """It has no schedulers to look after."""
        self.entered_again.append(epoch)

    def open_before(self, loader: str, epoch: int) -> Iterable[int]:
        return range(self.job.ledger.first_open(loader), epoch)

    def dealt_count(self, batch_count: int) -> int:
        place = self.rank if self.job.in_rounds else 0
        return part_in_rounds(batch_count, place, self.worker_count)

    def open_epoch(self, request: EpochRequest) -> "LoopFuture[Origin]":
        future: LoopFuture[Origin] = LoopFuture()
        self.job.take_report(self.key, request.report)
        future.set_result(
            self.job.ledger.open_epoch(
                self.key,
                request.loader,
                request.epoch,
                request.shape,
                origin=request.origin,
            )
        )
        self.job.retry()
        return future

    def lease_data(self, request: LeaseRequest) -> "LoopFuture[Lease]":
        self.requests.append(request)
        if self.is_broken:
            broken: LoopFuture[Lease] = LoopFuture()
            broken.set_exception(ConnectionError("cut"))
            return broken
        if self.is_lost:
            lost: LoopFuture[Lease] = LoopFuture()
            lost.set_exception(EvictedError("evicted"))
            return lost
        return self.job.lease(self.key, request)

    def await_contribution(self) -> "LoopFuture[None]":
        return self.contribution

    def holders(self) -> str:
        return ""

    def end_round(self) -> None:
        """It takes no local steps."""

    def push_nothing(self) -> None:
        self.empty_push_count += 1
        self.contribution = LoopFuture()
        self.pushed_nothing.set()

    def step(self) -> DrawnData:
        """A push that is acknowledged at once."""
        drawn = self.pending.take()
        self.pending.unreported.note(drawn.ranges, is_dropped=False)
        return drawn
