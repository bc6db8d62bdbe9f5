"""`psctl compare --attack`: rules of aggregation with workers that do harm."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from psctl.compare.attacks import Attack
from psctl.compare.command import SHARD_COUNT, train
from psctl.compare.figures import CurvePoint, RunConditions, first_began_s
from psctl.compare.job import Say, comparing
from psctl.compare.loads import Load
from psctl.compare.modes import ComparedMode
from psctl.compare.picture import can_draw, draw_attacks
from psctl.compare.report import head
from psctl.compare.worker import TASK_NAME
from psctl.demo.tasks import Task, load_task
from psctl.tables import aligned
from pswire.aggregation import MEAN, Aggregation

DIFFERENCE_MAX: Final = 0.02
"""Of accuracy, that an attack may cost a rule which tolerates it."""
RATE_SHARE: Final = 0.5
"""Of the rate of `psctl compare`. Workers that do harm pull a median their way, towards
steps that are too large for the rate which is best without them."""
BATCH_SIZE: Final = 64
"""Of each worker, twice that of `psctl compare`: what bad workers can do to a median
grows with the spread of good gradients."""
_ROUNDING: Final = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class AttackSettings:
    """What to compare.

    Attributes:
        rules: Rules of aggregation, each under each attack.
        sample_count: Samples of each run, over all workers.
    """

    attacks: tuple[Attack, ...]
    rules: tuple[Aggregation, ...]
    worker_count: int
    sample_count: int
    seed: int
    snapshot_interval_s: float
    out: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class AttackedRun:
    """One run; without an attack the clean one."""

    rule: Aggregation
    attack: Attack | None
    duration_s: float
    curve: tuple[CurvePoint, ...]

    @property
    def final_accuracy(self) -> float:
        """Share of the held-out samples that the model gets right at the end."""
        return self.curve[-1].accuracy


@dataclass(frozen=True, slots=True, kw_only=True)
class AttackComparison:
    """All that was measured; the clean run comes first."""

    settings: AttackSettings
    clock_count: int
    runs: tuple[AttackedRun, ...]
    files: tuple[Path, ...]

    def difference(self, run: AttackedRun) -> float:
        """Its final accuracy less that of the clean run."""
        return run.final_accuracy - self.runs[0].final_accuracy

    def is_held(self, run: AttackedRun) -> bool:
        """Whether it ends within two points of the clean run."""
        return self.difference(run) >= -DIFFERENCE_MAX - _ROUNDING


def run_attacks(settings: AttackSettings, say: Say) -> AttackComparison:
    """Trains once without an attack, and once with each rule under each."""
    wanted: list[tuple[Aggregation, Attack | None]] = [(MEAN, None)]
    wanted += [(rule, attack) for attack in settings.attacks for rule in settings.rules]
    of_clock = BATCH_SIZE * settings.worker_count
    clock_count = -(-settings.sample_count // of_clock)
    runs = []
    with comparing(settings.out, say) as (folder, scratch):
        task = load_task(TASK_NAME)
        for number, (rule, attack) in enumerate(wanted, start=1):
            name = f"[{number}/{len(wanted)}] {attack.name if attack else 'clean'}"
            say(f"{name}, {rule}: starting {settings.worker_count} workers")
            run = _run(settings, rule, attack, clock_count, task, scratch, say)
            say(f"{name}, {rule}: accuracy {run.final_accuracy:.3f}")
            runs.append(run)
    files = (draw_attacks(runs, folder),) if can_draw() else ()
    return AttackComparison(
        settings=settings, clock_count=clock_count, runs=tuple(runs), files=files
    )


def _run(
    settings: AttackSettings,
    rule: Aggregation,
    attack: Attack | None,
    clock_count: int,
    task: Task,
    scratch: Path,
    say: Say,
) -> AttackedRun:
    conditions = RunConditions(
        mode=ComparedMode(name="bsp", mode="bsp"),
        load=Load.EVEN,
        worker_count=settings.worker_count,
        batch_size=BATCH_SIZE,
        gradient_count=clock_count * settings.worker_count,
        base_s=0.0,
        rate_share=RATE_SHARE,
        seed=settings.seed,
        aggregation=str(rule),
        attack=attack,
    )
    steps, curve = train(
        conditions,
        task,
        scratch,
        snapshot_interval_s=settings.snapshot_interval_s,
        say=say,
    )
    return AttackedRun(
        rule=rule,
        attack=attack,
        duration_s=max(step.ended_s for step in steps) - first_began_s(steps),
        curve=tuple(curve),
    )


def attacks_text(comparison: AttackComparison) -> str:
    """The comparison for people."""
    settings = comparison.settings
    rows = [_row(comparison, run) for run in comparison.runs]
    header = ("ATTACK", "WORKERS", "RULE", "ACCURACY", "DIFFERENCE", "TIME", "VERDICT")
    attacks = "\n".join(f"{a.name}: {a.described}" for a in settings.attacks)
    return "\n\n".join(
        [
            f"{settings.worker_count} workers, {SHARD_COUNT} shards, "
            f"{comparison.clock_count} clocks for each run, seed {settings.seed}\n"
            f"{attacks}",
            aligned(header, rows, right=header[3:6]),
            "DIFFERENCE is to the clean run; docs/robustness.md explains the rules.",
            *(f"written:\n    {path}" for path in comparison.files),
        ]
    )


def _row(comparison: AttackComparison, run: AttackedRun) -> Sequence[str]:
    if run.attack is None:
        named, verdict = ("none", "0"), "-"
    else:
        named = run.attack.name, str(run.attack.attacker_count)
        verdict = (
            "within two points" if comparison.is_held(run) else "over two points off"
        )
    return (
        *named,
        str(run.rule),
        f"{run.final_accuracy:.3f}",
        f"{comparison.difference(run):+.3f}",
        f"{run.duration_s:.1f} s",
        verdict,
    )


def attacks_json(comparison: AttackComparison) -> dict[str, object]:
    """The comparison for programs, see docs/psctl.md."""
    settings = comparison.settings
    return {
        **head("attacks"),
        "worker_count": settings.worker_count,
        "shard_count": SHARD_COUNT,
        "clock_count": comparison.clock_count,
        "seed": settings.seed,
        "runs": [
            {
                "attack": run.attack.name if run.attack else None,
                "attacker_count": run.attack.attacker_count if run.attack else 0,
                "rule": str(run.rule),
                "final_accuracy": round(run.final_accuracy, 4),
                "difference": round(comparison.difference(run), 4),
                "within_two_points": comparison.is_held(run),
                "duration_s": round(run.duration_s, 3),
                "curve": [
                    [round(point.at_s, 3), round(point.accuracy, 4)]
                    for point in run.curve
                ],
            }
            for run in comparison.runs
        ],
        "files": [str(path) for path in comparison.files],
    }
