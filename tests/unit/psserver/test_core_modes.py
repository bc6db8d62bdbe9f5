"""Changing the mode: one record, one numbering of pushes, no version that changes."""

from dataclasses import replace

import pytest

from psserver.coordinator.core.coordinator_effects import Abort, DecideCut
from psserver.coordinator.core.job_progress import MODE_RETRY_MS
from psserver.edge.coordinator_settings import JobPhase
from psserver.edge.fence_report import WorkerHolding
from pswire.aggregation import Aggregation
from pswire.limits import STALENESS_BOUND_MAX
from pswire.membership import (
    ClockChoice,
    FenceKind,
    Mode,
    ModeTerms,
    Record,
    WorkerKey,
)
from pswire.reasons import ErrorReason
from tests.doubles.core_values import TERMS, key
from tests.doubles.driven_coordinator import DrivenCoordinator, WritingCore
from tests.doubles.driven_modes import SETTINGS, ask, far_apart, running
from tests.refusals import refused


def place_of(record: Record, name: str) -> tuple[int, int]:
    member = record.member_of(key(name))
    assert member is not None
    return member.base_clock, member.base_sequence


def lasts_of(record: Record) -> dict[WorkerKey, int]:
    return {m.worker: m.base_sequence for m in record.members}


# Asking


def test_there_is_no_mode_to_change_before_the_start() -> None:
    job = DrivenCoordinator()
    with refused(ErrorReason.NOT_STARTED, "waits for shard 0"):
        ask(job, Mode.ASP)
    assert not job.core.mode_is(ModeTerms(Mode.BSP, 0))


@pytest.mark.parametrize("bound", [-1, STALENESS_BOUND_MAX + 1])
def test_a_bound_that_is_out_of_range_is_refused(bound: int) -> None:
    job = running("a")
    with refused(ErrorReason.MALFORMED_MESSAGE, f"bound {bound} is not in 0 to"):
        ask(job, Mode.SSP, bound)
    assert job.fence_kinds() == []


def test_a_rule_needs_as_many_pushes_as_it_says() -> None:
    settings = replace(SETTINGS, aggregation=Aggregation.parse("krum:f=1"))
    job = DrivenCoordinator.running("a", settings=settings)
    with refused(ErrorReason.UNSUPPORTED, "= 5, and a clock would close with 4"):
        job.core.set_mode(ModeTerms(Mode.QUORUM, quorum=4), job.now_ms)
    assert job.fence_kinds() == []
    job.core.set_mode(ModeTerms(Mode.QUORUM, quorum=5), job.now_ms)
    assert job.fence_kinds() == [FenceKind.MODE]


@pytest.mark.parametrize(
    ("mode", "bound", "same_bound"),
    [(Mode.BSP, 0, 7), (Mode.SSP, 3, 3), (Mode.ASP, 0, 7)],
)
def test_the_mode_that_is_there_needs_no_fence(
    mode: Mode, bound: int, same_bound: int
) -> None:
    """A bound means nothing outside SSP."""
    job = running("a", mode=mode, bound=bound)
    ask(job, mode, same_bound)
    assert job.fence_kinds() == []
    assert job.core.mode_is(ModeTerms(mode, same_bound))


def test_another_bound_is_a_change() -> None:
    job = running("a", mode=Mode.SSP, bound=3)
    ask(job, Mode.SSP, 5)
    far_apart(job, a=4)

    assert job.core.mode_is(ModeTerms(Mode.SSP, 5))
    assert not job.core.mode_is(ModeTerms(Mode.SSP, 3))
    assert job.record.staleness_bound == 5


def test_the_newest_wish_counts() -> None:
    job = running("a")
    job.core.want_cut(0)  # keeps a fence open meanwhile
    ask(job, Mode.ASP)
    ask(job, Mode.SSP, 2)
    job.report_all(applied=1)
    job.report_all(applied=1)

    assert job.fence_kinds()[:2] == [FenceKind.CUT, FenceKind.MODE]
    assert job.core.mode_is(ModeTerms(Mode.SSP, 2))


def test_a_wish_that_is_taken_back_changes_nothing() -> None:
    job = running("a")
    job.core.want_cut(0)
    ask(job, Mode.ASP)
    ask(job, Mode.BSP)
    job.report_all(applied=1)
    assert job.fence_kinds() == [FenceKind.CUT]


def test_a_wish_that_comes_during_the_change_is_met_after_it() -> None:
    job = running("a")
    ask(job, Mode.ASP)
    ask(job, Mode.BSP)
    job.report_all(applied=1)
    assert job.core.mode_is(ModeTerms(Mode.ASP, 0))
    far_apart(job, a=1)
    assert job.core.mode_is(ModeTerms(Mode.BSP, 0))
    assert job.core.fence is None


