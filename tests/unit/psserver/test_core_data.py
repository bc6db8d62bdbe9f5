"""Data of workers that leave, die or come back: used once, or counted."""

from dataclasses import replace

import pytest

from psserver.coordinator.core.coordinator_effects import Persist
from psserver.coordinator.core.data.epoch_ledger import EpochLedger
from psserver.coordinator.core.roster import WorkerEntry
from psserver.edge.coordinator_settings import CoordinatorSettings
from psserver.edge.fence_report import WorkerHolding
from pswire.leased_data import DataRange, DataReport, EpochShape
from pswire.membership import ClockChoice, LossPolicy, Mode, ModeTerms, StepAtomicity
from tests.doubles.core_values import key
from tests.doubles.driven_coordinator import DrivenCoordinator

SHAPE = EpochShape(position_count=24, batch_size=2, drop_last=False)
A, B = key("a"), key("b")


def piece(number: int) -> DataRange:
    """The batch of this number."""
    return DataRange("loader", 0, 2 * number, 2 * number + 2)


def training(
    mode: Mode = Mode.BSP, policy: LossPolicy = LossPolicy.CONTINUE
) -> tuple[DrivenCoordinator, EpochLedger]:
    """Two workers in an epoch: b holds batches 1, 3, 5 and 7."""
    settings = CoordinatorSettings(
        job_id="job",
        shard_count=2,
        mode=mode,
        staleness_bound=3,
        worker_loss_policy=policy,
        step_atomicity=StepAtomicity.CLOCK,
    )
    job = DrivenCoordinator.running("a", "b", loaders=("loader",), settings=settings)
    for worker in (A, B):
        job.core.ledger.open_epoch(worker, "loader", 0, SHAPE, origin=b"first")
    ledger = job.core.ledger.register_order(A, "loader", 0, 1)
    in_rounds = (A, B)
    held = ledger.lease(B, in_rounds, 4)
    assert held == [piece(1), piece(3), piece(5), piece(7)]
    ledger.consume(A, tuple(ledger.lease(A, in_rounds, 1)))
    return job, ledger


def report_b(
    job: DrivenCoordinator,
    index: int,
    *,
    complete: int,
    touched: int,
    ranges: tuple[tuple[int, DataRange], ...],
) -> None:
    holdings = (
        WorkerHolding(worker=A, complete_sequence=9, touched_sequence=9),
        WorkerHolding(
            worker=B,
            complete_sequence=complete,
            touched_sequence=touched,
            ranges=ranges,
        ),
    )
    job.send(index, replace(job.report_of(), holdings=holdings))


def entry_of(job: DrivenCoordinator, name: str) -> WorkerEntry:
    return job.core.roster.entry(key(name))


@pytest.mark.parametrize("mode", list(Mode))
def test_of_an_evicted_worker_the_shards_know_what_was_used(mode: Mode) -> None:
    """It had not reported any of it."""
    job, ledger = training(mode)
    pushed = ((1, piece(1)), (2, piece(3)), (3, piece(5)))
    job.lose(entry_of(job, "b"))
    report_b(job, 0, complete=3, touched=2, ranges=pushed)
    report_b(job, 1, complete=2, touched=2, ranges=pushed[:2])

    assert ledger.consumed_count == 2 + 4
    assert ledger.torn_count == 0
    assert B not in ledger.held
    assert piece(5) in ledger.returned
    assert piece(7) in ledger.returned
    assert piece(1) not in ledger.returned


def test_data_of_a_torn_push_is_counted_and_not_dealt_again() -> None:
    job, ledger = training()
    pushed = ((1, piece(1)), (2, piece(3)), (3, piece(5)))
    job.lose(entry_of(job, "b"))
    report_b(job, 0, complete=3, touched=3, ranges=pushed)
    report_b(job, 1, complete=2, touched=2, ranges=pushed[:2])

    assert ledger.consumed_count == 2 + 4
    assert ledger.torn_count == 2
    assert piece(5) not in ledger.returned
    assert piece(7) in ledger.returned


def test_data_of_a_push_that_a_clock_was_committed_without_is_dealt_again() -> None:
    job, ledger = training()
    job.lose(entry_of(job, "b"))
    committed = ClockChoice(2, (A,))
    pushed = ((1, piece(1)), (2, piece(3)))
    for index, ranges in enumerate((pushed[:1], pushed)):
        holdings = (
            WorkerHolding(worker=A, complete_sequence=2, touched_sequence=2),
            WorkerHolding(
                worker=B, complete_sequence=2, touched_sequence=1, ranges=ranges
            ),
        )
        report = replace(job.report_of(applied=1), holdings=holdings)
        job.send(index, replace(report, committed=committed))

    assert job.record.commit == committed
    assert ledger.consumed_count == 2 + 2
    assert piece(3) in ledger.returned


def test_what_it_had_reported_counts_once() -> None:
    job, ledger = training()
    ledger.consume(B, (piece(1),))
    job.lose(entry_of(job, "b"))
    for index in (0, 1):
        report_b(job, index, complete=1, touched=1, ranges=((1, piece(1)),))
    assert ledger.consumed_count == 4


