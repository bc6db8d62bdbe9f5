import csv
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from psctl.compare import picture
from psctl.compare.figures import (
    CurvePoint,
    Figures,
    RunConditions,
    Step,
    figures_of,
)
from psctl.compare.job import read_line
from psctl.compare.loads import Load
from psctl.compare.modes import parse_modes
from psctl.compare.ratios import ratios_to_bsp
from psctl.compare.report import (
    CompareSettings,
    Comparison,
    comparison_json,
    comparison_text,
    write_tables,
)
from psctl.failures import CommandError
from tests.doubles.installed import need

PNG_MAGIC = b"\x89PNG"
PLOT_EXTRA = "pip install 'paramserver[plot]'"


def step(number: int, *, took_s: float = 0.1, **changes: object) -> Step:
    """A step of one of two workers in turn, which both are at work all the time."""
    began_s = 100 + number // 2 * took_s
    values: dict[str, object] = {
        "worker_index": number % 2,
        "began_s": began_s,
        "computed_s": began_s + 0.002,
        "pushed_s": began_s + took_s - 0.01,
        "ended_s": began_s + took_s,
        "clock": number // 2 + 1,
        "is_dropped": False,
        "staleness": 0,
        **changes,
    }
    return Step(**values)  # type: ignore[arg-type]


def conditions(name: str, load: Load = Load.EVEN) -> RunConditions:
    (mode,) = parse_modes(name, 2)
    return RunConditions(
        mode=mode,
        load=load,
        worker_count=2,
        batch_size=32,
        gradient_count=20,
        base_s=0.1,
        seed=1,
    )


def run(
    name: str,
    steps: Sequence[Step],
    *,
    load: Load = Load.EVEN,
    final_accuracy: float = 0.95,
) -> Figures:
    curve = [
        CurvePoint(0.0, 0.1),
        CurvePoint(0.5, 0.91),
        CurvePoint(1.0, final_accuracy),
    ]
    return figures_of(conditions(name, load), steps, curve, target_accuracy=0.9)


def test_rates_are_up_to_the_last_gradient_that_was_asked_for() -> None:
    found = run("asp", [step(number, staleness=number % 2) for number in range(30)])
    assert found.duration_s == pytest.approx(1.0)
    assert found.sample_count == 20 * 32
    assert found.samples_per_s == pytest.approx(640)
    assert found.steps_per_s == pytest.approx(20)
    assert found.step_cost == pytest.approx(1.0)
    assert found.call_ms == pytest.approx(10)
    assert found.own_work_ms == pytest.approx(2)
    assert found.target_s == 0.5
    assert found.staleness_counts == {0: 10, 1: 10}
    assert found.staleness_mean == pytest.approx(0.5)
    assert found.staleness_max == 1


def test_dropped_samples_count_by_themselves() -> None:
    steps = [step(number, is_dropped=number % 2 == 1) for number in range(60)]
    found = run("bsp+1", steps)
    assert found.sample_count == 20 * 32
    assert found.dropped_sample_count == 19 * 32
    assert found.duration_s == pytest.approx(2.0)
    assert found.samples_per_s == pytest.approx(320)


def short_run(name: str, *accuracies: float) -> Figures:
    """A run that has hardly learned anything."""
    curve = [CurvePoint(at_s, accuracy) for at_s, accuracy in enumerate(accuracies)]
    steps = [step(number) for number in range(20)]
    return figures_of(conditions(name), steps, curve, target_accuracy=0.9)


def test_accuracies_near_chance_are_not_compared() -> None:
    (ratio,) = ratios_to_bsp([short_run("bsp", 0.1, 0.2), short_run("asp", 0.1, 0.3)])
    assert ratio.verdict == "too few samples to compare accuracies"


def test_a_mode_that_alone_does_not_learn_is_told() -> None:
    (ratio,) = ratios_to_bsp([short_run("bsp", 0.1, 0.9), short_run("asp", 0.1, 0.1)])
    assert ratio.verdict == "accuracy over a point off"


def test_the_accuracy_axis_fits_what_runs_have() -> None:
    low = [short_run("bsp", 0.1, 0.2), short_run("asp", 0.12, 0.3)]
    assert picture.accuracy_limits(low) == pytest.approx((0.05, 0.35))
    assert picture.accuracy_limits(figures()) == (0.5, 1.0)


