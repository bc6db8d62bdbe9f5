import pytest

from psctl.compare.loads import Load, parse_loads, step_factors
from psctl.compare.modes import parse_modes


def test_modes_are_read_as_they_are_named() -> None:
    bsp, backup, ssp, asp = parse_modes("bsp, bsp+1,ssp:3,asp", 4)
    assert [each.label for each in (bsp, backup, ssp, asp)] == [
        "BSP",
        "BSP + 1",
        "SSP(3)",
        "ASP",
    ]
    assert backup.coordinator_options() == ["--backup-workers", "1"]
    assert ssp.coordinator_options() == ["--staleness", "3"]
    assert bsp.coordinator_options() == asp.coordinator_options() == []
    assert [each.gradients_per_update(4) for each in (bsp, backup, ssp, asp)] == [
        4,
        3,
        1,
        1,
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("bsp,gossip", "'gossip' is no mode"),
        ("ssp", "'ssp' is no mode"),
        ("", "'' is no mode"),
        ("asp,asp", "twice"),
        ("bsp+0,bsp", "twice"),
        ("bsp+4", "more workers than the 4"),
    ],
)
def test_other_modes_are_refused_with_the_reason(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said.replace("+", r"\+")):
        parse_modes(text, 4)


def test_loads_are_read_as_they_are_named() -> None:
    assert parse_loads("hiccups,straggler") == (Load.HICCUPS, Load.STRAGGLER)
    with pytest.raises(ValueError, match="hiccups, straggler"):
        parse_loads("noise")
    with pytest.raises(ValueError, match="twice"):
        parse_loads("even,even")


def _factors(load: Load, worker_index: int, *, seed: int = 1) -> list[float]:
    drawn = step_factors(load, worker_index=worker_index, worker_count=4, seed=seed)
    return [next(drawn) for _ in range(2000)]


def test_hiccups_come_a_tenth_of_the_time_and_repeat_with_the_seed() -> None:
    first = _factors(Load.HICCUPS, 0)
    assert set(first) == {1.0, 5.0}
    assert first.count(5.0) == pytest.approx(200, abs=50)
    assert first == _factors(Load.HICCUPS, 0)
    assert first != _factors(Load.HICCUPS, 1)
    assert first != _factors(Load.HICCUPS, 0, seed=2)


def test_only_the_last_worker_is_the_straggler() -> None:
    assert set(_factors(Load.STRAGGLER, 3)) == {3.0}
    assert set(_factors(Load.STRAGGLER, 2)) == {1.0}
    assert set(_factors(Load.EVEN, 3)) == {1.0}
