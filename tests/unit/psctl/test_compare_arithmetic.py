"""The figures that `docs/modes.md` derives."""

import pytest

from psctl.compare.arithmetic import ideal_duration, rate_limit
from psctl.compare.loads import Load
from psctl.compare.modes import parse_modes


def limit_over_bsp(name: str, load: Load) -> float:
    bsp, mode = parse_modes(f"bsp,{name}", 4)
    return rate_limit(mode, load, 4) / rate_limit(bsp, load, 4)


def duration(name: str, load: Load, *, gradients: int = 800, seed: int = 1) -> float:
    (mode,) = parse_modes(name, 4)
    return ideal_duration(
        mode, load, worker_count=4, gradient_count=gradients, seed=seed
    )


def test_a_clock_of_bsp_costs_the_slowest_of_four_steps() -> None:
    (bsp,) = parse_modes("bsp", 4)
    assert 4 / rate_limit(bsp, Load.HICCUPS, 4) == pytest.approx(1 + 4 * (1 - 0.9**4))
    assert duration("bsp", Load.HICCUPS, gradients=40_000) / 10_000 == pytest.approx(
        2.38, abs=0.05
    )


def test_a_straggler_bounds_what_the_modes_can_gain() -> None:
    assert limit_over_bsp("asp", Load.STRAGGLER) == pytest.approx(2.5)
    assert limit_over_bsp("bsp+1", Load.STRAGGLER) == pytest.approx(2.25)
    assert limit_over_bsp("ssp:3", Load.STRAGGLER) == pytest.approx(1.0)


@pytest.mark.parametrize("name", ["bsp+1", "asp"])
def test_under_a_straggler_the_schedule_comes_to_the_same(name: str) -> None:
    ratio = duration("bsp", Load.STRAGGLER) / duration(name, Load.STRAGGLER)
    assert ratio == pytest.approx(limit_over_bsp(name, Load.STRAGGLER), rel=0.01)


def test_ssp_has_the_pace_of_the_straggler_but_for_its_lead() -> None:
    # Nine gradients are ahead at the end, those of three clocks of three workers.
    assert duration("ssp:3", Load.STRAGGLER) == pytest.approx(
        duration("bsp", Load.STRAGGLER), rel=0.02
    )


@pytest.mark.parametrize("seed", range(5))
def test_a_bound_of_0_is_bsp_and_a_large_one_is_asp(seed: int) -> None:
    for load in Load:
        assert duration("ssp:0", load, seed=seed) == duration("bsp", load, seed=seed)
        assert duration("ssp:800", load, seed=seed) == duration("asp", load, seed=seed)


def test_under_hiccups_a_larger_bound_gains_more() -> None:
    durations = [
        duration(f"ssp:{bound}", Load.HICCUPS, gradients=4000)
        for bound in (0, 1, 2, 3, 5, 8, 20)
    ]
    assert durations == sorted(durations, reverse=True)


def test_a_bound_below_the_hiccup_leaves_part_of_it_to_all() -> None:
    # A hiccup is four clocks behind: three of them are hidden by SSP(3).
    ratio = duration("bsp", Load.HICCUPS, gradients=40_000) / duration(
        "ssp:3", Load.HICCUPS, gradients=40_000
    )
    assert ratio == pytest.approx(1.43, abs=0.03)


def test_without_disturbance_all_modes_are_alike_but_for_what_is_dropped() -> None:
    assert duration("bsp", Load.EVEN) == duration("asp", Load.EVEN) == 200
    assert duration("bsp+1", Load.EVEN) == 267
