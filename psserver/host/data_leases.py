"""The data ledger at work: what changes is kept, and who has no data waits."""

from psserver.core.coordinator import CoordinatorCore
from psserver.core.ledger import EpochLedger, EpochShape
from psserver.core.push import DataRange
from psserver.core.roster import WorkerEntry
from psserver.host.changes import Changes
from psserver.storage.job_store import JobStore


class DataLeases:
    """Leases of all epochs.

    Only what changes is written: each write is a wait for the disk.

    Args:
        core: The job's state.
        changes: Notified whenever it may have changed.
        store: The job's file.
    """

    def __init__(
        self, core: CoordinatorCore, changes: Changes, store: JobStore
    ) -> None:
        self._core = core
        self._changes = changes
        self._store = store

    def open_epoch(
        self, entry: WorkerEntry, loader: str, epoch: int, shape: EpochShape
    ) -> int:
        """Opens an epoch for a worker and returns its seed."""
        ledgers = self._core.ledger
        changed = {(loader, epoch)}
        changed.update(
            (ledger.loader, ledger.epoch)
            for ledger in ledgers.epochs()
            if ledger.loader == loader and ledger.has_of(entry.worker)
        )
        seed = ledgers.open_epoch(entry.worker, loader, epoch, shape)
        self._keep(changed)
        self._changes.notify()
        return seed

    def report(
        self,
        entry: WorkerEntry,
        consumed: tuple[DataRange, ...],
        dropped: tuple[DataRange, ...],
    ) -> None:
        """Takes a worker's report of its data.

        Args:
            entry: The worker.
            consumed: Ranges whose pushes were acknowledged.
            dropped: Ranges whose pushes were thrown away.
        """
        self._core.ledger.consume(entry.worker, consumed)
        self._core.ledger.drop(entry.worker, dropped)
        self.keep((*consumed, *dropped))
        self._changes.notify()

    def keep(self, ranges: tuple[DataRange, ...]) -> None:
        """Makes the epochs of these ranges durable."""
        self._keep({(piece.loader, piece.epoch) for piece in ranges})

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
            await self._changes.wait_until(served)
        else:
            served()
        self._store.save_epoch(ledger)
        self._changes.notify()
        return leased

    def _keep(self, keys: set[tuple[str, int]]) -> None:
        for ledger in self._core.ledger.epochs():
            if (ledger.loader, ledger.epoch) in keys:
                self._store.save_epoch(ledger)
