"""One epoch of one loader: who has which positions of it, and what became of them.

The order of an epoch is cut into batches. In BSP they are dealt by rounds: one batch
to each participant, in the order of ranks, whoever asks first, so that a run repeats
and equals one process that takes the batches in order. Otherwise they are dealt on
demand, and fast workers get more. What a departed worker held and nobody knows to be
used is dealt again. What was used in part (torn), whose push was thrown away (dropped),
or what was drawn and never pushed (skipped) is counted and not dealt again in this
epoch.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace

from psserver.coordinator.core.data.position_set import PositionSet
from pswire.leased_data import DataRange, EpochReport, EpochShape
from pswire.limits import HELD_COUNT_MAX, ORDER_ORIGIN_BYTES_MAX
from pswire.membership import WorkerKey
from pswire.reasons import ErrorReason, Refusal

SKIPPED_RUN_COUNT_MAX = 4_096
"""Runs of skipped positions that are kept of a worker, for the reason that there are
`HELD_COUNT_MAX` batches. Of a worker alone all skips are one run; in rounds with
another each is a run of its own."""


def check_origin(origin: bytes) -> None:
    """Checks what a client sends to draw an order from.

    Raises:
        Refusal: `LIMIT_EXCEEDED`.
    """
    if len(origin) > ORDER_ORIGIN_BYTES_MAX:
        raise Refusal(
            ErrorReason.LIMIT_EXCEEDED,
            f"an epoch's order would be drawn from {len(origin)} bytes, at most "
            f"{ORDER_ORIGIN_BYTES_MAX} are kept",
        )


@dataclass(slots=True)
class EpochLedger:
    """One epoch of one loader.

    Attributes:
        loader: Name of the loader.
        epoch: Number of the epoch.
        shape: How it is cut.
        origin: What the order is drawn from: of the worker that opened the epoch.
        order_digest: Digest of the order, once a worker has registered it.
        registrant: Who registered it.
        cursor: Next position that was never dealt.
        returned: Ranges to deal again.
        queues: Dealt, not yet handed out.
        held: Handed out, not yet reported as consumed.
        consumed_count: Positions reported as consumed.
        torn_count: Positions of pushes that only some shards applied.
        dropped_count: Positions whose pushes were thrown away.
        skipped: Drawn and not pushed, by workers that are here and may push them yet.
        settled_skipped_count: Positions that were skipped for good.
        revoked: Handed out and dealt again, with the worker still here.
        repeated_count: Positions that were dealt again and used by more than one.
        taken_back: Of pieces that were handed out and taken back, by where they begin,
            how often.
        repetition_max: How often any piece was handed out after the first time, at
            most: whoever has had it may have pushed it.
    """

    loader: str
    epoch: int
    shape: EpochShape
    origin: bytes = b""
    order_digest: int | None = None
    registrant: WorkerKey | None = None
    cursor: int = 0
    returned: deque[DataRange] = field(default_factory=deque)
    queues: dict[WorkerKey, deque[DataRange]] = field(default_factory=dict)
    held: dict[WorkerKey, set[DataRange]] = field(default_factory=dict)
    consumed_count: int = 0
    torn_count: int = 0
    dropped_count: int = 0
    skipped: dict[WorkerKey, PositionSet] = field(default_factory=dict)
    settled_skipped_count: int = 0
    revoked: dict[WorkerKey, set[DataRange]] = field(default_factory=dict)
    repeated_count: int = 0
    taken_back: dict[int, int] = field(default_factory=dict)
    repetition_max: int = 0

    def copy(self) -> "EpochLedger":
        """The same state, which does not change with this one."""
        return replace(
            self,
            returned=self.returned.copy(),
            queues={worker: queue.copy() for worker, queue in self.queues.items()},
            held={worker: held.copy() for worker, held in self.held.items()},
            skipped={worker: kept.copy() for worker, kept in self.skipped.items()},
            revoked={worker: pieces.copy() for worker, pieces in self.revoked.items()},
            taken_back=self.taken_back.copy(),
        )

    def put_back(self, before: "EpochLedger") -> None:
        """Takes the state of a copy, which is not used any more."""
        for each in fields(self):
            setattr(self, each.name, getattr(before, each.name))

    @property
    def report(self) -> EpochReport:
        counted = self.consumed_count + self.torn_count + self.dropped_count
        skipped_count = self.settled_skipped_count + sum(
            skipped.position_count for skipped in self.skipped.values()
        )
        return EpochReport(
            loader=self.loader,
            epoch=self.epoch,
            count=self.shape.position_count,
            left_out=self.shape.position_count - self.shape.usable_count,
            seen_once=self.consumed_count - self.repeated_count,
            seen_again=self.repeated_count,
            torn=self.torn_count,
            dropped=self.dropped_count,
            skipped=skipped_count,
            never=self.shape.usable_count - counted - skipped_count,
            is_over=self.is_closed,
            held=sum(
                _positions(pieces)
                for has in (self.queues, self.held)
                for pieces in has.values()
            ),
        )

    @property
    def is_closed(self) -> bool:
        """Whether every range is accounted for."""
        return (
            self.cursor >= self.shape.usable_count
            and not self.returned
            and not any(self.queues.values())
            and not any(self.held.values())
        )

    @property
    def participation_count(self) -> int:
        """How often a sample of it may have been part of a push, at most.

        Of a piece that is handed out it is not known whether it was pushed, and what
        a shard has received was seen, be it that it is dropped there.
        """
        return 1 + self.repetition_max

    @property
    def holders(self) -> set[WorkerKey]:
        """All who have ranges of it that are not reported yet."""
        return {
            worker
            for has in (self.queues, self.held)
            for worker, ranges in has.items()
            if ranges
        }

    @property
    def workers(self) -> set[WorkerKey]:
        return {*self.queues, *self.held, *self.skipped, *self.revoked}

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
        repetitions = (self.taken_back.get(piece.start, 0) for piece in leased)
        self.repetition_max = max(self.repetition_max, *repetitions, 0)
        # What it is given anew it may use: that is no late use of what was taken back.
        self.revoked.get(worker, set()).difference_update(held)
        return before + leased

    def consume(self, worker: WorkerKey, ranges: tuple[DataRange, ...]) -> None:
        """The worker's pushes of these ranges count; repeatable."""
        self.consumed_count += self._close(worker, ranges)
        self._use_revoked(worker, ranges)

    def tear(self, worker: WorkerKey, ranges: tuple[DataRange, ...]) -> None:
        """Only some shards applied the worker's push of these ranges; repeatable."""
        self.torn_count += self._close(worker, ranges, for_all=True)

    def drop(self, worker: WorkerKey, ranges: tuple[DataRange, ...]) -> None:
        """The worker's pushes of these ranges were dropped; repeatable."""
        self.dropped_count += self._close(worker, ranges, for_all=True)

    def skip(self, worker: WorkerKey, ranges: tuple[DataRange, ...]) -> None:
        """The worker drew these ranges and has not pushed them; repeatable.

        It may push them later: then what became of that push counts. But for the
        oldest of those that make more than `SKIPPED_RUN_COUNT_MAX` runs.
        """
        held = self.held.get(worker, set())
        skipped = held.intersection(ranges)
        if not skipped:
            return
        held -= skipped
        kept = self.skipped.setdefault(worker, PositionSet())
        for piece in skipped:
            kept.add(piece.start, piece.stop)
        while kept.run_count > SKIPPED_RUN_COUNT_MAX:
            self._settle_skipped(PositionSet([kept.pop_first()]))

    def has_of(self, worker: WorkerKey) -> bool:
        """Whether the worker has anything of which more may be heard."""
        return self.is_dealt_to(worker) or bool(
            self.skipped.get(worker) or self.revoked.get(worker)
        )

    def is_dealt_to(self, worker: WorkerKey) -> bool:
        """Whether the worker has anything that it did not report."""
        return bool(self.held.get(worker) or self.queues.get(worker))

    def give_back(self, worker: WorkerKey) -> None:
        """What the worker has and did not report is dealt again.

        It is here, and might have used some of it after all: then that shows.
        """
        held = self.held.get(worker)
        if held:
            self.revoked.setdefault(worker, set()).update(held)
        self._deal_again(worker)

    def retire(self, worker: WorkerKey) -> None:
        """The worker has ended: what it has and did not report is dealt again."""
        self._deal_again(worker)
        self.pass_by(worker)

    def pass_by(self, worker: WorkerKey) -> None:
        """The worker can't push any more what it has skipped or was taken from it."""
        self.revoked.pop(worker, None)
        skipped = self.skipped.pop(worker, None)
        if skipped is not None:
            self._settle_skipped(skipped)

    def _deal_again(self, worker: WorkerKey) -> None:
        pieces = [*self._take_back(worker), *self.queues.pop(worker, ())]
        self.returned.extend(sorted(pieces, key=lambda piece: piece.start))

    def _take_back(self, worker: WorkerKey) -> set[DataRange]:
        """Takes what was handed out to the worker, to be handed out again."""
        held = self.held.pop(worker, set())
        for piece in held:
            self.taken_back[piece.start] = self.taken_back.get(piece.start, 0) + 1
        return held

    def inherit(self, worker: WorkerKey, heir: WorkerKey) -> None:
        """What the worker has and did not report is the heir's, in the same order."""
        pieces = [*self._take_back(worker), *self.queues.pop(worker, ())]
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

    def _close(
        self, worker: WorkerKey, ranges: tuple[DataRange, ...], *, for_all: bool = False
    ) -> int:
        """Takes from the worker what it drew of these; returns how many positions.

        Args:
            worker: Who drew them.
            ranges: Any.
            for_all: Whether a late report of another worker changes nothing any more.
        """
        held = self.held.get(worker, set())
        skipped = self.skipped.get(worker, PositionSet())
        closed = held.intersection(ranges)
        held -= closed
        count = _positions(closed)
        for piece in ranges:
            if skipped.covers(piece.start, piece.stop):
                skipped.remove(piece.start, piece.stop)
                closed.add(piece)
                count += piece.position_count
        if for_all:
            self._settle(PositionSet((piece.start, piece.stop) for piece in closed))
        return count

    def _settle(self, positions: PositionSet) -> None:
        """These are in a count for good, whoever may yet report to have used them."""
        for revoked in self.revoked.values():
            revoked -= {e for e in revoked if positions.covers(e.start, e.stop)}

    def _settle_skipped(self, positions: PositionSet) -> None:
        self._settle(positions)
        self.settled_skipped_count += positions.position_count

    def _use_revoked(self, worker: WorkerKey, ranges: tuple[DataRange, ...]) -> None:
        """Of what was taken back from the worker it has used these."""
        for piece in self.revoked.get(worker, set()).intersection(ranges):
            self.revoked[worker].discard(piece)
            if self._withdraw(piece):
                self.consumed_count += piece.position_count
            else:
                # Used by another as well. Seen more than once it stays, however often.
                self.repeated_count += piece.position_count
                self._settle(PositionSet([(piece.start, piece.stop)]))

    def _withdraw(self, piece: DataRange) -> bool:
        """Takes a piece back from whoever was to use it next; whether anybody was.

        Who has drawn it might use it after all: then that shows.
        """
        for pieces in (self.returned, *self.queues.values()):
            if piece in pieces:
                pieces.remove(piece)
                return True
        for worker, held in self.held.items():
            if piece in held:
                held.remove(piece)
                self.revoked.setdefault(worker, set()).add(piece)
                return True
        for worker, skipped in self.skipped.items():
            if skipped.covers(piece.start, piece.stop):
                skipped.remove(piece.start, piece.stop)
                self.revoked.setdefault(worker, set()).add(piece)
                return True
        return False

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


def _positions(pieces: Iterable[DataRange]) -> int:
    return sum(piece.position_count for piece in pieces)
