"""`psctl compare --attack`: what is asked for, what attackers send, and the report."""

from pathlib import Path

import pytest
import torch

from psctl.compare.attacks import Attack, parse_attacks, parse_rules
from psctl.compare.figures import CurvePoint, RunConditions
from psctl.compare.loads import Load
from psctl.compare.modes import ComparedMode
from psctl.compare.under_attack import (
    AttackComparison,
    AttackedRun,
    AttackSettings,
    attacks_json,
    attacks_text,
)
from pswire.aggregation import MEAN, Aggregation

MEDIAN = Aggregation.parse("median")


@pytest.mark.parametrize(
    ("name", "sent"),
    [("sign-flip", [-4.0, 8.0]), ("scale", [100.0, -200.0]), ("constant", [1.0, 1.0])],
)
def test_attackers_change_what_they_push(name: str, sent: list[float]) -> None:
    gradient = torch.tensor([1.0, -2.0])

    Attack(name).carry_out([gradient, None])

    assert gradient.tolist() == sent
    assert [Attack(name).is_made_by(index) for index in range(3)] == [True, True, False]


def test_attacks_and_rules_are_read() -> None:
    assert parse_attacks("sign-flip, scale:workers=3", 8) == (
        Attack("sign-flip", 2),
        Attack("scale", 3),
    )
    assert parse_rules("mean  multi-krum:f=2,m=4;median", 8) == (
        MEAN,
        Aggregation.parse("multi-krum:f=2,m=4"),
        MEDIAN,
    )


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("flip", "is no attack"),
        ("scale:workers=0", "is no attack"),
        ("scale:workers=8", "at least one must train"),
        ("scale,scale:workers=3", "names an attack twice"),
    ],
)
def test_other_attacks_are_refused(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        parse_attacks(text, 8)


@pytest.mark.parametrize(
    ("text", "problem"),
    [("", "is no rule"), ("median median", "twice"), ("krum:f=3", "2f \\+ 3 = 9")],
)
def test_other_rules_are_refused(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        parse_rules(text, 8)


@pytest.mark.parametrize("attack", [None, Attack("scale", 3)])
def test_a_worker_reads_under_which_conditions_it_runs(attack: Attack | None) -> None:
    conditions = RunConditions(
        mode=ComparedMode(name="bsp", mode="bsp"),
        load=Load.EVEN,
        worker_count=8,
        batch_size=32,
        gradient_count=80,
        base_s=0.0,
        seed=1,
        aggregation=str(MEDIAN),
        attack=attack,
    )
    assert RunConditions.from_argument(conditions.to_argument()) == conditions
    assert conditions.coordinator_options == ["--aggregation", "median"]


def test_the_report_holds_each_run_against_the_clean_one() -> None:
    def run(rule: Aggregation, attack: Attack | None, accuracy: float) -> AttackedRun:
        curve = (CurvePoint(0.0, 0.1), CurvePoint(5.0, accuracy))
        return AttackedRun(rule=rule, attack=attack, duration_s=5.0, curve=curve)

    attack = Attack("scale")
    comparison = AttackComparison(
        settings=AttackSettings(
            attacks=(attack,),
            rules=(MEAN, MEDIAN),
            worker_count=8,
            sample_count=100,
            seed=1,
            snapshot_interval_s=1.0,
            out=Path("out"),
        ),
        clock_count=10,
        runs=(
            run(MEAN, None, 0.92),
            run(MEAN, attack, 0.1),
            run(MEDIAN, attack, 0.9),
        ),
        files=(Path("out/attacks.png"),),
    )

    lines = attacks_text(comparison).splitlines()
    _, mean, median = (line for line in lines if line.endswith(("points", "off", "-")))
    assert mean.split()[:5] == ["scale", "2", "mean", "0.100", "-0.820"]
    assert mean.endswith("over two points off")
    assert median.endswith("within two points")
    runs = attacks_json(comparison)["runs"]
    assert isinstance(runs, list)
    assert [each["within_two_points"] for each in runs] == [True, False, True]
    assert [each["attack"] for each in runs] == [None, "scale", "scale"]
