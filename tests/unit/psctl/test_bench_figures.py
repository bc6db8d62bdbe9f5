"""The arithmetic of `psctl bench all`, and its table of workloads."""

import json
import math
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from psctl.__main__ import app
from psctl.bench.figures import (
    Ratio,
    WorkloadFigures,
    slowest,
    turn_order,
)
from psctl.bench.member import DifferentValuesError, check_values
from psctl.bench.picture import draw
from psctl.bench.report import (
    BenchReport,
    report_json,
    report_table,
    report_text,
    short,
)
from psctl.bench.suite import WORKLOADS, workload_named
from psctl.bench.workload import (
    Contender,
    Entry,
    Member,
    Sizes,
    Target,
    Workload,
    rate_at_least,
    time_at_most,
)


def never(member: Member) -> Contender:
    raise AssertionError("nothing is measured here")


def figures(
    *targets: Target,
    cannot: dict[str, str] | None = None,
    failure: str = "",
    **durations_s: list[float],
) -> WorkloadFigures:
    names = dict.fromkeys(
        name for target in targets for name in (target.contender, target.baseline)
    )
    workload = Workload(
        about_s=1,
        name="made",
        title="made up",
        entries=tuple(Entry(name, f"what {name} does", never) for name in names),
        targets=targets,
    )
    return WorkloadFigures(
        workload=workload,
        durations_s=durations_s,
        cannot=cannot or {},
        failure=failure,
    )


def test_a_ratio_of_times_is_that_of_the_medians() -> None:
    made = figures(
        time_at_most("ours", 0.5, "theirs"), ours=[1, 2, 30], theirs=[4, 4, 5]
    )
    (ratio,) = made.ratios
    assert ratio.measured == 0.5
    assert ratio.is_met


def test_a_ratio_of_rates_is_the_other_way_round() -> None:
    made = figures(
        rate_at_least("ours", 0.8, "theirs"), ours=[4, 4, 4], theirs=[2, 3, 4]
    )
    (ratio,) = made.ratios
    assert ratio.measured == 0.75
    assert not ratio.is_met


def test_the_spread_of_a_ratio_pairs_what_was_measured_together() -> None:
    # Both took twice as long in the second half: each repetition had the same ratio.
    made = figures(
        time_at_most("ours", 1, "theirs"), ours=[1, 1, 2, 2], theirs=[2, 2, 4, 4]
    )
    (ratio,) = made.ratios
    assert (ratio.low, ratio.measured, ratio.high) == (0.5, 0.5, 0.5)


@pytest.mark.parametrize(
    ("target", "measured", "is_met", "share"),
    [
        (time_at_most("a", 0.5, "b"), 0.5, True, 1.0),
        (time_at_most("a", 0.5, "b"), 0.6, False, 1.2),
        (rate_at_least("a", 0.8, "b"), 0.8, True, 1.0),
        (rate_at_least("a", 0.8, "b"), 0.4, False, 2.0),
        (rate_at_least("a", 0.8, "b"), 1.6, True, 0.5),
    ],
)
def test_a_share_of_the_limit_up_to_one_is_good_whichever_way_the_target_looks(
    target: Target, measured: float, is_met: bool, share: float
) -> None:
    ratio = Ratio(target, measured)
    assert ratio.is_met is is_met
    assert ratio.share_of_limit == pytest.approx(share)


def test_a_target_without_its_baseline_says_why_and_is_neither_met_nor_missed() -> None:
    made = figures(
        time_at_most("ours", 1, "theirs"),
        cannot={"theirs": "not built; take another build"},
        ours=[1.0, 1.0],
    )
    (ratio,) = made.ratios
    assert ratio.measured is None
    assert ratio.is_met is None
    assert ratio.share_of_limit is None
    assert ratio.why_not == "theirs: not built; take another build"
    told = report_text(report_of(made))
    assert "theirs did not run: not built; take another build" in told
    assert "not measured: ours at most 1 x the time of theirs" in told
    assert ", 2 repetitions (targets are for 15 and more)\n" in told
    assert report_table(report_of(made)).startswith(told.partition("\n")[0] + ". ")


def test_a_workload_that_failed_says_why_wherever_it_is_read() -> None:
    made = figures(time_at_most("ours", 1, "theirs"), failure="shard 0 died")
    report = report_of(made)
    assert "not measured: shard 0 died" in report_text(report)
    assert "not measured: ours: shard 0 died" in report_table(report)
    (workload,) = json.loads(json.dumps(report_json(report)))["workloads"]
    assert workload["failure"] == "shard 0 died"
    assert workload["contenders"][0]["why_not"] == "shard 0 died"
    assert workload["targets"][0]["is_met"] is None


