"""What a worker says of its own work, and the means of its steps."""

from dataclasses import replace

import pytest

from psserver.coordinator.core.work import (
    LATELY_MS,
    REPORT_COUNT_MAX,
    Logged,
    RecentWork,
    Work,
)
from pswire.limits import JOB_METRIC_COUNT_MAX
from pswire.membership import WorkerState
from tests.doubles.driven_coordinator import DrivenCoordinator


def _work(steps: int, *, compute_ms: float = 100.0, load_ms: float = 0.0) -> Work:
    """A worker whose first step has taken a second, and the others as they say."""
    return Work(
        step_count=steps,
        sample_count=32 * steps,
        compute_s=1.0 + (steps - 1) * compute_ms / 1000,
        load_s=steps * load_ms / 1000,
        sent_bytes=10 * steps,
        received_bytes=30 * steps,
    )


def test_the_first_step_is_no_part_of_the_means() -> None:
    recent = RecentWork()
    assert recent.lately() is None
    recent.take(Work(compute_s=0.5), 0)
    recent.take(_work(1), 2_000)
    assert recent.lately() is None
    recent.take(_work(11, load_ms=25.0), 4_000)
    means = recent.lately()
    assert means is not None
    assert (means.compute_ms, means.load_ms) == (pytest.approx(100.0), 27.5)
    assert means.steps_per_s == pytest.approx(10 / 1.275)
    assert means.samples_per_s == pytest.approx(320 / 1.275)
    assert means.bytes_per_step == 40


def test_the_means_are_of_the_last_ten_seconds_or_of_the_last_steps() -> None:
    recent = RecentWork()
    now_ms = 0
    for steps in range(1, 21):
        recent.take(_work(steps), now_ms)
        now_ms += 1_000
    slow = _work(25, compute_ms=0.0)
    for _ in range(LATELY_MS // 1_000 + 1):
        slow = Work(step_count=slow.step_count + 1, compute_s=slow.compute_s + 3 + 5)
        recent.take(slow, now_ms)
        now_ms += 1_000
    means = recent.lately()
    assert means is not None
    assert means.compute_ms == pytest.approx(8_000)
    for _ in range(2 * REPORT_COUNT_MAX):  # a step that takes very long
        slow = Work(step_count=slow.step_count, compute_s=slow.compute_s + 1)
        recent.take(slow, now_ms)
        now_ms += 2_000
    assert recent.lately() is not None


def test_an_older_report_that_comes_late_changes_nothing() -> None:
    recent = RecentWork()
    assert recent.take(_work(5), 0) == 0
    assert recent.take(_work(9), 2_000) == 4 * 32
    assert recent.take(_work(7), 2_001) == 0
    assert recent.newest == _work(9)


def test_samples_are_never_counted_down() -> None:
    recent = RecentWork()
    recent.take(_work(5), 0)
    assert recent.take(replace(_work(9), sample_count=1), 2_000) == 0


def test_names_of_one_workers_own_never_crowd_out_those_of_all() -> None:
    count = JOB_METRIC_COUNT_MAX
    driven = DrivenCoordinator.running("a", "b")
    first, second = driven.core.roster.in_state(WorkerState.MEMBER)
    own = {f"a{number:03}": Logged(1.0, 1) for number in range(count)}
    loss = {"loss": Logged(3.0, 1)}
    driven.core.report_work(first, Work(step_count=1, metrics=own | loss), 0)
    driven.core.report_work(second, Work(step_count=1, metrics=loss), 0)
    assert len(driven.core.metrics) == count
    assert driven.core.metrics["loss"] == 3.0


def test_who_is_no_member_has_done_nothing() -> None:
    driven = DrivenCoordinator.running("a")
    stranger = driven.register("stranger")
    driven.core.report_work(stranger, _work(3), 0)
    assert stranger.work.newest is None


def test_who_is_evicted_or_replaced_is_forgotten_with_its_reports() -> None:
    driven = DrivenCoordinator.running("a", "b")
    core = driven.core
    first, second = core.roster.in_state(WorkerState.MEMBER)
    for entry in (first, second):
        core.report_work(entry, _work(3), 0)
        core.report_work(entry, _work(13), 2_000)
    assert core.sample_count == 2 * 10 * 32
    driven.lose(second)
    driven.report_all()
    assert second.work.newest is None
    assert first.work.newest is not None
    assert core.sample_count == 2 * 10 * 32
