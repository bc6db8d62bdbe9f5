"""Which worker trains on which positions of an epoch, and what has been seen.

The order of an epoch is cut into batches. In BSP they are dealt by rounds: one batch
to each participant, in the order of ranks, whoever asks first, so that a run repeats
and equals one process that takes the batches in order. Otherwise they are dealt on
demand, and fast workers get more. What a departed worker held and nobody knows to be
used is dealt again. What was used in part (torn), or whose push was thrown away
(dropped), is counted and not dealt again in this epoch.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from psserver.core.push import DataRange
from psserver.core.record import WorkerKey
from pswire.reasons import ErrorReason, Refusal

Enrolments = tuple[tuple[str, tuple[WorkerKey, ...]], ...]
"""For each loader who leases data for it, to be kept."""

HELD_COUNT_MAX = 4_096
"""Batches that a worker may hold of one epoch. Each answer repeats them all, and the
epoch is written down with them: one that took ever more would slow down everybody."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochShape:
    """How an epoch is cut.

    Attributes:
        position_count: Positions in the epoch, at least 0.
        batch_size: Positions in a batch, at least 1.
        drop_last: Whether a last, smaller batch is left out.
    """

    position_count: int
    batch_size: int
    drop_last: bool

    def validate(self) -> None:
        """Checks a client's numbers.

        Raises:
            Refusal: `MALFORMED_MESSAGE`.
        """
        if self.position_count < 0 or self.batch_size < 1:
            raise Refusal(
                ErrorReason.MALFORMED_MESSAGE,
                f"an epoch of {self.position_count} positions in batches of "
                f"{self.batch_size} is none",
            )

    @property
    def usable_count(self) -> int:
        """Positions that are dealt."""
        if self.drop_last:
            return self.position_count - self.position_count % self.batch_size
        return self.position_count


