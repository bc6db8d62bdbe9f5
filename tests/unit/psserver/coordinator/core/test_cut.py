"""A cut names, of each member, its last push that is in: the same on every shard."""

from dataclasses import replace

import pytest

from psserver.coordinator.core.cut import Cut, cut_after
from psserver.coordinator.core.snapshots import SnapshotList
from psserver.edge.fence_report import FenceReport, WorkerHolding
from pswire.membership import ClockChoice, Member, Mode
from tests.doubles.core_values import departure, key, record


def report(
    trailers: dict[str, int] | None = None,
    *,
    touched: int = 0,
    applied: int = 0,
    frontier: int = 0,
) -> FenceReport:
    return FenceReport(
        fence_number=1,
        holdings=tuple(
            WorkerHolding(
                worker=key(name), complete_sequence=0, trailer_sequence=sequence
            )
            for name, sequence in (trailers or {}).items()
        ),
        trailer_clock_max=touched,
        touched_clock_max=touched,
        applied_clock=applied,
        frontier=frontier,
    )


A = Member(worker=key("a"), rank=0, base_clock=40, base_sequence=12)
B = Member(worker=key("b"), rank=1, base_clock=40, base_sequence=40)
LATE = Member(worker=key("c"), rank=2, base_clock=43)


def test_in_bsp_it_is_one_clock() -> None:
    job = record({"a": 0, "b": 5})
    cut = cut_after(job, [report(touched=7, applied=6), report(touched=6, applied=6)])

    assert cut.clock == 7
    assert dict(cut.sequences) == {key("a"): 7, key("b"): 2}
    assert cut.version == job.version_at(7) == 9


def test_in_bsp_who_joined_after_it_has_nothing_in_it() -> None:
    cut = cut_after(record({"a": 0, "b": 9}), [report(touched=7, applied=7)])
    assert dict(cut.sequences) == {key("a"): 7, key("b"): 0}


def test_in_bsp_a_clock_that_is_committed_or_chosen_is_in() -> None:
    choice = ClockChoice(8, (key("a"),))
    quiet = report(touched=7, applied=7)
    for begun in (replace(quiet, committed=choice), replace(quiet, chosen=choice)):
        assert cut_after(record({"a": 0}), [begun, quiet]).clock == 8


def test_in_bsp_all_of_the_mode_before_is_in() -> None:
    """Its pushes are applied one by one, and some shard may be ahead."""
    job = replace(record({}), members=(A, B, LATE), mode_clock=40)
    cut = cut_after(job, [report(applied=12, touched=13), report(applied=12)])

    assert cut.clock == 40
    assert dict(cut.sequences) == {key("a"): 12, key("b"): 40, key("c"): 0}
    assert cut.version == 52
    later = cut_after(job, [report(touched=45, applied=44)])
    assert dict(later.sequences) == {key("a"): 17, key("b"): 45, key("c"): 2}
    assert later.version == 64


@pytest.mark.parametrize("mode", [Mode.SSP, Mode.ASP])
def test_without_clocks_it_is_the_last_push_of_which_any_shard_has_the_trailer(
    mode: Mode,
) -> None:
    job = replace(
        record({"a": 0, "b": 5}, departed_step_count=100, departures=()), mode=mode
    )
    cut = cut_after(job, [report({"a": 30, "b": 2}), report({"a": 29, "b": 3})])

    assert dict(cut.sequences) == {key("a"): 30, key("b"): 3}
    assert cut.clock == 8
    assert cut.version == 133


def test_without_clocks_pushes_before_the_base_are_in() -> None:
    job = replace(record({}), members=(A, B, LATE), mode=Mode.ASP, mode_clock=40)
    cut = cut_after(job, [report({"a": 11, "b": 44})])
    assert dict(cut.sequences) == {key("a"): 12, key("b"): 44, key("c"): 0}
    assert cut.clock == 40


def test_without_clocks_those_of_bsp_before_are_in_with_all_that_are_part_of_them() -> (
    None
):
    gone = departure("z", last_clock=6)
    job = replace(
        record({"a": 0, "b": 2}, departures=(gone,), departed_step_count=6),
        mode=Mode.SSP,
        mode_clock=7,
    )
    cut = cut_after(job, [report({"a": 9, "b": 4}), report({"a": 6, "b": 3})])
    assert dict(cut.sequences) == {key("a"): 9, key("b"): 5}
    assert cut.version == 20


@pytest.mark.parametrize("mode", list(Mode))
def test_with_nobody_there_it_holds_all_that_was_done(mode: Mode) -> None:
    job = replace(record({}, departed_step_count=9), mode=mode, mode_clock=3)
    cut = cut_after(job, [report(touched=4, applied=4, frontier=4)])
    assert cut == Cut(clock=4, sequences=(), version=9)


@pytest.mark.parametrize(
    ("other", "is_newest"),
    [
        (Cut(clock=4, sequences=((key("a"), 4),), version=9), True),
        (Cut(clock=5, sequences=((key("a"), 4),), version=9), False),
        (Cut(clock=4, sequences=((key("a"), 4),), version=10), False),
        (Cut(clock=4, sequences=((key("b"), 4),), version=9), False),
        (Cut(clock=4, sequences=(), version=9), False),
    ],
)
def test_a_snapshot_is_the_newest_only_for_the_same_pushes(
    other: Cut, is_newest: bool
) -> None:
    snapshots = SnapshotList(shard_count=1, pin_ttl_ms=10)
    cut = Cut(clock=4, sequences=((key("a"), 4),), version=9)
    assert not snapshots.is_newest(cut)
    entry = snapshots.decide(cut, generation=1)
    snapshots.copied(entry.snapshot_id, 0)
    assert snapshots.is_newest(other) is is_newest
