"""The data ledger and the splits: what changes is kept, and who has no data waits."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from psserver.coordinator.core.coordinator import CoordinatorCore
from psserver.coordinator.core.coordinator_effects import Persist
from psserver.coordinator.core.data.epoch_ledger import EpochLedger
from psserver.coordinator.core.data.ledger import LedgerMemento
from psserver.coordinator.core.data.split_book import SplitBook
from psserver.coordinator.core.roster import WorkerEntry
from psserver.edge.changes import Changes
from psserver.edge.monotonic import now_ms
from pswire.leased_data import (
    DataRange,
    DataReport,
    EpochReport,
    EpochShape,
    Origin,
    RecordedSplit,
)
from pswire.reasons import ErrorReason, Refusal

if TYPE_CHECKING:
    from pswire.membership import WorkerKey

log = logging.getLogger("psserver.coordinator")


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

    Only what changes is written: each write is a wait for the disk. What can't be
    written is undone, and refused with `STATE_NOT_WRITTEN`.

    Attributes:
        splits: Splits of data that were recorded.
        waiting: Who waits for others at the end of an epoch.
    """

    def __init__(
        self,
        core: CoordinatorCore,
        changes: Changes,
        keep: Callable[[Persist, Callable[[], None]], None],
        splits: SplitBook,
    ) -> None:
        self._core = core
        self._changes = changes
        self._keep = keep
        self.splits = splits
        self.waiting: dict[WorkerKey, DataWait] = {}
        self.begin_again()

    def begin_again(self) -> None:
        """Goes on with the epochs that the job has now."""
        # Those whose end was not logged yet.
        self._open = [e for e in self._core.ledger.epochs() if not e.is_closed]

    def open_epoch(
        self,
        entry: WorkerEntry,
        loader: str,
        epoch: int,
        shape: EpochShape,
        origin: bytes,
        report: DataReport,
    ) -> Origin:
        """Opens an epoch for a worker; what its order is drawn from.

        Raises:
            Refusal: As the ledger does, `PRIVACY_BUDGET_SPENT` or `STATE_NOT_WRITTEN`;
                no state changed.
        """
        ledgers = self._core.ledger
        keys = {(loader, epoch), *report.epochs}
        before = ledgers.memento(ledgers.touched_by(entry.worker, loader, keys))
        known_count = len(ledgers.epochs())
        opened = ledgers.open_epoch(
            entry.worker,
            loader,
            epoch,
            shape,
            report,
            origin=origin,
        )
        new = ledgers.epochs()[known_count:]
        if new:
            self._refuse_overspent(before)
        self._write(before)
        self._open += new
        self.tell_ends()
        return opened

    def take_report(
        self,
        entry: WorkerEntry,
        loader: str,
        epoch: int,
        order_digest: int,
        report: DataReport,
    ) -> EpochLedger:
        """Takes a worker's report of its order and data; returns the epoch it draws.

        Raises:
            Refusal: As `register_order` does, or `STATE_NOT_WRITTEN`; no state changed.
        """
        ledgers = self._core.ledger
        keys = {(loader, epoch), *report.epochs}
        before = ledgers.memento(ledgers.known(sorted(keys)))
        ledger = ledgers.register_order(entry.worker, loader, epoch, order_digest)
        ledgers.take_report(entry.worker, report)
        self._write(before)
        self.tell_ends()
        return ledger

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
                what it took then would never come back; `PRIVACY_BUDGET_SPENT` or
                `STATE_NOT_WRITTEN`.
        """
        leased: list[DataRange] = []
        core = self._core

        def served() -> bool:
            core.check_present(entry)
            if core.progress.failure or ledger.is_closed:
                return True
            before = core.ledger.memento([ledger])
            participants = core.participants(ledger.loader)
            leased.extend(ledger.lease(entry.worker, participants, count_max))
            self._refuse_overspent(before)
            self._write(before)
            return bool(leased)

        if wait:
            self.waiting[entry.worker] = DataWait(ledger, now_ms())
            try:
                await self._changes.wait_until(served)
            finally:
                self.waiting.pop(entry.worker, None)
        else:
            served()
        self.tell_ends()
        return leased

    def record_split(self, split: RecordedSplit) -> RecordedSplit:
        """Records the first split of a name; returns what is recorded under it.

        Raises:
            Refusal: `MALFORMED_MESSAGE`, `LIMIT_EXCEEDED` or `STATE_NOT_WRITTEN`; no
                state changed.
        """
        recorded = self.splits.record(split)
        if recorded is split:
            self._keep(Persist(split=split), lambda: self.splits.forget(split.name))
            log.info(
                "worker %r has recorded split %r of %d items, digest %s",
                split.recorder,
                split.name[:64],
                split.item_count,
                split.digest[:12],
            )
        return recorded

    def _refuse_overspent(self, before: LedgerMemento) -> None:
        """Takes back what would have a sample take part more often than it may.

        Raises:
            Refusal: `PRIVACY_BUDGET_SPENT`; no state changed.
        """
        terms = self._core.model.terms
        privacy = terms.privacy if terms is not None else None
        if privacy is None:
            return
        count = self._core.ledger.participation_count
        if count <= privacy.participation_max:
            return
        before.put_back()
        spent_count = self._core.ledger.participation_count
        raise Refusal(
            ErrorReason.PRIVACY_BUDGET_SPENT,
            f"samples may have been part of up to {spent_count} pushes, which is "
            f"epsilon={privacy.epsilon_after(spent_count):.4g} at delta="
            f"{privacy.delta:g}, and of this data some would be part of {count}: the "
            f"job allows {privacy.participation_max}",
        )

    def _write(self, before: LedgerMemento) -> None:
        """Has what has changed since written, or undone."""
        changed = before.changed()
        if changed:
            self._keep(Persist(epochs=changed), before.put_back)

    def tell_ends(self) -> None:
        """Says of each epoch that is over what became of its data, once."""
        ended = [each for each in self._open if each.is_closed]
        if ended:
            self._open = [each for each in self._open if not each.is_closed]
        for ledger in ended:
            report = ledger.report
            level = logging.INFO if report.is_complete else logging.WARNING
            log.log(level, "%s", _report_text(report))


def _report_text(report: EpochReport) -> str:
    counts = {
        "seen once": report.seen_once,
        "seen more than once": report.seen_again,
        "torn": report.torn,
        "dropped": report.dropped,
        "skipped": report.skipped,
        "never seen": report.never,
        "left out with drop_last": report.left_out,
    }
    parts = [f"{count} {name}" for name, count in counts.items() if count]
    what = ", ".join(parts) or "none was to be dealt"
    return (
        f"epoch {report.epoch} of {report.loader[:64]!r} is over: of "
        f"{report.count} positions {what}"
    )