@dataclass(slots=True)
class EpochLedger:
    """One epoch of one loader.

    Attributes:
        loader: Name of the loader.
        epoch: Number of the epoch.
        shape: How it is cut.
        order_digest: Digest of the order, once a worker has registered it.
        registrant: Who registered it.
        cursor: Next position that was never dealt.
        returned: Ranges to deal again.
        queues: Dealt, not yet handed out.
        held: Handed out, not yet reported as consumed.
        consumed_count: Positions reported as consumed.
        torn_count: Positions of pushes that only some shards applied.
        dropped_count: Positions whose pushes were thrown away.
    """

    loader: str
    epoch: int
    shape: EpochShape
    order_digest: int | None = None
    registrant: WorkerKey | None = None
    cursor: int = 0
    returned: deque[DataRange] = field(default_factory=deque)
    queues: dict[WorkerKey, deque[DataRange]] = field(default_factory=dict)
    held: dict[WorkerKey, set[DataRange]] = field(default_factory=dict)
    consumed_count: int = 0
    torn_count: int = 0
    dropped_count: int = 0

    @property
    def is_closed(self) -> bool:
        """Whether every range is accounted for."""
        return (
            self.cursor >= self.shape.usable_count
            and not self.returned
            and not any(self.queues.values())
            and not any(self.held.values())
        )

    def lease(
        self, worker: WorkerKey, participants: tuple[WorkerKey, ...], count_max: int
    ) -> list[DataRange]:
        """Hands out at most `count_max` batches, after those handed out before.

        What the worker has and did not report as consumed comes first, again: the
        answer that brought it may have been lost, and nobody else will ever get it.

        One that holds `HELD_COUNT_MAX` gets no more before it reports some of them.

        Args:
            worker: Who asks.
            participants: In BSP, among whom rounds are dealt, in the order of ranks;
                empty deals on demand.
            count_max: At least 1.
        """
        queue = self.queues.setdefault(worker, deque())
        while len(queue) < count_max and self._has_more:
            if worker in participants:
                for other in participants:
                    self._deal(other)
            else:
                self._deal(worker)
        held = self.held.setdefault(worker, set())
        count = min(count_max, len(queue), max(0, HELD_COUNT_MAX - len(held)))
        leased = [queue.popleft() for _ in range(count)]
        before = sorted(held)
        held.update(leased)
        return before + leased

    def consume(self, worker: WorkerKey, ranges: tuple[DataRange, ...]) -> None:
        """The worker's pushes of these ranges count; repeatable."""
        self.consumed_count += self._close(worker, ranges)

    def tear(self, worker: WorkerKey, ranges: tuple[DataRange, ...]) -> None:
        """Only some shards applied the worker's push of these ranges; repeatable."""
        self.torn_count += self._close(worker, ranges)

    def drop(self, worker: WorkerKey, ranges: tuple[DataRange, ...]) -> None:
        """The worker's pushes of these ranges were thrown away; repeatable."""
        self.dropped_count += self._close(worker, ranges)

    def has_of(self, worker: WorkerKey) -> bool:
        """Whether the worker has anything that was not reported as consumed."""
        return bool(self.held.get(worker) or self.queues.get(worker))

    def give_back(self, worker: WorkerKey) -> None:
        """What the worker has and did not report is dealt again."""
        pieces = [*self.held.pop(worker, ()), *self.queues.pop(worker, ())]
        self.returned.extend(sorted(pieces, key=lambda piece: piece.start))

    def inherit(self, worker: WorkerKey, heir: WorkerKey) -> None:
        """What the worker has and did not report is the heir's, in the same order."""
        pieces = [*self.held.pop(worker, ()), *self.queues.pop(worker, ())]
        queue = deque(sorted(pieces, key=lambda piece: piece.start))
        queue.extend(self.queues.pop(heir, ()))
        if queue:
            self.queues[heir] = queue

    def recall(self) -> bool:
        """Data is dealt on demand from now on: takes back what nobody has got.

        Returns:
            Whether there was any.
        """
        pieces = [piece for queue in self.queues.values() for piece in queue]
        self.queues.clear()
        self.returned.extend(sorted(pieces, key=lambda piece: piece.start))
        return bool(pieces)

    def _close(self, worker: WorkerKey, ranges: tuple[DataRange, ...]) -> int:
        """Takes from the worker what it holds of these; returns how many positions."""
        held = self.held.get(worker, set())
        closed = [piece for piece in dict.fromkeys(ranges) if piece in held]
        held.difference_update(closed)
        return sum(piece.position_count for piece in closed)

    @property
    def _has_more(self) -> bool:
        return bool(self.returned) or self.cursor < self.shape.usable_count

    def _deal(self, worker: WorkerKey) -> None:
        if self.returned:
            piece = self.returned.popleft()
        elif self.cursor < self.shape.usable_count:
            stop = min(self.cursor + self.shape.batch_size, self.shape.usable_count)
            piece = DataRange(self.loader, self.epoch, self.cursor, stop)
            self.cursor = stop
        else:
            return
        self.queues.setdefault(worker, deque()).append(piece)


