"""How fast a job has trained, in a bounded number of points."""

import itertools

from psserver.coordinator.core.progress_history import (
    FIRST_INTERVAL_MS,
    POINT_COUNT_MAX,
    ProgressHistory,
)


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


def test_what_is_not_counted_has_no_rate_and_a_return_is_no_negative_one() -> None:
    history = ProgressHistory()
    for now_ms, step_count in ((0, 0), (1_000, 50), (2_000, 20)):
        history.add(
            now_ms, clock=step_count, step_count=step_count, sample_count=0, metrics={}
        )
    assert [p.steps_per_s for p in history.points] == [50.0, 0.0]
    assert [p.samples_per_s for p in history.points] == [None, None]