def test_a_last_push_whose_answer_was_lost_is_not_dealt_again_when_one_leaves() -> None:
    job, ledger = training()
    worker = entry_of(job, "b")
    consumed = (piece(1),)
    job.core.leave(worker, sequence=1, report=DataReport(consumed), now_ms=0)
    pushed = ((1, piece(1)), (2, piece(3)))
    report_b(job, 0, complete=2, touched=2, ranges=pushed)
    report_b(job, 1, complete=2, touched=1, ranges=pushed)

    assert ledger.consumed_count == 2 + 4
    assert piece(3) not in ledger.returned


def test_one_that_leaves_reports_what_was_thrown_away() -> None:
    job, ledger = training()
    worker = entry_of(job, "b")
    report = DataReport((piece(1),), dropped=(piece(3),))
    job.core.leave(worker, sequence=1, report=report, now_ms=0)
    job.report_all(applied=1)

    assert (ledger.consumed_count, ledger.dropped_count) == (4, 2)
    assert piece(3) not in ledger.returned
    assert {piece(5), piece(7)} <= set(ledger.returned)


def test_what_a_record_settles_is_kept_with_it() -> None:
    """Kept before, a restart would deal it twice; kept after, it would be lost."""
    job, ledger = training()
    job.lose(entry_of(job, "b"))
    report_b(job, 0, complete=1, touched=1, ranges=((1, piece(1)),))
    report_b(job, 1, complete=1, touched=1, ranges=())

    (persist,) = job.of(Persist)
    assert persist.epochs == (ledger,)
    assert persist.enrolments == (("loader", (A,)),)


def test_who_comes_in_is_kept_with_the_record() -> None:
    job, _ = training()
    job.add_worker("c", "loader", "other")
    job.report_all(applied=1)
    *_, persist = job.of(Persist)
    assert persist.epochs == ()
    assert persist.enrolments == (
        ("loader", (A, B, key("c"))),
        ("other", (key("c"),)),
    )


def test_an_evicted_worker_that_is_back_goes_on_in_the_epoch_that_is_under_way() -> (
    None
):
    job, ledger = training()
    job.lose(entry_of(job, "b"))
    report_b(job, 0, complete=1, touched=1, ranges=((1, piece(1)),))
    report_b(job, 1, complete=1, touched=1, ranges=())
    job.add_worker("b", "loader", process_id="again")
    job.report_all(applied=2)
    back = key("b/2")

    origin = job.core.ledger.open_epoch(back, "loader", 0, SHAPE, origin=b"back")
    assert origin == b"first"
    assert job.core.ledger.register_order(back, "loader", 0, 1) is ledger
    in_rounds = job.core.participants("loader")
    assert in_rounds == (A, back)
    while not ledger.is_closed:
        for worker in in_rounds:
            ledger.consume(worker, tuple(ledger.lease(worker, in_rounds, 1)))
    assert ledger.consumed_count == SHAPE.position_count


def test_a_replacement_has_the_rank_and_the_data_of_the_one_it_waits_for() -> None:
    """So a run with losses is that without, bit by bit."""
    job, ledger = training(policy=LossPolicy.WAIT)
    job.lose(entry_of(job, "b"))
    job.add_worker("b", "loader", process_id="another")
    report_b(job, 0, complete=1, touched=1, ranges=((1, piece(1)),))
    report_b(job, 1, complete=1, touched=1, ranges=())

    heir = key("b/2")
    member = job.record.member_of(heir)
    assert member is not None
    assert member.rank == 1
    in_rounds = job.core.participants("loader")
    assert ledger.lease(A, in_rounds, 1) == [piece(2)]
    assert ledger.lease(heir, in_rounds, 3) == [piece(3), piece(5), piece(7)]


def test_without_waiting_the_data_of_a_lost_worker_is_for_all() -> None:
    job, ledger = training()
    job.lose(entry_of(job, "b"))
    report_b(job, 0, complete=1, touched=1, ranges=((1, piece(1)),))
    report_b(job, 1, complete=1, touched=1, ranges=())

    assert ledger.lease(A, (A,), 4)[1:] == [piece(4), piece(6), piece(3)]


# On demand


def test_with_backup_workers_data_is_dealt_on_demand() -> None:
    settings = CoordinatorSettings(
        job_id="job",
        shard_count=2,
        backup_worker_count=1,
        step_atomicity=StepAtomicity.CLOCK,
    )
    job = DrivenCoordinator.running("a", "b", loaders=("loader",), settings=settings)
    assert job.core.participants("loader") == ()


def test_what_was_dealt_and_not_fetched_goes_back_when_the_mode_changes() -> None:
    job, ledger = training()
    ledger.lease(A, (A, B), 2)
    ledger.consume(B, tuple(ledger.held[B]))
    assert ledger.queues[A]
    job.core.set_mode(ModeTerms(Mode.ASP, 0), job.now_ms)
    job.report_all(applied=1)

    assert job.core.participants("loader") == ()
    assert not any(ledger.queues.values())
    (persist,) = job.of(Persist)
    assert persist.epochs == (ledger,)
    held = ledger.lease(B, (), 9)
    assert held[0] == piece(6)
    ledger.consume(A, (piece(2), piece(4)))
    ledger.consume(B, tuple(held))
    assert ledger.is_closed
    assert ledger.consumed_count == SHAPE.position_count
