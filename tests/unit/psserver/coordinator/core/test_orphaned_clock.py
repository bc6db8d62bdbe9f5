"""A job that clips, at its coordinator: one norm for all, and clocks nobody commits."""

import math
from dataclasses import replace

import pytest

from psserver.coordinator.core.orphaned_clock import measured_commit, orphaned_clock
from psserver.edge.coordinator_settings import CoordinatorSettings
from psserver.edge.fence_report import FenceReport
from pswire.aggregation import Aggregation, UpdateRules
from pswire.clipping import gradient_scale
from pswire.membership import (
    ClockChoice,
    FenceKind,
    Mode,
    StepAtomicity,
    WorkerState,
)
from pswire.reasons import ErrorReason, Refusal
from tests.doubles.core_values import (
    TERMS,
    choice,
    departure,
    key,
    record,
)
from tests.doubles.driven_coordinator import DrivenCoordinator, WritingCore

CLIP = UpdateRules(clip_grad_norm=1.5)


def report(measured: ClockChoice | None) -> FenceReport:
    return FenceReport(
        fence_number=1,
        holdings=(),
        trailer_clock_max=0,
        touched_clock_max=0,
        applied_clock=0,
        measured=measured,
    )


def part(clock: int, *names: str, total: float = 1.0) -> ClockChoice:
    return choice(clock, *names)._replace(sum_of_squares=total)


# From what shards have measured


def test_the_scale_follows_from_the_parts_of_all_shards() -> None:
    reports = [report(part(3, "a", "b", total=each)) for each in (0.1, 0.2, 8.7)]

    found = measured_commit(reports, CLIP)

    total = math.fsum((0.1, 0.2, 8.7))
    scale = gradient_scale(math.sqrt(total), 1.5)
    assert found == ClockChoice(3, (key("a"), key("b")), total, scale)
    assert scale == pytest.approx(0.5)


@pytest.mark.parametrize(
    "parts",
    [
        [part(3, "a"), None],
        [part(3, "a"), part(3, "a", "b")],
        [part(3, "a"), part(4, "a")],
    ],
)
def test_shards_that_differ_commit_nothing(parts: list[ClockChoice | None]) -> None:
    assert measured_commit([report(each) for each in parts], CLIP) is None


def test_a_job_that_does_not_clip_commits_nothing_by_this() -> None:
    assert measured_commit([report(part(3, "a"))], UpdateRules()) is None


# Nobody left


@pytest.mark.parametrize(
    ("bases", "ends", "commit", "expected"),
    [
        ({}, {"a": 4}, 0, 4),
        ({}, {"a": 4}, 4, 0),
        ({}, {"a": 4}, 3, 4),
        ({}, {"a": 4, "b": 3}, 0, 4),
        ({"c": 4}, {"a": 4}, 0, 4),  # it came after that clock
        ({"c": 3}, {"a": 4}, 0, 0),  # it contributes, and commits
        ({"c": 9, "d": 3}, {"a": 4}, 0, 0),
        ({}, {}, 0, 0),
        ({}, {"a": 0}, 0, 0),  # never pushed
    ],
)
def test_a_clock_is_orphaned_when_no_contributor_is_left(
    bases: dict[str, int], ends: dict[str, int], commit: int, expected: int
) -> None:
    what = record(
        bases,
        generation=2,
        departures=tuple(
            departure(name, last_clock=clock, evicted=True)
            for name, clock in ends.items()
        ),
        commit=choice(commit, "a") if commit else None,
    )
    assert orphaned_clock(what) == expected


def test_what_was_pushed_in_asp_is_no_clock() -> None:
    gone = departure("a", base_clock=2, last_clock=4)
    asp = record({}, generation=2, departures=(gone,), mode=Mode.ASP, mode_clock=3)
    assert orphaned_clock(asp) == 0
    assert orphaned_clock(replace(asp, mode_clock=4)) == 4


def orphaned() -> DrivenCoordinator:
    """One worker was lost after it had pushed clock 1; the other came after that."""
    job = DrivenCoordinator.running("a", clip_grad_norm=1.5)
    job.add_worker("b")
    job.report_all(trailer=1)
    assert job.bases == {"a/1": 0, "b/1": 1}
    job.lose(job.core.roster.entry(key("a")))
    job.forget()
    job.send_all(job.report_of(complete={"a": 1}, trailer=1))
    assert job.bases == {"b/1": 1}
    assert job.record.commit is None
    return job


def test_another_record_commits_a_clock_that_nobody_is_left_of() -> None:
    job = orphaned()
    assert job.fence_kinds() == [FenceKind.MEMBERSHIP]

    for index, total in enumerate((1.0, 8.0)):
        job.send(index, job.report_of(trailer=1, measured=part(1, "a", total=total)))

    scale = gradient_scale(3.0, 1.5)
    assert job.record.commit == ClockChoice(1, (key("a"),), 9.0, scale)
    assert job.record.generation == 4
    assert job.core.fence is None


def test_it_is_asked_for_again_until_all_shards_have_measured_it() -> None:
    job = orphaned()
    job.send(0, job.report_of(trailer=1, measured=part(1, "a")))
    job.send(1, job.report_of(trailer=1))
    assert job.record.commit is None
    assert job.core.fence is None

    job.pass_time(50)
    job.send_all(job.report_of(trailer=1, measured=part(1, "a")))

    assert job.record.commit is not None
    assert job.core.fence is None