# What the record says


@pytest.mark.parametrize("mode", [Mode.SSP, Mode.ASP])
def test_from_bsp_members_keep_their_numbers_and_finish_the_clocks_begun(
    mode: Mode,
) -> None:
    job = running("a", "b")
    job.add_worker("c")
    job.report_all(applied=2)
    before = job.record
    ask(job, mode, 3)
    job.report(0, applied=6, trailer=7)
    job.report(1, applied=6)

    now = job.record
    assert (now.kind, now.mode, now.mode_clock) == (FenceKind.MODE, mode, 7)
    assert now.staleness_bound == (3 if mode is Mode.SSP else 0)
    assert now.members == before.members
    assert now.generation == before.generation + 1


@pytest.mark.parametrize("target", [Mode.BSP, Mode.SSP])
def test_without_clocks_members_meet_at_the_largest_clock_of_any(target: Mode) -> None:
    job = running("a", "b", mode=Mode.ASP)
    ask(job, target, 4)
    far_apart(job, a=3, b=90)

    now = job.record
    assert (now.mode, now.mode_clock) == (target, 90)
    assert place_of(now, "a") == (90, 3)
    assert place_of(now, "b") == (90, 90)


def test_the_last_push_is_the_highest_of_which_any_shard_has_the_trailer() -> None:
    job = running("a", mode=Mode.ASP)
    ask(job, Mode.BSP)
    for index, sequence in enumerate((4, 5)):
        holding = WorkerHolding(
            worker=key("a"), complete_sequence=4, trailer_sequence=sequence
        )
        job.send(index, replace(job.report_of(), holdings=(holding,)))
    assert place_of(job.record, "a") == (5, 5)


def test_there_and_back_again_no_clock_goes_back() -> None:
    job = running("a", "b")
    ask(job, Mode.ASP)
    job.report_all(applied=10)
    ask(job, Mode.BSP)
    far_apart(job, a=12, b=40)
    ask(job, Mode.SSP, 1)
    job.report_all(applied=42)
    ask(job, Mode.ASP)
    far_apart(job, a=14, b=43)

    clocks = [r.mode_clock for r in job.announced()]
    assert clocks == [10, 40, 42, 43]
    assert place_of(job.record, "a") == (43, 14)
    assert place_of(job.record, "b") == (43, 43)


def test_a_quorum_takes_over_the_clock_that_is_open() -> None:
    """Unless some shard has begun it, or has committed it, or all have all of it."""
    job = running("a", "b")
    lower, quorum = ModeTerms(Mode.QUORUM, quorum=1), ModeTerms(Mode.QUORUM, quorum=2)
    job.core.set_mode(quorum, job.now_ms)
    job.report_all(applied=5, trailer=6)
    assert (job.record.mode_clock, job.record.terms_clock) == (0, 5)
    assert job.record.change_clock == 5
    assert job.record.terms == quorum
    job.core.set_mode(lower, job.now_ms)
    report = job.report_of(applied=6, trailer=7)
    job.send_all(replace(report, chosen=ClockChoice(7, (key("a"),))))
    assert (job.record.mode_clock, job.record.terms_clock) == (0, 7)
    ask(job, Mode.ASP)
    job.report_all(applied=7, trailer=8)
    assert (job.record.mode_clock, job.record.terms_clock) == (8, 8)


def test_with_nobody_there_a_mode_begins_where_the_last_ones_were() -> None:
    job = running("a", mode=Mode.ASP)
    job.leave(job.core.roster.entry(key("a")), 9)
    far_apart(job, a=9)
    assert job.phase() is JobPhase.FINISHED
    ask(job, Mode.BSP)
    job.send_all(replace(job.report_of(), frontier=9))

    assert job.core.mode_is(ModeTerms(Mode.BSP, 0))
    assert job.record.mode_clock == 9
    job.add_worker("b")
    job.report_all()
    assert job.bases == {"b/1": 9}


# The version


def test_no_change_of_mode_changes_the_version() -> None:
    job = running("a", "b", "c")
    job.lose(job.core.roster.entry(key("c")))
    job.report(0, applied=6, complete={"c": 7})
    job.report(1, applied=6, complete={"c": 6})
    job.add_worker("d")
    job.report_all(applied=7)
    in_bsp = job.record.version_at(9)
    ask(job, Mode.ASP)
    job.report_all(applied=8, trailer=9)
    in_asp = job.record
    lasts = {m.worker: m.sequence_of(9) for m in in_asp.members}
    assert in_asp.version_of(lasts) == in_bsp == 9 + 9 + 6 + 2

    ask(job, Mode.BSP)
    far_apart(job, a=9, b=30, d=4)
    assert job.record.version_at(job.record.mode_clock) == 9 + 30 + 4 + 6
    assert job.record.version_of(lasts_of(job.record)) == 9 + 30 + 4 + 6


