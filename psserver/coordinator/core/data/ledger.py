"""All epochs of all loaders of a job; `epoch_ledger` has what each is."""

from collections.abc import Collection, Iterable
from typing import Final

from psserver.coordinator.core.data.epoch_ledger import EpochLedger, check_origin
from psserver.edge.fence_report import FenceReport, WorkerHolding
from pswire.leased_data import DataRange, DataReport, EpochShape, Origin
from pswire.membership import ClockChoice, Departure, WorkerKey
from pswire.reasons import ErrorReason, Refusal

Enrolments = tuple[tuple[str, tuple[WorkerKey, ...]], ...]
"""For each loader who leases data for it, to be kept."""

EPOCH_COUNT_MAX: Final = 1 << 16
"""Epochs of a job, over all its loaders. Each is kept, and written down."""

NOTHING_TO_REPORT: Final = DataReport()


class DataLedger:
    """All epochs of all loaders of a job.

    Args:
        job_seed: From which the seed of each epoch follows; 0 for none: the worker
            that opens an epoch says what its order is drawn from.

    Attributes:
        participation_count_before: How often a sample may have been part of pushes of
            which no epoch here tells, at most: the job has returned from them.
    """

    def __init__(self, job_seed: int) -> None:
        self._job_seed = job_seed
        self.participation_count_before = 0
        self._epochs: dict[tuple[str, int], EpochLedger] = {}
        self._participants: dict[str, set[WorkerKey]] = {}

    def seed_of(self, loader: str, epoch: int) -> int:
        """Seed of an epoch, in [0, 2^63): the same for every worker, ever.

        The names are mixed by FNV-1a, which is enough to tell epochs apart and the
        same on every host and Python.
        """
        mixed = 0xCBF29CE484222325 ^ self._job_seed
        for byte in f"{loader}\0{epoch}".encode():
            mixed = ((mixed ^ byte) * 0x100000001B3) % (1 << 64)
        return mixed >> 1

    @property
    def newest_batch_count(self) -> int | None:
        """Batches of the epoch that was opened last; None before the first."""
        newest = next(reversed(self._epochs.values()), None)
        return None if newest is None else newest.shape.batch_count

    def enroll(self, worker: WorkerKey, loaders: tuple[str, ...]) -> None:
        """A member will lease data for these loaders."""
        for loader in loaders:
            self._participants.setdefault(loader, set()).add(worker)

    def open_epoch(
        self,
        worker: WorkerKey,
        loader: str,
        epoch: int,
        shape: EpochShape,
        report: DataReport = NOTHING_TO_REPORT,
        *,
        origin: bytes = b"",
    ) -> Origin:
        """Opens an epoch and returns what all workers draw its order from.

        Of an epoch that is over nobody draws any more, and its origin is not kept: a
        worker that comes late goes through it with its own.

        What the worker holds of the loader's earlier epochs and does not report is
        dealt again. A push that is under way may be of
        the epoch before, and of none that is older.

        Raises:
            Refusal: `MALFORMED_MESSAGE`, `LIMIT_EXCEEDED`, or `DATA_ORDER_MISMATCH`
                when the epoch is open with another shape; no state changed.
        """
        shape.validate()
        check_origin(origin)
        known = self._epochs.get((loader, epoch))
        if known is not None and known.shape != shape:
            newest = max(number for name, number in self._epochs if name == loader)
            raise _other_shape(worker, known, shape, next_epoch=newest + 1)
        if known is None:
            self._check_room(loader, epoch)
            known = EpochLedger(loader, epoch, shape)
            known.origin = b"" if self._job_seed else origin
            self._epochs[loader, epoch] = known
        self.enroll(worker, (loader,))
        self.take_report(worker, report)
        earlier = [n for name, n in self._epochs if name == loader and n < epoch]
        for number in sorted(earlier):
            self._epochs[loader, number].give_back(worker)
            if self._epochs[loader, number].is_closed:
                self._epochs[loader, number].origin = b""
        for number in sorted(earlier)[:-1]:
            self._epochs[loader, number].pass_by(worker)
        if self._job_seed:
            return self.seed_of(loader, epoch)
        return origin if known.is_closed else known.origin

    def register_order(
        self, worker: WorkerKey, loader: str, epoch: int, order_digest: int
    ) -> EpochLedger:
        """Checks the worker's order against the first one registered.

        In an epoch that is over no order counts any more.

        Who asks takes part in the rounds from here on, if it did not before.

        Raises:
            Refusal: `NOT_STARTED` for an epoch nobody has opened, or
                `DATA_ORDER_MISMATCH`; no state changed.
        """
        ledger = self._epochs.get((loader, epoch))
        if ledger is None:
            raise Refusal(
                ErrorReason.NOT_STARTED,
                f"epoch {epoch} of {loader[:64]!r} is not open",
            )
        if ledger.order_digest is None:
            ledger.order_digest = order_digest
            ledger.registrant = worker
        elif ledger.order_digest != order_digest and not ledger.is_closed:
            raise Refusal(
                ErrorReason.DATA_ORDER_MISMATCH,
                f"{worker} draws epoch {epoch} of {loader[:64]!r} in another order "
                f"than {ledger.registrant}",
            )
        self.enroll(worker, (loader,))
        return ledger

    def copy(self) -> "DataLedger":
        """The same state, which does not change with this one."""
        copied = DataLedger(self._job_seed)
        copied.participation_count_before = self.participation_count_before
        copied._epochs = {key: each.copy() for key, each in self._epochs.items()}
        copied._participants = {
            loader: set(workers) for loader, workers in self._participants.items()
        }
        return copied

    def memento(self, epochs: Iterable[EpochLedger]) -> "LedgerMemento":
        """The ledger as it is now, to be put back.

        Args:
            epochs: Those that may change; of the others only which there are.
        """
        return LedgerMemento(self, epochs)

    def touched_by(
        self, worker: WorkerKey, loader: str, keys: Iterable[tuple[str, int]]
    ) -> tuple[EpochLedger, ...]:
        """Epochs that may change when a worker opens one of a loader."""
        named = set(keys)
        return tuple(
            each
            for key, each in self._epochs.items()
            if key in named
            or each.has_of(worker)
            or (each.loader == loader and each.origin)
        )

    @property
    def participation_count(self) -> int:
        """How often a sample may have been part of a push of the job, at most.

        Samples of two loaders may be the same ones.
        """
        return self.participation_count_before + participations_of(
            self._epochs.values()
        )

    def first_open(self, loader: str) -> int:
        """The first epoch of a loader that is not over, be it that nobody opened it."""
        numbers = [n for name, n in self._epochs if name == loader]
        still_open = (n for n in numbers if not self._epochs[loader, n].is_closed)
        return min(still_open, default=max(numbers, default=-1) + 1)

    def is_new(self, loader: str) -> bool:
        """Whether nothing of the first epoch that is not over was trained yet."""
        ledger = self._epochs.get((loader, self.first_open(loader)))
        return ledger is None or ledger.report.never == ledger.shape.usable_count

    def epochs(self) -> tuple[EpochLedger, ...]:
        return tuple(self._epochs.values())

    def trained_text(self) -> str:
        """Which epochs are over, in words; empty for none."""
        over: dict[str, list[int]] = {}
        for loader, epoch in sorted(self._epochs):
            if self._epochs[loader, epoch].is_closed:
                over.setdefault(loader, []).append(epoch)
        return ", ".join(
            f"epoch {epochs[0]} of {loader[:64]!r} is trained"
            if len(epochs) == 1
            else f"{len(epochs)} epochs of {loader[:64]!r} are trained, up to epoch "
            f"{epochs[-1]}"
            for loader, epochs in over.items()
        )

    def newest(self, count: int) -> tuple[EpochLedger, ...]:
        """Those that were opened last, the newest first."""
        return tuple(self._epochs.values())[: -count - 1 : -1]

    def known(self, keys: Iterable[tuple[str, int]]) -> tuple[EpochLedger, ...]:
        """Of these loaders and epochs those that are open, in the order of the keys."""
        return tuple(self._epochs[key] for key in keys if key in self._epochs)

    def enrolments(self) -> Enrolments:
        """For each loader who leases data for it, in a fixed order, to be kept."""
        return tuple(
            (loader, tuple(sorted(workers)))
            for loader, workers in sorted(self._participants.items())
            if workers
        )

    def recall(self) -> None:
        """Data is dealt on demand from now on."""
        for each in self._epochs.values():
            each.recall()

    def restore(
        self,
        epochs: tuple[EpochLedger, ...],
        members: frozenset[WorkerKey],
        enrolments: Enrolments = (),
        participation_count_before: int = 0,
    ) -> None:
        """Goes on from durable state after a restart.

        Args:
            epochs: As they were kept.
            members: Workers of the newest record. What others hold is dealt again:
                the record that ended them was kept before this could be.
            enrolments: As they were kept.
            participation_count_before: As it was kept.
        """
        self.participation_count_before = participation_count_before
        for loader, workers in enrolments:
            for worker in members.intersection(workers):
                self.enroll(worker, (loader,))
        self._epochs = {(e.loader, e.epoch): e for e in epochs}
        for ledger in epochs:
            for worker in {*ledger.queues, *ledger.held}:
                if worker in members:
                    self.enroll(worker, (ledger.loader,))
            for worker in ledger.workers - members:
                ledger.retire(worker)

    def return_to(
        self, epochs: Iterable[EpochLedger], participation_count_before: int = 0
    ) -> None:
        """Goes on with epochs as they were; nobody leases data any more."""
        self.participation_count_before = participation_count_before
        self._epochs = {(each.loader, each.epoch): each for each in epochs}
        self._participants = {}

    def pass_on(self, members: Iterable[WorkerKey]) -> None:
        """Passes what earlier starts of workers hold to their present ones.

        So a run goes on bit by bit if the same workers are there. Of all others it is
        dealt again.
        """
        present = {worker.worker_id: worker for worker in members}
        holders = {worker for each in self._epochs.values() for worker in each.workers}
        for worker in sorted(holders.difference(present.values())):
            heir = present.get(worker.worker_id)
            if heir is not None:
                for each in self._epochs.values():
                    each.inherit(worker, heir)
            self.retire(worker)

    def participants(self, loader: str) -> frozenset[WorkerKey]:
        """Workers that lease data for a loader."""
        return frozenset(self._participants.get(loader, ()))

    def take_report(self, worker: WorkerKey, report: DataReport) -> None:
        """Accounts for what a worker reports, of any epochs; repeatable."""
        for ranges, take in (
            (report.consumed, EpochLedger.consume),
            (report.dropped, EpochLedger.drop),
            (report.skipped, EpochLedger.skip),
        ):
            for ledger, piece in self._known(ranges):
                take(ledger, worker, (piece,))

    def settle(
        self,
        end: Departure,
        reports: Collection[FenceReport],
        commit: ClockChoice | None,
        *,
        heir: WorkerKey | None = None,
    ) -> None:
        """Accounts for all that a departed worker held, by what the shards hold of it.

        Data of pushes that count is consumed, whatever the worker itself had reported.
        When some shard has applied of the push after them, that push is torn: its data
        is counted as such and not dealt again. All the rest is dealt again, also that
        of a push of the clock that the record commits without it.

        Args:
            end: How the worker ended.
            reports: What the shards hold of it.
            commit: The clock that the record commits.
            heir: Who takes over its open clock, and with it what it held: the run then
                goes on as if nothing had happened, bit by bit.
        """
        worker = end.member.worker
        left_out = 0
        if commit is not None and worker not in commit.workers:
            left_out = end.member.sequence_of(commit.clock)
        holdings = [report.holding_of(worker) for report in reports]
        pushed = {pair for holding in holdings for pair in holding.ranges}
        is_torn = any(h.touched_sequence > end.last_sequence for h in holdings)
        for sequence, piece in sorted(pushed):
            for ledger, _ in self._known((piece,)):
                if sequence == left_out:
                    continue
                if sequence <= end.last_sequence:
                    ledger.consume(worker, (piece,))
                elif is_torn and sequence == end.last_sequence + 1:
                    ledger.tear(worker, (piece,))
        if heir is not None:
            for ledger in self._epochs.values():
                ledger.inherit(worker, heir)
        self.retire(worker)

    def settle_cut(
        self,
        sequences: Iterable[tuple[WorkerKey, int]],
        copies: Collection[Collection[WorkerHolding]],
    ) -> None:
        """Accounts for the pushes of members that are in a cut.

        Their data is consumed, whatever the workers had reported. All that members hold
        besides stays theirs: it is behind pushes after the cut, or behind none.

        Args:
            sequences: Of each member, its last push that is in the cut.
            copies: What each shard's copy has of each member.
        """
        lasts = dict(sequences)
        pushed = {
            (holding.worker, *pair)
            for copy in copies
            for holding in copy
            for pair in holding.ranges
        }
        for worker, sequence, piece in sorted(pushed):
            if sequence <= lasts.get(worker, 0):
                for ledger, _ in self._known((piece,)):
                    ledger.consume(worker, (piece,))

    def retire(self, worker: WorkerKey) -> None:
        """The worker has ended: what it held and did not report is dealt again."""
        for workers in self._participants.values():
            workers.discard(worker)
        # Names that a client has made up: of those that nobody has none is kept.
        self._participants = {
            loader: workers for loader, workers in self._participants.items() if workers
        }
        for ledger in self._epochs.values():
            ledger.retire(worker)

    def _check_room(self, loader: str, epoch: int) -> None:
        if len(self._epochs) >= EPOCH_COUNT_MAX:
            raise Refusal(
                ErrorReason.LIMIT_EXCEEDED,
                f"epoch {epoch} of {loader[:64]!r} would be one more than the "
                f"{EPOCH_COUNT_MAX} that a job may open",
            )

    def _known(
        self, ranges: tuple[DataRange, ...]
    ) -> Iterable[tuple[EpochLedger, DataRange]]:
        for piece in ranges:
            ledger = self._epochs.get((piece.loader, piece.epoch))
            if ledger is not None:
                yield ledger, piece


