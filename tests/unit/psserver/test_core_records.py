"""Records in every mode: who comes in where, what counts, what all commit."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from psserver.coordinator.core.coordinator_effects import Prepare
from psserver.edge.fence_report import WorkerHolding
from pswire.membership import (
    ClockChoice,
    LossPolicy,
    Mode,
    StepAtomicity,
)
from tests.doubles.core_values import key
from tests.doubles.driven_coordinator import DrivenCoordinator
from tests.doubles.driven_modes import SETTINGS, ask, far_apart, running

# Membership in every mode


@pytest.mark.parametrize("mode", [Mode.SSP, Mode.ASP])
def test_without_clocks_a_joiners_base_is_the_largest_frontier(mode: Mode) -> None:
    job = running("a", "b", mode=mode, bound=3)
    job.add_worker("c")
    for index, frontier in enumerate((4, 5)):
        report = job.report_of(complete={"a": 9, "b": 5}, applied=4, trailer=9)
        job.send(index, replace(report, frontier=frontier))
    assert job.bases["c/1"] == 5


@pytest.mark.parametrize("mode", [Mode.BSP, Mode.ASP])
def test_a_joiners_base_is_never_before_the_mode(mode: Mode) -> None:
    job = running("a")
    ask(job, Mode.ASP)
    job.report_all(applied=6, trailer=9)
    if mode is Mode.BSP:
        ask(job, mode)
        far_apart(job, a=9)
    job.add_worker("b")
    job.report_all(applied=6)
    assert job.bases["b/1"] == 9


def test_sequences_are_numbered_from_the_base_that_the_mode_set() -> None:
    job = running("a", "b", mode=Mode.ASP)
    ask(job, Mode.BSP)
    far_apart(job, a=3, b=90)
    job.lose(job.core.roster.entry(key("a")))
    job.report(0, applied=92, complete={"a": 92})
    job.report(1, applied=91, trailer=92, complete={"a": 91})

    (gone,) = job.record.departures
    assert (gone.last_clock, gone.last_sequence) == (91, 4)
    assert job.record.departed_step_count == 4
    assert job.record.version_at(92) == 4 + 92


def test_a_worker_that_died_before_its_last_push_was_everywhere_ends_before_it() -> (
    None
):
    """Its push of the mode before is on one shard, and was counted as the last."""
    job = running("a", "b", mode=Mode.ASP)
    ask(job, Mode.BSP)
    far_apart(job, a=5, b=5)
    job.lose(job.core.roster.entry(key("a")))
    for index, sequence in enumerate((5, 4)):
        holdings = (
            WorkerHolding(worker=key("a"), complete_sequence=sequence),
            WorkerHolding(worker=key("b"), complete_sequence=5),
        )
        report = replace(job.report_of(), holdings=holdings, is_settled=False)
        job.send(index, report)

    (gone,) = job.record.departures
    assert (gone.last_clock, gone.last_sequence) == (4, 4)
    assert job.record.version_at(5) == 4 + 5


def test_who_replaces_it_does_not_begin_in_the_mode_before() -> None:
    settings = replace(
        SETTINGS,
        mode=Mode.ASP,
        worker_loss_policy=LossPolicy.WAIT,
        step_atomicity=StepAtomicity.CLOCK,
    )
    job = DrivenCoordinator.running("a", "b", settings=settings)
    ask(job, Mode.BSP)
    far_apart(job, a=5, b=5)
    job.lose(job.core.roster.entry(key("a")))
    job.add_worker("a", process_id="another")
    holdings = (
        WorkerHolding(worker=key("a"), complete_sequence=4),
        WorkerHolding(worker=key("b"), complete_sequence=5),
    )
    job.send_all(replace(job.report_of(), holdings=holdings, is_settled=False))
    assert job.bases == {"a/2": 5, "b/1": 5}


# Commits


def lose_b(job: DrivenCoordinator) -> None:
    job.lose(job.core.roster.entry(key("b")))


def to_asp(job: DrivenCoordinator) -> None:
    ask(job, Mode.ASP)


@pytest.mark.parametrize("change", [lose_b, to_asp])
@pytest.mark.parametrize("is_committed", [False, True])
def test_what_one_shard_has_committed_or_chosen_all_commit(
    change: Callable[[DrivenCoordinator], None], is_committed: bool
) -> None:
    job = running("a", "b")
    change(job)
    choice = ClockChoice(7, (key("a"), key("b")))
    report = job.report_of(applied=6, trailer=7, complete={"a": 7, "b": 7})
    old = ClockChoice(6, (key("a"), key("b")))
    committed = choice if is_committed else old
    job.send(0, replace(report, committed=committed, chosen=choice))
    job.send(1, replace(report, committed=old))

    assert job.record.commit == choice
    assert {end.last_clock for end in job.record.departures} <= {7}
    if change is to_asp:
        assert job.record.mode_clock == 7


def test_a_commit_that_is_everywhere_is_over() -> None:
    job = running("a", "b")
    lose_b(job)
    choice = ClockChoice(6, (key("a"), key("b")))
    job.send_all(replace(job.report_of(applied=6), committed=choice))
    assert job.record.commit is None
    job.add_worker("c")
    job.send_all(replace(job.report_of(applied=6), committed=choice))
    assert job.record.commit is None


def test_without_clocks_no_record_repeats_a_commit() -> None:
    """It is of one push, whose worker drives it or is known to have all of it there."""
    job = running("a", "b", mode=Mode.ASP)
    lose_b(job)
    choice = ClockChoice(7, (key("a"),))
    job.send_all(replace(job.report_of(), committed=choice))
    assert job.record.commit is None


def test_one_that_leaves_stays_part_of_the_clock_that_was_committed() -> None:
    job = running("a", "b")
    job.leave(job.core.roster.entry(key("b")), 6)
    report = job.report_of(applied=6, trailer=7, complete={"a": 7, "b": 7})
    choice = ClockChoice(7, (key("a"), key("b")))
    job.send(0, replace(report, committed=choice))
    job.send(1, report)
    assert [end.last_clock for end in job.record.departures] == [7]


def test_one_that_leaves_is_no_part_of_a_clock_that_was_committed_without_it() -> None:
    job = running("a", "b")
    job.leave(job.core.roster.entry(key("b")), 6)
    report = job.report_of(applied=6, trailer=7, complete={"a": 7, "b": 7})
    choice = ClockChoice(7, (key("a"),))
    closed = job.report_of(applied=7)
    untouched = tuple(replace(h, touched_sequence=6) for h in closed.holdings)
    job.send(0, replace(closed, committed=choice, holdings=untouched))
    job.send(1, report)
    assert [end.last_clock for end in job.record.departures] == [6]


def test_without_clocks_a_last_push_that_was_begun_counts_for_one_that_leaves() -> None:
    job = running("a", "b", mode=Mode.ASP)
    job.leave(job.core.roster.entry(key("b")), 6)
    for index, touched in enumerate((6, 7)):
        holdings = (
            WorkerHolding(worker=key("a"), complete_sequence=90, touched_sequence=90),
            WorkerHolding(
                worker=key("b"), complete_sequence=8, touched_sequence=touched
            ),
        )
        job.send(index, replace(job.report_of(), holdings=holdings))
    assert [end.last_sequence for end in job.record.departures] == [7]


def test_shards_list_the_data_of_all_that_a_record_ends() -> None:
    job = running("a", "b", "c")
    job.core.want_cut(job.now_ms)
    job.leave(job.core.roster.entry(key("c")), 1)
    lose_b(job)
    job.report_all(applied=1)
    assert [p.evicting for p in job.of(Prepare)] == [(), (key("b"), key("c"))]