def test_the_report_has_every_duration_and_verdict() -> None:
    made = figures(
        time_at_most("ours", 1.1, "theirs"), ours=[0.2, 0.2], theirs=[0.1, 0.1]
    )
    report = report_of(made)
    (workload,) = json.loads(json.dumps(report_json(report)))["workloads"]
    assert workload["contenders"][0]["durations_ms"] == [200, 200]
    assert workload["contenders"][0]["per_s"] == 5
    assert workload["targets"][0]["ratio"] == 2
    assert workload["targets"][0]["is_met"] is False
    assert "MISSED: 2.00 (2.00 to 2.00), target ours at most 1.1 x" in report_text(
        report
    )
    assert "| 2.00 (2.00 to 2.00) | ours at most 1.1 x" in report_table(report)


def test_a_workload_without_a_target_has_its_figures(tmp_path: Path) -> None:
    workload = workload_named("restore")
    durations = {entry.name: [0.001, 0.003] for entry in workload.entries}
    report = report_of(WorkloadFigures(workload=workload, durations_s=durations))
    assert "| `restore` | shard 2.00, load_file 2.00 | - | none | |" in report_table(
        report
    )
    assert "shard           2.00" in report_text(report)
    assert draw(report.figures, tmp_path).exists()


def report_of(made: WorkloadFigures) -> BenchReport:
    return BenchReport(
        arguments=("psctl", "bench", "all"),
        commit="abc",
        sizes=Sizes(repetition_count=2),
        figures=(made,),
    )


def test_a_repetition_took_as_long_as_its_slowest_member() -> None:
    assert slowest([[1, 5, 2], [3, 4, 2]]) == [3, 5, 2]


def test_each_contender_comes_first_equally_often() -> None:
    orders = [turn_order(["a", "b", "c"], each) for each in range(-3, 3)]
    assert orders[:3] == orders[3:]
    assert orders[3:] == [["a", "b", "c"], ["b", "c", "a"], ["c", "a", "b"]]


def values_of(*numbers: float) -> Contender:
    return Contender(lambda: None, values=lambda: [torch.tensor(numbers)])


def test_contenders_that_computed_different_values_are_no_comparison() -> None:
    contenders = {
        "ours": values_of(1.0, 2.0),
        "without values": Contender(lambda: None),
        "theirs": values_of(1.0, 2.002),
    }
    check_values(contenders, 0.01)
    with pytest.raises(DifferentValuesError, match="ours and theirs computed diff"):
        check_values(contenders, 0.0001)


def test_values_that_are_no_numbers_are_different() -> None:
    with pytest.raises(DifferentValuesError):
        check_values({"a": values_of(math.nan), "b": values_of(math.nan)}, 1.0)


@pytest.mark.parametrize(
    ("number", "text"),
    [(0.0, "0"), (0.01234, "0.0123"), (1.0, "1.00"), (12.34, "12.3"), (1234.5, "1234")],
)
def test_figures_have_three_digits_that_count(number: float, text: str) -> None:
    assert short(number) == text


def test_the_table_of_workloads_holds_together() -> None:
    assert len({each.name for each in WORKLOADS}) == len(WORKLOADS)
    for workload in WORKLOADS:
        names = [entry.name for entry in workload.entries]
        assert len(set(names)) == len(names)
        for target in workload.targets:
            assert {target.contender, target.baseline} <= set(names)
        assert workload_named(workload.name) is workload


def test_an_unknown_workload_is_wrong_use_and_hears_which_there_are(
    tmp_path: Path,
) -> None:
    out = tmp_path / "out"
    done = CliRunner().invoke(
        app, ["bench", "all", "--only", "nonsense", "--out", str(out)]
    )
    assert done.exit_code == 2
    assert "there is no workload 'nonsense'; there are exchange" in " ".join(
        done.output.replace("│", " ").split()
    )
    assert not out.exists()


def test_the_list_tells_contenders_targets_and_how_long_they_take() -> None:
    text = CliRunner().invoke(app, ["bench", "list"]).output
    assert "target: paramserver at most 0.95 x the time of bare_stream" in text
    assert "\nallreduce4 (about 25 s): BSP step of one big parameter" in text
    assert text.endswith(
        "\nAll together take about 16 minutes on two cores, with the "
        "default sizes and repetitions.\n"
    )
    listed = json.loads(CliRunner().invoke(app, ["bench", "list", "--json"]).output)
    assert {each["name"]: each["about_s"] for each in listed["workloads"]}["ddp"] == 70
    assert [each["name"] for each in listed["workloads"]] == [
        each.name for each in WORKLOADS
    ]
