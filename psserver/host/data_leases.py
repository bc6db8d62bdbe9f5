"""The data ledger at work: what changes is kept, and who has no data waits."""

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from psserver.core.coordinator import CoordinatorCore
from psserver.core.epoch_account import EpochAccount
from psserver.core.epoch_ledger import EpochLedger, EpochShape, Origin
from psserver.core.push import DataRange
from psserver.core.roster import WorkerEntry
from psserver.host.changes import Changes
from psserver.host.monotonic import now_ms
from psserver.storage.job_store import JobStore

if TYPE_CHECKING:
    from psserver.core.record import WorkerKey

log = logging.getLogger("psserver.coordinator")


@dataclass(frozen=True, slots=True, kw_only=True)
class DataReport:
    """What became of data that a worker had, since its last report.

    Attributes:
        consumed: Ranges whose pushes were acknowledged.
        dropped: Ranges whose pushes were thrown away.
        skipped: Ranges that were drawn and not pushed.
    """

    consumed: tuple[DataRange, ...] = ()
    dropped: tuple[DataRange, ...] = ()
    skipped: tuple[DataRange, ...] = ()

    @property
    def epochs(self) -> set[tuple[str, int]]:
        """Loaders and epochs that it is about."""
        pieces = (*self.consumed, *self.dropped, *self.skipped)
        return {(piece.loader, piece.epoch) for piece in pieces}


@dataclass(frozen=True, slots=True)
class DataWait:
    """A worker without data, at the end of an epoch of which others have the rest.

    Attributes:
        ledger: The epoch.
        since_ms: When it began to wait.
    """

    ledger: EpochLedger
    since_ms: int


class DataLeases:
    """Leases of all epochs.

    Only what changes is written: each write is a wait for the disk.

    Args:
        core: The job's state.
        changes: Notified whenever it may have changed.
        store: The job's file.

    Attributes:
        waiting: Who waits for others at the end of an epoch.
    """

    def __init__(
        self, core: CoordinatorCore, changes: Changes, store: JobStore
    ) -> None:
        self._core = core
        self._changes = changes
        self._store = store
        self.waiting: dict[WorkerKey, DataWait] = {}
        # Epochs whose end was not told yet.
        self._open = [each for each in core.ledger.epochs() if not each.is_closed]

    def open_epoch(
        self,
        entry: WorkerEntry,
        loader: str,
        epoch: int,
        shape: EpochShape,
        origin: bytes,
        report: DataReport,
    ) -> Origin:
        """Opens an epoch for a worker; what its order is drawn from."""
        ledgers = self._core.ledger
        given_back = [
            each for each in ledgers.epochs() if each.is_dealt_to(entry.worker)
        ]
        known_count = len(ledgers.epochs())
        opened = ledgers.open_epoch(
            entry.worker,
            loader,
            epoch,
            shape,
            report.consumed,
            report.dropped,
            report.skipped,
            origin=origin,
        )
        self._open += ledgers.epochs()[known_count:]
        self._keep(
            {
                (loader, epoch),
                *report.epochs,
                *((each.loader, each.epoch) for each in given_back),
            }
        )
        self._changes.notify()
        return opened

    def take_report(self, entry: WorkerEntry, report: DataReport) -> None:
        """Takes a worker's report of its data."""
        self._core.ledger.consume(entry.worker, report.consumed)
        self._core.ledger.drop(entry.worker, report.dropped)
        self._core.ledger.skip(entry.worker, report.skipped)
        self.keep(report)
        self._changes.notify()

    def keep(self, report: DataReport) -> None:
        """Makes durable what a report has changed."""
        self._keep(report.epochs)

    async def lease(
        self,
        entry: WorkerEntry,
        ledger: EpochLedger,
        *,
        count_max: int,
        wait: bool,
    ) -> list[DataRange]:
        """Leases batches, waiting until there are some or the epoch is closed.

        Raises:
            Refusal: `WORKER_INCARNATION_STALE` when the worker is gone meanwhile:
                what it took then would never come back.
        """
        leased: list[DataRange] = []
        core = self._core

        def served() -> bool:
            core.check_present(entry)
            if core.failure or ledger.is_closed:
                return True
            participants = core.participants(ledger.loader)
            leased.extend(ledger.lease(entry.worker, participants, count_max))
            return bool(leased)

        if wait:
            self.waiting[entry.worker] = DataWait(ledger, now_ms())
            try:
                await self._changes.wait_until(served)
            finally:
                self.waiting.pop(entry.worker, None)
        else:
            served()
        self._store.save_epoch(ledger)
        self._tell_ends()
        self._changes.notify()
        return leased

    def _keep(self, keys: set[tuple[str, int]]) -> None:
        for ledger in self._core.ledger.known(sorted(keys)):
            self._store.save_epoch(ledger)
        self._tell_ends()

    def _tell_ends(self) -> None:
        """Says of each epoch that is over what became of its data, once."""
        ended = [each for each in self._open if each.is_closed]
        if ended:
            self._open = [each for each in self._open if not each.is_closed]
        for ledger in ended:
            account = ledger.account
            level = logging.INFO if account.is_plain else logging.WARNING
            log.log(level, "%s", _account_text(account))


def _account_text(account: EpochAccount) -> str:
    counts = {
        "seen once": account.seen_once_count,
        "seen more than once": account.seen_again_count,
        "torn": account.torn_count,
        "dropped": account.dropped_count,
        "skipped": account.skipped_count,
        "never seen": account.never_count,
        "left out with drop_last": account.left_out_count,
    }
    parts = [f"{count} {name}" for name, count in counts.items() if count]
    what = ", ".join(parts) or "none was to be dealt"
    return (
        f"epoch {account.epoch} of {account.loader[:64]!r} is over: of "
        f"{account.position_count} positions {what}"
    )
