"""Who contributes to which clock follows from records alone."""

import pytest

from psserver.shard.core.clock_table import ClockTable
from psserver.shard.core.member_on_shard import MembersOnShard
from pswire.membership import Mode, Outcome, Record, longest_of
from tests.doubles.core_values import departure, key, member, record
from tests.doubles.driven_shard import DrivenShard


def table_with(*records: Record, applied_clock: int = 0) -> ClockTable:
    workers = MembersOnShard()
    table = ClockTable(workers)
    for each in records:
        table.install(each)
    for clock in range(1, applied_clock + 1):
        complete(table, workers, clock)
    return table


def complete(table: ClockTable, workers: MembersOnShard, clock: int) -> None:
    for each in table.contributors(clock):
        workers.of(each.worker).window.finish(each.sequence_of(clock), Outcome.APPLIED)
    table.complete(clock)
    table.note_progress()


def names(table: ClockTable, clock: int) -> list[str]:
    return [str(each.worker) for each in table.contributors(clock)]


def test_nobody_contributes_before_the_first_record() -> None:
    assert ClockTable(MembersOnShard()).contributors(1) == ()
    assert not ClockTable(MembersOnShard()).is_empty(1)
    assert ClockTable(MembersOnShard()).version == 0


def test_contributors_come_in_the_order_of_worker_ids() -> None:
    table = table_with(record({"b": 0, "c": 0, "a/2": 0, "a": 0}))

    assert names(table, 1) == ["a/1", "a/2", "b/1", "c/1"]


def test_a_joiner_contributes_from_the_clock_after_its_base() -> None:
    table = table_with(record({"a": 0, "b": 4}))

    assert names(table, 4) == ["a/1"]
    assert names(table, 5) == ["a/1", "b/1"]


def test_one_that_ended_contributes_up_to_its_last_clock() -> None:
    table = table_with(
        record({"a": 0, "b": 1}),
        record({"a": 0}, generation=2, departures=(departure("b", last_clock=3),)),
    )

    assert [names(table, clock) for clock in (3, 4)] == [["a/1", "b/1"], ["a/1"]]


def test_one_that_ended_is_told_apart_after_more_records() -> None:
    table = table_with(
        record({"a": 0, "b": 0}),
        record({"a": 0}, generation=2, departures=(departure("b", last_clock=2),)),
        record({"a": 0, "c": 2}, generation=3),
    )

    assert names(table, 2) == ["a/1", "b/1"]
    assert table.departure_of(key("b")) == departure("b", last_clock=2)
    assert table.member_of(key("b")) is None


def test_one_that_ended_is_asked_for_until_its_last_clock_is_behind() -> None:
    records = (
        record({"a": 0, "b": 0}),
        record({"a": 0}, generation=2, departures=(departure("b", last_clock=2),)),
    )
    at_last = table_with(*records, applied_clock=2)
    behind = table_with(*records, applied_clock=3)

    assert names(at_last, 2) == ["a/1", "b/1"]
    assert [each.worker for each in at_last.senders] == [key("a")]
    assert names(behind, 3) == ["a/1"]


def test_an_older_or_equal_record_changes_nothing() -> None:
    newest = record({"a": 0}, generation=3)
    table = table_with(newest)

    table.install(record({"b": 0}, generation=3))
    table.install(record({"c": 0}, generation=2))

    assert table.record is newest
    assert names(table, 1) == ["a/1"]


def test_clocks_complete_in_order() -> None:
    table = table_with(record({"a": 0}), applied_clock=1)
    with pytest.raises(AssertionError):
        table.complete(3)
    assert (table.applied_clock, table.frontier) == (1, 1)


def test_the_longest_contributor_comes_first_then_the_lowest_id() -> None:
    assert longest_of((member("a", 3), member("b", 1))).worker == key("b")
    assert longest_of((member("b", 1), member("a", 1))).worker == key("a")


def test_clocks_before_everybodys_base_are_empty() -> None:
    table = table_with(record({"a": 3, "b": 5}))

    assert [table.is_empty(clock) for clock in (1, 2, 3, 4)] == [
        True,
        True,
        True,
        False,
    ]


def test_without_members_clocks_are_empty_up_to_a_cut() -> None:
    table = table_with(record({}))

    assert not table.is_empty(1)
    assert table.is_empty(1, cut_clock=1)
    assert not table.is_empty(2, cut_clock=1)


def test_a_clock_that_one_that_ended_owes_is_not_empty() -> None:
    table = table_with(record({}, departures=(departure("b", last_clock=1),)))

    assert not table.is_empty(1, cut_clock=1)


@pytest.mark.parametrize(
    ("clock", "version"), [(0, 0), (1, 2), (2, 4), (3, 7), (4, 9), (5, 11)]
)
def test_a_version_counts_the_steps_that_are_in_the_values(
    clock: int, version: int
) -> None:
    """`b` ended after 3 clocks, `c` joined at 2, `a` was there all the time."""
    newest = record(
        {"a": 0, "c": 2},
        departures=(departure("b", last_clock=3),),
        departed_step_count=3,
    )

    assert newest.version_at(clock) == version


def test_a_departure_of_no_steps_counts_none() -> None:
    gone = departure("b", base_clock=4, last_clock=3)
    newest = record({}, departures=(gone,), departed_step_count=gone.last_sequence)

    assert gone.last_sequence == 0
    assert [newest.version_at(clock) for clock in (0, 3, 4, 9)] == [0, 0, 0, 0]


def test_a_joiner_is_not_told_a_clock_whose_update_is_still_to_come() -> None:
    """Its base says clock 2, of which the last contributors' pushes are staged."""
    shard = DrivenShard({"a": 0, "b": 0}, [0])
    for name in "ab":
        shard.push(name, chunks=[0])
    shard.apply_all()
    shard.freeze(2)
    for name in "ab":
        shard.push(name, 2, chunks=[0])
    gone = tuple(departure(name, last_clock=2, evicted=True) for name in "ab")

    shard.install(
        record({"j": 2}, generation=2, departures=gone, departed_step_count=4)
    )

    assert shard.core.clocks.frontier == 1
    assert not shard.core.admits_pull(key("j"), 2)
    shard.apply_all()
    assert shard.core.clocks.frontier == 2
    assert shard.core.admits_pull(key("j"), 2)


@pytest.mark.parametrize("mode", [Mode.BSP, Mode.SSP, Mode.ASP])
def test_a_job_that_goes_on_begins_at_the_clock_of_its_checkpoint(mode: Mode) -> None:
    clock = 2_000_000
    shard = DrivenShard({}, [0])
    first = record(
        {"a": clock, "b": clock},
        departed_step_count=4_000_000,
        mode=mode,
        mode_clock=clock,
    )
    shard.install(first)
    clocks = shard.core.clocks
    assert (clocks.applied_clock, clocks.frontier) == (clock, clock)
    assert clocks.version == 4_000_000
    assert clocks.is_settled

    shard.push("a", chunks=[0])
    shard.push("b", chunks=[0])
    shard.apply_all()

    assert (clocks.frontier, clocks.version) == (clock + 1, 4_000_002)
