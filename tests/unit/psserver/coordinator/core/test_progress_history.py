"""How fast a job has trained, in a bounded number of points."""

import itertools

from psserver.coordinator.core.progress_history import (
    FIRST_INTERVAL_MS,
    POINT_COUNT_MAX,
    RATE_MS,
    ProgressHistory,
)
from psserver.coordinator.core.shard_map import ShardStanding
from pswire.membership import WorkerKey
from tests.doubles.driven_coordinator import DrivenCoordinator


def _fill(history: ProgressHistory, until_ms: int) -> None:
    """A job of 8 steps and 80 samples a second."""
    for now_ms in range(0, until_ms + 1, FIRST_INTERVAL_MS):
        if history.is_due(now_ms):
            history.add(
                now_ms,
                clock=now_ms // 250,
                step_count=now_ms * 8 // 1000,
                sample_count=now_ms * 80 // 1000,
                metrics={"loss": 1 / (1 + now_ms)},
            )


def test_rates_are_of_the_time_between_two_points() -> None:
    history = ProgressHistory()
    _fill(history, 3_000)
    assert [point.at_ms for point in history.points] == [1_000, 2_000, 3_000]
    assert {(p.steps_per_s, p.samples_per_s) for p in history.points} == {(8.0, 80.0)}
    assert history.points[-1].clock == 12


def test_the_whole_job_stays_in_view_ever_more_coarsely() -> None:
    history = ProgressHistory()
    _fill(history, 40 * POINT_COUNT_MAX * FIRST_INTERVAL_MS)
    points = history.points
    assert POINT_COUNT_MAX // 2 <= len(points) <= POINT_COUNT_MAX
    assert history.interval_ms == 64 * FIRST_INTERVAL_MS
    gaps = {b.at_ms - a.at_ms for a, b in itertools.pairwise(points)}
    assert gaps == {history.interval_ms}
    assert points[0].at_ms <= history.interval_ms
    assert {round(point.steps_per_s, 9) for point in points} == {8.0}


def test_reports_that_come_every_two_seconds_make_no_saw_of_a_rate() -> None:
    history = ProgressHistory()
    for second in range(20):
        history.add(
            second * 1_000,
            clock=second,
            step_count=8 * second,
            sample_count=160 * (second // 2),
            metrics={},
        )
    late = [p.samples_per_s for p in history.points if p.at_ms >= RATE_MS]
    assert late == [80.0] * len(late) != []


def test_a_pause_shows_once_it_is_as_long_as_a_rate_is_of() -> None:
    history = ProgressHistory()
    for second in range(20):
        step_count = 8 * min(10, second)
        history.add(
            second * 1_000, clock=0, step_count=step_count, sample_count=0, metrics={}
        )
    rates = {point.at_ms: point.steps_per_s for point in history.points}
    assert (rates[10_000], rates[10_000 + RATE_MS]) == (8.0, 0.0)


def test_what_is_not_counted_has_no_rate_and_no_rate_spans_a_return() -> None:
    history = ProgressHistory()
    for second, step_count in enumerate((0, 50, 20, 30)):
        history.add(
            second * 1_000,
            clock=step_count,
            step_count=step_count,
            sample_count=0,
            metrics={},
        )
    assert [(p.at_ms, p.steps_per_s) for p in history.points] == [
        (1_000, 50.0),
        (3_000, 10.0),
    ]
    assert [p.samples_per_s for p in history.points] == [None, None]


def test_the_version_of_a_checkpoint_is_no_speed() -> None:
    """As after a return: shards report none, then that of the checkpoint."""
    driven = DrivenCoordinator.running("a")
    slots, history = driven.core.shards.slots, driven.core.history

    def report(version: int, done: dict[WorkerKey, int]) -> None:
        for slot in slots:
            standing = ShardStanding(heard_ms=driven.now_ms, version=version, done=done)
            slot.take(standing)
        driven.pass_time(1_000)

    member = driven.record.members[0].worker
    report(0, {})
    report(1_197, {member: 0})
    assert driven.core.shards.steps_per_s is None
    for version in (1_207, 1_217):
        report(version, {member: version})
    assert driven.core.shards.steps_per_s == 10
    assert {point.steps_per_s for point in history.points} == {10.0}