def test_an_accuracy_that_never_came_is_none() -> None:
    curve = [CurvePoint(0.0, 0.1), CurvePoint(1.0, 0.5)]
    found = figures_of(
        conditions("bsp"),
        [step(number) for number in range(20)],
        curve,
        target_accuracy=0.9,
    )
    assert found.target_s is None
    assert found.final_accuracy == 0.5


def test_a_line_of_a_worker_is_read_as_it_was_told() -> None:
    told = step(3, staleness=2)
    assert read_line(Step, told.to_line()) == told
    for text in ("hello", "{}", '{"clock": 1}', "[1]"):
        with pytest.raises(CommandError, match="a worker printed"):
            read_line(Step, text)


def figures() -> list[Figures]:
    return [
        run("bsp", [step(number) for number in range(20)]),
        run("asp", [step(number) for number in range(20)], final_accuracy=0.93),
        run("ssp:3", [step(number, took_s=0.2) for number in range(20)]),
    ]


def test_a_ratio_is_judged_by_the_arithmetic_and_the_accuracy() -> None:
    asp, ssp = ratios_to_bsp(figures())
    assert (asp.measured, asp.expected, asp.limit) == pytest.approx((1, 1, 1))
    assert asp.verdict == "accuracy over a point off"
    assert ssp.measured == pytest.approx(0.5)
    assert ssp.verdict == "slower than 0.8 of it"
    near = run("asp", [step(number) for number in range(20)], final_accuracy=0.94)
    (ratio,) = ratios_to_bsp([figures()[0], near])
    assert ratio.verdict == "as expected"


def test_without_bsp_there_is_nothing_to_compare_with() -> None:
    assert ratios_to_bsp(figures()[1:]) == []


@pytest.fixture
def comparison(tmp_path: Path) -> Comparison:
    return Comparison(
        settings=CompareSettings(
            modes=parse_modes("bsp,asp,ssp:3", 2),
            loads=(Load.EVEN,),
            worker_count=2,
            sample_count=640,
            base_ms=100,
            target_accuracy=0.9,
            seed=1,
            snapshot_interval_s=1.0,
            out=tmp_path,
        ),
        shard_count=2,
        sample_count=640,
        base_s=0.1,
        base_reason="as --base-ms says",
        figures=tuple(figures()),
        ratios=tuple(ratios_to_bsp(figures())),
        files=tuple(write_tables(figures(), tmp_path)),
    )


def test_the_text_has_every_run_and_every_ratio(comparison: Comparison) -> None:
    text = comparison_text(comparison)
    assert "an undisturbed step takes 100 ms:\nas --base-ms says" in text
    assert "EVEN: no step is disturbed" in text
    for label in ("ASP", "SSP(3)"):
        assert len([row for row in text.splitlines() if row.startswith(label)]) == 2
    lines = text.split("written:")[0].splitlines()
    assert all(len(line) <= 90 for line in lines)
    assert all(str(path) in text for path in comparison.files)


def test_the_json_and_the_csv_have_the_same_figures(comparison: Comparison) -> None:
    read = json.loads(json.dumps(comparison_json(comparison)))
    assert read["schema_version"] == 1
    runs, curve, staleness = (
        list(csv.DictReader(path.read_text().splitlines())) for path in comparison.files
    )
    assert [row["mode"] for row in runs] == ["bsp", "asp", "ssp:3"]
    for row, of_json in zip(runs, read["runs"], strict=True):
        assert row == {name: str(of_json[name]) for name in row}
        assert of_json["staleness_counts"] == {"0": 20}
    assert len(curve) == 9
    assert staleness[0] == {
        "load": "even",
        "mode": "bsp",
        "staleness": "0",
        "gradients": "20",
    }


def test_a_picture_is_drawn_where_matplotlib_is(tmp_path: Path) -> None:
    need("matplotlib", PLOT_EXTRA)
    assert picture.can_draw()
    path = picture.draw(figures(), 0.9, tmp_path)
    assert path.read_bytes().startswith(PNG_MAGIC)


def test_bsp_alone_can_be_drawn(tmp_path: Path) -> None:
    need("matplotlib", PLOT_EXTRA)
    assert picture.draw(figures()[:1], 0.9, tmp_path).exists()