def participations_of(epochs: Iterable[EpochLedger]) -> int:
    """How often a sample may have been part of pushes of some epochs, at most."""
    return sum(each.participation_count for each in epochs)


def carried_over(spent_count: int, epochs: Iterable[EpochLedger]) -> int:
    """Participations before a job goes on with epochs as they were.

    What is left of those that were open is dealt again, and may have been pushed since:
    they count once more.

    Args:
        spent_count: Participations up to now, those of the epochs too.
        epochs: What the job goes on with.
    """
    return spent_count - participations_of(each for each in epochs if each.is_closed)


def _other_shape(
    worker: WorkerKey, known: EpochLedger, shape: EpochShape, *, next_epoch: int
) -> Refusal:
    """Of an epoch that is open, or over, with other data."""
    batch_size = known.shape.batch_size
    had = f"{known.shape.position_count} samples in batches of {batch_size}"
    has = f"{shape.position_count} in batches of {shape.batch_size}"
    named = f"epoch {known.epoch} of {known.loader[:64]!r}"
    if known.is_closed:
        return Refusal(
            ErrorReason.DATA_ORDER_MISMATCH,
            f"{named} is trained already, with {had}; {worker} would train it with "
            f"{has}",
            cure="for a new run with other data start a new coordinator and shards "
            "with other --state-dir folders; to go on with this job, begin with "
            f"set_epoch({next_epoch}), the first epoch after all those so far",
        )
    return Refusal(
        ErrorReason.DATA_ORDER_MISMATCH,
        f"{named} has {had}, {worker} has {has}: one that grows or shrinks must have "
        "done so on all workers when they begin an epoch",
    )


class LedgerMemento:
    """A ledger as it was before a change."""

    def __init__(self, ledger: DataLedger, epochs: Iterable[EpochLedger]) -> None:
        self._ledger = ledger
        self._copies = [(each, each.copy()) for each in epochs]
        self._epochs = dict(ledger._epochs)
        self._participants = {
            loader: set(workers) for loader, workers in ledger._participants.items()
        }

    def changed(self) -> tuple[EpochLedger, ...]:
        """Epochs that are not as they were, in the order in which they were opened."""
        new = [
            each
            for key, each in self._ledger._epochs.items()
            if key not in self._epochs
        ]
        return (*(each for each, before in self._copies if each != before), *new)

    def put_back(self) -> None:
        for each, before in self._copies:
            each.put_back(before)
        self._ledger._epochs = self._epochs
        self._ledger._participants = self._participants
