"""The data ledger of a checkpoint says of every batch whether its step is in the cut.

Workers draw batches, push, report late or not at all, skip some and leave. At a drawn
moment the ledger is copied, as at the decision of a cut. What goes on after that must
change nothing, and the pushes of the cut settle the copy.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from psserver.coordinator.core.data.epoch_ledger import EpochLedger
from psserver.coordinator.core.data.ledger import DataLedger
from psserver.edge.fence_report import WorkerHolding
from pswire.leased_data import DataRange, DataReport, EpochShape
from pswire.membership import WorkerKey
from tests.doubles.core_values import key

LOADER = "loader"
SHAPE = EpochShape(position_count=64, batch_size=4, drop_last=False)
SCHEDULE_COUNT = 100


@dataclass
class Puller:
    """A worker that draws batches and pushes them.

    Attributes:
        worker: Which one.
        drawn: What it has drawn and not pushed.
        pushed: Data of its pushes, oldest first.
        skipped: What it has drawn and will not push.
        reported_count: Pushes that it has reported.
    """

    worker: WorkerKey
    drawn: list[DataRange] = field(default_factory=list)
    pushed: list[tuple[DataRange, ...]] = field(default_factory=list)
    skipped: list[DataRange] = field(default_factory=list)
    reported_count: int = 0

    def act(self, ledger: DataLedger, workers: list[WorkerKey], draw: float) -> None:
        (epoch,) = ledger.epochs()
        if draw < 0.4:
            for piece in epoch.lease(self.worker, tuple(workers), 1):
                if piece not in (*self.drawn, *sum(self.pushed, ())):
                    self.drawn.append(piece)
        elif draw < 0.8:
            self.pushed.append(tuple(self.drawn))
            self.drawn.clear()
        elif draw < 0.9 and self.drawn:
            piece = self.drawn.pop()
            self.skipped.append(piece)
            ledger.take_report(self.worker, DataReport(skipped=(piece,)))
        else:
            new = self.pushed[self.reported_count :]
            self.reported_count = len(self.pushed)
            ledger.take_report(self.worker, DataReport(consumed=sum(new, ())))

    def holding(self, extra_count: int) -> WorkerHolding:
        """What a shard has of it: the pushes that are in, and maybe some beyond."""
        ranges = [
            (sequence, piece)
            for sequence, pieces in enumerate(self.pushed, start=1)
            for piece in pieces
        ]
        beyond = [(len(self.pushed) + 1, piece) for piece in self.drawn[:extra_count]]
        return WorkerHolding(
            worker=self.worker,
            complete_sequence=len(self.pushed),
            ranges=(*ranges, *beyond),
        )


def places(epoch: EpochLedger) -> Iterator[range]:
    """All positions that are dealt and not settled, or not dealt."""
    for held in epoch.held.values():
        yield from (range(piece.start, piece.stop) for piece in held)
    for queue in epoch.queues.values():
        yield from (range(piece.start, piece.stop) for piece in queue)
    yield from (range(piece.start, piece.stop) for piece in epoch.returned)
    yield range(epoch.cursor, epoch.shape.usable_count)


@pytest.mark.parametrize("seed", range(SCHEDULE_COUNT))
def test_every_batch_is_consumed_with_its_step_or_still_to_be_trained(
    seed: int,
) -> None:
    rng = random.Random(seed)
    ledger = DataLedger(job_seed=0)
    pullers = [Puller(key(name)) for name in "abc"[: rng.randint(1, 3)]]
    workers = [each.worker for each in pullers] if rng.random() < 0.5 else []
    for each in pullers:
        ledger.open_epoch(each.worker, LOADER, 0, SHAPE)
    for _ in range(rng.randint(0, 40)):
        rng.choice(pullers).act(ledger, workers, rng.random())

    copy = ledger.copy()
    sequences = [(each.worker, len(each.pushed)) for each in pullers]
    copies = [
        [each.holding(rng.randint(0, 2)) for each in pullers]
        for _ in range(rng.randint(1, 3))
    ]
    held = {each.worker: set(each.drawn) for each in pullers}
    pushed = {piece for each in pullers for pieces in each.pushed for piece in pieces}
    skipped = {piece for each in pullers for piece in each.skipped}
    for _ in range(rng.randint(0, 20)):
        rng.choice(pullers).act(ledger, workers, rng.random())
    copy.settle_cut(sequences, copies)

    (epoch,) = copy.epochs()
    for each in pullers:
        assert epoch.held.get(each.worker, set()) == held[each.worker]
    assert epoch.consumed_count == sum(piece.position_count for piece in pushed)
    assert epoch.report.skipped == sum(piece.position_count for piece in skipped)
    left = [position for place in places(epoch) for position in place]
    assert len(left) == len(set(left)), "dealt twice"
    gone = {
        position
        for piece in pushed | skipped
        for position in range(piece.start, piece.stop)
    }
    assert set(left) == set(range(SHAPE.position_count)) - gone