def test_a_clock_that_is_complete_by_then_needs_no_other_record() -> None:
    job = DrivenCoordinator.running("a", "b", clip_grad_norm=1.5)
    job.leave(job.core.roster.entry(key("a")), 4)
    job.report_all(applied=4)
    job.leave(job.core.roster.entry(key("b")), 4)
    job.report_all(applied=4)

    assert job.record.members == ()
    assert job.core.fence is None


def test_a_coordinator_that_is_started_again_asks_for_it_too() -> None:
    old = orphaned()
    job = DrivenCoordinator(settings=old.core.settings)
    job.core = WritingCore(old.core.settings, 1)
    job.core.restore(
        terms=replace(TERMS, clip_grad_norm=1.5),
        record=old.record,
        incarnations={"a": 1, "b": 1},
        processes={},
        now_ms=0,
    )
    job.add_shards()
    job.pass_time(1)
    job.send_all(job.report_of(trailer=1, measured=part(1, "a", total=2.0)))

    assert job.record.commit is not None
    assert job.record.commit.sum_of_squares == 4.0


def test_a_job_that_does_not_clip_needs_no_other_record() -> None:
    job = DrivenCoordinator.running("a")
    job.add_worker("b")
    job.report_all(trailer=1)
    job.lose(job.core.roster.entry(key("a")))
    job.send_all(job.report_of(complete={"a": 1}, trailer=1))

    assert job.core.fence is None


def test_the_norm_is_one_for_the_whole_job() -> None:
    job = DrivenCoordinator.running("a", clip_grad_norm=1.5)
    other = job.register("b")
    job.watch(other)

    for theirs, told in ((0.0, "no clip_grad_norm"), (2.0, "clip_grad_norm=2")):
        with pytest.raises(Refusal) as caught:
            job.core.join(
                other,
                terms=replace(TERMS, clip_grad_norm=theirs),
                loaders=(),
                now_ms=0,
            )
        assert caught.value.reason is ErrorReason.OPTIMIZER_MISMATCH
        assert caught.value.message == (
            f"the job has clip_grad_norm=1.5, this worker has {told}"
        )
        assert caught.value.cure == "give all workers' prepare() the same"
    assert other.state is WorkerState.REGISTERED


@pytest.mark.parametrize("wrong", [-1.0, math.nan, math.inf])
def test_what_is_no_norm_is_refused(wrong: float) -> None:
    job = DrivenCoordinator()
    job.clip_grad_norm = wrong
    with pytest.raises(Refusal, match="no norm to clip to: it must be finite and more"):
        job.add_worker("a")
    assert job.core.model.schema is None


# Backup workers: who counts is certain before the scale is


def chosen_of(job: DrivenCoordinator, index: int, **more: object) -> FenceReport:
    """What a shard reports when shard 0 has chosen a alone for clock 1."""
    report = job.report_of(complete={"a": 1, "b": 1}, trailer=1)
    chosen = choice(1, "a")._replace(gradient_scale=0.0) if index == 0 else None
    return replace(report, chosen=chosen, **more)  # type: ignore[arg-type]


def with_backups() -> DrivenCoordinator:
    settings = CoordinatorSettings(
        job_id="job",
        shard_count=2,
        step_atomicity=StepAtomicity.CLOCK,
        backup_worker_count=1,
    )
    return DrivenCoordinator.running("a", "b", settings=settings, clip_grad_norm=1.5)


def test_a_choice_stands_in_a_record_before_its_scale_is_known() -> None:
    job = with_backups()
    job.lose(job.core.roster.entry(key("b")))
    for index in (0, 1):
        job.send(index, chosen_of(job, index))

    assert job.record.commit == choice(1, "a")._replace(gradient_scale=0.0)
    assert job.core.fence is None  # a is there to commit it


def test_a_choice_whose_drivers_are_lost_is_committed_by_another_record() -> None:
    job = with_backups()
    job.lose(job.core.roster.entry(key("a")))
    for index in (0, 1):
        job.send(index, chosen_of(job, index))
    assert job.record.commit == choice(1, "a")._replace(gradient_scale=0.0)

    measured = part(1, "a", total=2.0)._replace(gradient_scale=0.0)
    for index in (0, 1):
        job.send(index, chosen_of(job, index, measured=measured))

    assert job.record.commit == ClockChoice(
        1, (key("a"),), 4.0, gradient_scale(2.0, 1.5)
    )
    assert job.core.fence is None


def test_what_a_shard_has_committed_counts_before_what_was_chosen() -> None:
    job = with_backups()
    job.lose(job.core.roster.entry(key("b")))
    done = ClockChoice(1, (key("a"),), 9.0, 0.5)
    job.send(0, chosen_of(job, 0))
    job.send(1, chosen_of(job, 1, committed=done))

    assert job.record.commit == done


def test_a_worker_too_many_for_the_distances_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Of three workers there are six products on each of two shards.
    monkeypatch.setattr(
        "psserver.coordinator.core.coordinator.PRODUCT_COUNT_MAX", 2 * 6
    )
    settings = CoordinatorSettings(
        job_id="job", shard_count=2, aggregation=Aggregation.parse("krum:f=1")
    )
    job = DrivenCoordinator.running("a", "b", "c", settings=settings)

    with pytest.raises(Refusal) as caught:
        job.add_worker("d")

    assert caught.value.reason is ErrorReason.LIMIT_EXCEEDED
    assert caught.value.text.startswith(
        "the distances between the gradients of 4 workers on 2 shards are more than a "
        "commit brings"
    )
