"""How many steps a round has: fixed, growing, or by a share of the time."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from psworker.strategies.pace import (
    Fixed,
    Growing,
    ShareOfTime,
    Timing,
    pace_of,
)
from psworker.strategies.rounds import Progress


def seen(clock: int = 1, compute_s: float = 0.0, exchange_s: float = 0.0) -> Progress:
    return Progress(clock=clock, compute_s=compute_s, exchange_s=exchange_s)


checked = settings(derandomize=True, deadline=None)
_COUNTS = st.integers(1, 2000)
_SECONDS = st.floats(1e-6, 1e3)
_SHARES = st.floats(0.001, 0.999)


@checked
@given(steps=_COUNTS, before=st.none() | _COUNTS, clock=st.integers(1, 10**9))
def test_a_number_stays(steps: int, before: int | None, clock: int) -> None:
    assert pace_of(steps).step_count(before, seen(clock)) == steps


@checked
@given(
    first=st.integers(1, 500),
    by=st.floats(0.01, 100),
    extra=st.integers(0, 1000),
    clock=st.integers(1, 10_000),
)
def test_growing_never_shrinks_nor_passes_its_end(
    first: int, by: float, extra: int, clock: int
) -> None:
    growing = Growing(first=first, by=by, most=first + extra)
    now, later = (growing.step_count(None, seen(c)) for c in (clock, clock + 1))
    assert first <= now <= later <= first + extra
    assert growing.step_count(None, seen(1)) == first
    assert growing.step_count(None, seen(10**9 + 1)) == first + extra


def test_growing_is_the_same_for_a_joiner() -> None:
    growing = Growing(first=4, by=0.5, most=100)
    assert [growing.step_count(None, seen(c)) for c in range(1, 6)] == [4, 4, 5, 5, 6]
    assert growing.step_count(99, seen(4)) == growing.step_count(None, seen(4))
    # With fragments a round has a clock for each of them.
    assert [growing.step_count(None, seen(c), 2) for c in range(1, 7)] == [
        *(4, 4, 4, 4, 5, 5),
    ]


@checked
@given(share=_SHARES, step_s=_SECONDS, exchange_s=_SECONDS, first=_COUNTS)
def test_traffic_comes_under_its_share_and_rounds_get_no_longer_than_that_needs(
    share: float, step_s: float, exchange_s: float, first: int
) -> None:
    pace = ShareOfTime(share, first=first, most=1_000_000)
    now = seen(1, step_s, exchange_s)
    steps = pace.step_count(None, now)
    assert steps == first
    for _ in range(12):  # 4 ** 11 is more than all counts there are
        steps = pace.step_count(steps, now)
    needed = exchange_s * (1 - share) / (share * step_s)
    if needed <= 900_000:
        assert exchange_s <= share * (1 + 1e-9) * (exchange_s + steps * step_s)
        assert steps <= max(1, 1.25 * needed) + 1
    assert pace.step_count(steps, now) == steps


@checked
@given(before=_COUNTS, step_s=_SECONDS, exchange_s=_SECONDS, share=_SHARES)
def test_a_single_measurement_changes_it_fourfold_at_most(
    before: int, step_s: float, exchange_s: float, share: float
) -> None:
    pace = ShareOfTime(share, least=2, most=1500)
    steps = pace.step_count(before, seen(1, step_s, exchange_s))
    assert 2 <= steps <= 1500
    held = min(max(before, 2), 1500)
    assert min(held, before / 4) <= steps <= max(held, 4 * before)


@checked
@given(
    steps_s=st.lists(st.floats(0.001, 0.1), min_size=2, max_size=6),
    exchange_s=st.floats(0.001, 1.0),
)
def test_workers_of_a_synchronous_job_do_not_drive_each_other_to_longer_rounds(
    steps_s: list[float], exchange_s: float
) -> None:
    # Each waits for the slowest; what counts is traffic, so rounds stay bounded.
    pace = ShareOfTime(0.1, most=1_000_000)
    steps: list[int] = [pace.step_count(None, seen()) for _ in steps_s]
    for _ in range(30):
        steps = [
            pace.step_count(each, seen(1, step_s, exchange_s))
            for each, step_s in zip(steps, steps_s, strict=True)
        ]
    rounds_s = [n * step_s for n, step_s in zip(steps, steps_s, strict=True)]
    for each, step_s in zip(rounds_s, steps_s, strict=True):
        assert 9 * exchange_s <= each * (1 + 1e-9)
        assert each <= 1.25 * 9 * exchange_s + 2 * step_s


@checked
@given(
    before=_COUNTS, step_s=_SECONDS, exchange_s=_SECONDS, fragments=st.integers(1, 9)
)
def test_the_traffic_of_all_fragments_counts(
    before: int, step_s: float, exchange_s: float, fragments: int
) -> None:
    pace = ShareOfTime(0.1)
    assert pace.step_count(
        before, seen(1, step_s, exchange_s), fragments
    ) == pace.step_count(before, seen(1, step_s, fragments * exchange_s))


@checked
@given(before=_COUNTS)
def test_nothing_measured_changes_nothing(before: int) -> None:
    pace = ShareOfTime(0.1, most=2000)
    for now in (seen(), seen(1, 0.1, 0.0), seen(1, 0.0, 0.1)):
        assert pace.step_count(before, now) == before


def test_noise_of_a_tenth_changes_nothing() -> None:
    pace = ShareOfTime(0.1)
    steps = pace.step_count(50, seen(1, 0.01, 0.1))
    for exchange_s in (0.091, 0.109, 0.1, 0.1):
        assert pace.step_count(steps, seen(1, 0.01, exchange_s)) == steps
    assert pace.step_count(steps, seen(1, 0.01, 0.2)) > steps
    assert pace.step_count(steps, seen(1, 0.01, 0.05)) < steps


def test_times_are_means_of_late_and_waits_for_others_do_not_count() -> None:
    at_s = 0.0
    timing = Timing(lambda: at_s)

    def note_step(step_s: float) -> None:
        nonlocal at_s
        at_s += step_s
        timing.note_step()

    def note_push(push_s: float, peer_wait_s: float) -> None:
        timing.push_s = push_s
        timing.note_push(peer_wait_s)

    assert timing.compute_s == 0 == timing.exchange_s
    note_step(1.0)  # how long the first one took is not known
    assert timing.compute_s == 0
    note_step(100.0)
    note_push(9.0, 0.0)
    for _ in range(64):
        note_step(0.2)
        note_push(2.0, 1.5)
    assert timing.compute_s == pytest.approx(0.2)
    assert timing.exchange_s == pytest.approx(0.5)
    at_s += 9.0
    assert timing.end_wait() == at_s
    note_step(0.2 + 6.4)
    note_push(3.0, 0.0)
    assert timing.compute_s == pytest.approx(0.3)
    assert timing.exchange_s == pytest.approx(1.0)
    note_push(0.1, 0.2)  # of two clocks
    assert timing.exchange_s == pytest.approx(0.9)


def test_a_number_stands_for_rounds_of_as_many_steps() -> None:
    assert pace_of(5) == Fixed(5)
    assert pace_of(growing := Growing()) is growing