class DataLedger:
    """All epochs of all loaders of a job.

    Args:
        job_seed: From which the seed of each epoch follows.
    """

    def __init__(self, job_seed: int) -> None:
        self._job_seed = job_seed
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
        consumed: tuple[DataRange, ...] = (),
        dropped: tuple[DataRange, ...] = (),
    ) -> int:
        """Opens an epoch and returns its seed.

        What the worker holds of the loader's earlier epochs and does not report as
        consumed or dropped is dealt again.

        Raises:
            Refusal: `MALFORMED_MESSAGE`, or `DATA_ORDER_MISMATCH` when the epoch is
                open with another shape; no state changed.
        """
        shape.validate()
        known = self._epochs.get((loader, epoch))
        if known is not None and known.shape != shape:
            raise Refusal(
                ErrorReason.DATA_ORDER_MISMATCH,
                f"epoch {epoch} of {loader[:64]!r} has {known.shape.position_count} "
                f"samples in batches of {known.shape.batch_size}, {worker} has "
                f"{shape.position_count} in batches of {shape.batch_size}",
            )
        if known is None:
            self._epochs[loader, epoch] = EpochLedger(loader, epoch, shape)
        self.enroll(worker, (loader,))
        self.consume(worker, consumed)
        self.drop(worker, dropped)
        for (name, number), ledger in self._epochs.items():
            if name == loader and number < epoch:
                ledger.give_back(worker)
        return self.seed_of(loader, epoch)

    def register_order(
        self, worker: WorkerKey, loader: str, epoch: int, order_digest: int
    ) -> EpochLedger:
        """Checks the worker's order against the first one registered.

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
        elif ledger.order_digest != order_digest:
            raise Refusal(
                ErrorReason.DATA_ORDER_MISMATCH,
                f"{worker} draws epoch {epoch} of {loader[:64]!r} in another order "
                f"than {ledger.registrant}",
            )
        self.enroll(worker, (loader,))
        return ledger

    def epochs(self) -> tuple[EpochLedger, ...]:
        """All epochs, to be kept."""
        return tuple(self._epochs.values())

    def epochs_of(self, worker: WorkerKey) -> tuple[EpochLedger, ...]:
        """Epochs of which the worker has anything."""
        return tuple(each for each in self._epochs.values() if each.has_of(worker))

    def enrolments(self) -> Enrolments:
        """For each loader who leases data for it, in a fixed order, to be kept."""
        return tuple(
            (loader, tuple(sorted(workers)))
            for loader, workers in sorted(self._participants.items())
            if workers
        )

    def recall(self) -> tuple[EpochLedger, ...]:
        """Data is dealt on demand from now on; returns the epochs that changed."""
        return tuple(each for each in self._epochs.values() if each.recall())

    def restore(
        self,
        epochs: tuple[EpochLedger, ...],
        members: frozenset[WorkerKey],
        enrolments: Enrolments = (),
    ) -> None:
        """Goes on from durable state after a restart.

        Args:
            epochs: As they were kept.
            members: Workers of the newest record. What others hold is dealt again:
                the record that ended them was kept before this could be.
            enrolments: As they were kept.
        """
        for loader, workers in enrolments:
            for worker in members.intersection(workers):
                self.enroll(worker, (loader,))
        self._epochs = {(e.loader, e.epoch): e for e in epochs}
        for ledger in epochs:
            for worker in {*ledger.queues, *ledger.held}:
                if worker in members:
                    self.enroll(worker, (ledger.loader,))
                else:
                    ledger.give_back(worker)

    def participants(self, loader: str) -> frozenset[WorkerKey]:
        """Workers that lease data for a loader."""
        return frozenset(self._participants.get(loader, ()))

    def consume(self, worker: WorkerKey, ranges: tuple[DataRange, ...]) -> None:
        """The worker's pushes of these ranges, of any epochs, count; repeatable."""
        for ledger, piece in self._known(ranges):
            ledger.consume(worker, (piece,))

    def tear(self, worker: WorkerKey, ranges: tuple[DataRange, ...]) -> None:
        """Only some shards applied the worker's push of these ranges; repeatable."""
        for ledger, piece in self._known(ranges):
            ledger.tear(worker, (piece,))

    def drop(self, worker: WorkerKey, ranges: tuple[DataRange, ...]) -> None:
        """The worker's pushes of these ranges were thrown away; repeatable."""
        for ledger, piece in self._known(ranges):
            ledger.drop(worker, (piece,))

    def inherit(self, worker: WorkerKey, heir: WorkerKey) -> None:
        """Another takes the worker's place: what it held and did not report is its."""
        for ledger in self._epochs.values():
            ledger.inherit(worker, heir)

    def retire(self, worker: WorkerKey) -> None:
        """The worker is gone: what it held and did not report is dealt again."""
        for workers in self._participants.values():
            workers.discard(worker)
        for ledger in self._epochs.values():
            ledger.give_back(worker)

    def _known(
        self, ranges: tuple[DataRange, ...]
    ) -> Iterable[tuple[EpochLedger, DataRange]]:
        for piece in ranges:
            ledger = self._epochs.get((piece.loader, piece.epoch))
            if ledger is not None:
                yield ledger, piece