def test_who_ended_in_the_mode_before_counts_with_what_it_had() -> None:
    job = running("a", "b", mode=Mode.ASP)
    job.leave(job.core.roster.entry(key("b")), 50)
    far_apart(job, a=3, b=50)
    assert [end.last_clock for end in job.record.departures] == [50]
    ask(job, Mode.BSP)
    far_apart(job, a=3)

    assert job.record.departures == ()
    assert job.record.version_at(job.record.mode_clock) == 53
    assert job.record.version_at(job.record.mode_clock + 2) == 55


def test_who_departed_stays_part_of_clocks_that_the_mode_before_left_open() -> None:
    job = running("a", "b")
    job.leave(job.core.roster.entry(key("b")), 7)
    job.report(0, applied=7)
    job.report(1, applied=6, complete={"b": 7})
    ask(job, Mode.ASP)
    job.report(0, applied=7)
    job.report(1, applied=6)
    assert [(end.last_clock) for end in job.record.departures] == [7]
    assert job.record.mode_clock == 7

    job.add_worker("c")
    job.report(0, applied=7)
    job.report(1, applied=6)
    assert [(end.last_clock) for end in job.record.departures] == [7]
    job.add_worker("d")
    job.report_all(applied=7)
    assert job.record.departures == ()


# When


def test_a_mode_does_not_begin_before_the_one_before_it_is_settled() -> None:
    job = running("a", "b")
    ask(job, Mode.ASP)
    job.report_all(applied=6, trailer=7)
    ask(job, Mode.BSP)
    job.send(0, replace(job.report_of(applied=6), is_settled=False))
    job.send(1, job.report_of(applied=7))
    assert "mode before" in job.of(Abort)[-1].reason
    assert job.core.fence is None

    job.pass_time(MODE_RETRY_MS - 1)
    assert job.fence_kinds() == [FenceKind.MODE] * 2
    job.pass_time(1)
    assert job.fence_kinds() == [FenceKind.MODE] * 3
    far_apart(job, a=7, b=7)
    assert job.core.mode_is(ModeTerms(Mode.BSP, 0))
    job.pass_time(1_000)
    assert job.fence_kinds() == [FenceKind.MODE] * 3


def test_readers_get_snapshots_while_a_mode_can_not_begin() -> None:
    job = running("a")
    ask(job, Mode.ASP)
    job.report_all(applied=6, trailer=7)
    ask(job, Mode.BSP)
    job.core.want_cut(job.now_ms)
    job.send_all(replace(job.report_of(applied=6), is_settled=False))
    assert job.core.snapshots.failure == ""
    job.report_all(applied=6)
    (decided,) = job.of(DecideCut)
    job.pass_time(MODE_RETRY_MS)
    assert job.core.fence is None

    job.copy_all(decided.snapshot_id)
    assert job.core.snapshots.newest is not None
    assert job.fence_kinds()[-2:] == [FenceKind.CUT, FenceKind.MODE]


def test_a_cut_that_is_being_made_gives_way() -> None:
    job = running("a")
    job.core.want_cut(job.now_ms)
    job.report_all(applied=2)
    ask(job, Mode.ASP)
    assert "gave way to a change of mode" in job.core.snapshots.failure
    job.report_all(applied=2)
    assert job.fence_kinds() == [FenceKind.CUT, FenceKind.MODE, FenceKind.CUT]


def test_membership_changes_first() -> None:
    job = running("a")
    job.core.want_cut(job.now_ms)
    ask(job, Mode.ASP)
    job.add_worker("b")
    for _ in range(3):
        job.report_all(applied=2)

    kinds = job.fence_kinds()
    assert kinds[:3] == [FenceKind.CUT, FenceKind.MEMBERSHIP, FenceKind.MODE]
    assert job.core.mode_is(ModeTerms(Mode.ASP, 0))


def test_without_all_reports_it_is_tried_again() -> None:
    job = running("a")
    ask(job, Mode.ASP)
    job.report(0)
    job.pass_time(job.core.settings.fence_timeout_ms)
    assert [abort.reason for abort in job.of(Abort)] == ["no report from shard 1"]
    assert job.fence_kinds() == [FenceKind.MODE] * 2


def test_the_mode_outlives_the_coordinator() -> None:
    job = running("a")
    ask(job, Mode.SSP, 4)
    job.report_all(applied=3)
    newest = job.record
    core = WritingCore(SETTINGS, start_count=1)
    core.restore(
        terms=TERMS,
        record=newest,
        incarnations={"a": 1},
        processes={},
        now_ms=0,
    )
    assert core.mode_is(ModeTerms(Mode.SSP, 4))
    assert core.participants("loader") == ()
