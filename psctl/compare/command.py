"""`psctl compare`: runs every mode under every load, with real daemons and workers."""

import math
import statistics
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Final

from psctl.compare.figures import (
    CurvePoint,
    Figures,
    RunConditions,
    Step,
    figures_of,
    first_began_s,
)
from psctl.compare.job import JobPlan, Say, comparing, run_job
from psctl.compare.loads import Load
from psctl.compare.modes import ComparedMode
from psctl.compare.picture import can_draw, draw
from psctl.compare.ratios import ideal_s, ratios_to_bsp
from psctl.compare.report import CompareSettings, Comparison, write_tables
from psctl.compare.worker import TASK_NAME
from psctl.demo.tasks import Task, load_task

SHARD_COUNT: Final = 2


def train(
    conditions: RunConditions,
    task: Task,
    scratch: Path,
    *,
    snapshot_interval_s: float,
    say: Say,
) -> tuple[list[Step], list[CurvePoint]]:
    """Trains once; the steps of its workers, and the accuracy over time."""
    plan = JobPlan(
        mode=conditions.mode,
        options=conditions.coordinator_options,
        worker=("psctl.compare.worker", conditions.to_argument()),
        worker_count=conditions.worker_count,
        shard_count=SHARD_COUNT,
        snapshot_interval_s=snapshot_interval_s,
    )

    def said(steps: Sequence[Step]) -> str:
        wanted = conditions.gradient_count
        done = sum(not step.is_dropped for step in steps)
        return f"{min(done, wanted)} of {wanted} gradients are in updates"

    steps, snapshots = run_job(plan, scratch, Step, said, say)
    # Evaluated now that no process needs the cores.
    *kept, (_, last) = snapshots
    began_s = first_began_s(steps)
    ended_s = max(step.ended_s for step in steps)
    points = [(at_s, each) for at_s, each in kept if began_s < at_s < ended_s]
    return steps, [
        CurvePoint(0.0, task.accuracy(task.new_model())),
        *(
            CurvePoint(at_s - began_s, task.accuracy(task.model_of(each)))
            for at_s, each in [*points, (ended_s, last)]
        ),
    ]


_BSP: Final = ComparedMode(name="bsp", mode="bsp")

_BASE_MS_MIN: Final = 100
_BASE_MS_MAX: Final = 120
_BASE_OVER_WORK: Final = 5
"""How many times longer an undisturbed step is than one without any wait, so that the
delays are what is measured."""

_MEASURED_CLOCKS: Final = 40
_START_S: Final = 10.0
"""What the start of a job's processes takes on two cores, for the forecast."""


def run_comparison(settings: CompareSettings, say: Say) -> Comparison:
    """Runs every mode under every load."""
    with comparing(settings.out, say) as (folder, scratch):
        task = load_task(TASK_NAME)
        base_s, reason = _choose_base(settings, task, scratch, say)
        figures = _run_all(settings, base_s, task, scratch, say)
    files = write_tables(figures, folder)
    if can_draw():
        files.append(draw(figures, settings.target_accuracy, folder))
    return Comparison(
        settings=settings,
        shard_count=SHARD_COUNT,
        sample_count=_gradient_count(settings, task) * task.batch_size,
        base_s=base_s,
        base_reason=reason,
        figures=tuple(figures),
        ratios=tuple(ratios_to_bsp(figures)),
        files=tuple(files),
    )


def _run_all(
    settings: CompareSettings, base_s: float, task: Task, scratch: Path, say: Say
) -> list[Figures]:
    runs = [
        _conditions(settings, task, mode=mode, load=load, base_s=base_s)
        for load in settings.loads
        for mode in settings.modes
    ]
    expected_s = sum(ideal_s(each) + _START_S for each in runs)
    say(f"{len(runs)} runs, about {math.ceil(expected_s / 60)} min together")
    _say_rounding(settings, task, say)
    figures = []
    for number, conditions in enumerate(runs, start=1):
        name = f"[{number}/{len(runs)}] {conditions.load}, {conditions.mode.label}"
        say(f"{name}: starting {settings.worker_count} workers")
        steps, curve = train(
            conditions,
            task,
            scratch,
            snapshot_interval_s=settings.snapshot_interval_s,
            say=lambda text, name=name: say(f"{name}: {text}"),  # type: ignore[misc]
        )
        figures.append(
            figures_of(
                conditions, steps, curve, target_accuracy=settings.target_accuracy
            )
        )
        say(
            f"{name}: {figures[-1].duration_s:.1f} s, accuracy "
            f"{figures[-1].final_accuracy:.3f}"
        )
    return figures


def _choose_base(
    settings: CompareSettings, task: Task, scratch: Path, say: Say
) -> tuple[float, str]:
    """Time of an undisturbed step, and why."""
    if settings.base_ms is not None:
        return settings.base_ms / 1000, "as --base-ms says"
    say("measuring what a step takes without any wait")
    conditions = _conditions(settings, task, mode=_BSP, load=Load.EVEN, base_s=0.0)
    steps, _ = train(
        conditions,
        task,
        scratch,
        snapshot_interval_s=settings.snapshot_interval_s,
        say=say,
    )
    work_ms = 1000 * _clock_duration_s(steps)
    wanted_ms = 10 * math.ceil(_BASE_OVER_WORK * work_ms / 10)
    base_ms = min(_BASE_MS_MAX, max(_BASE_MS_MIN, wanted_ms))
    reason = (
        f"{_BASE_OVER_WORK} times the {work_ms:.0f} ms of a BSP step without any "
        f"wait, but from {_BASE_MS_MIN} to {_BASE_MS_MAX} ms"
    )
    if wanted_ms > _BASE_MS_MAX:
        say(
            f"this machine is busy or slow: a step's own work takes {work_ms:.0f} ms, "
            "so the differences between modes will look smaller than they are"
        )
    return base_ms / 1000, reason


def _clock_duration_s(steps: list[Step]) -> float:
    ends = sorted(step.ended_s for step in steps if step.worker_index == 0)
    return statistics.median(later - earlier for earlier, later in pairwise(ends))


def _conditions(
    settings: CompareSettings,
    task: Task,
    *,
    mode: ComparedMode,
    load: Load,
    base_s: float,
) -> RunConditions:
    return RunConditions(
        mode=mode,
        load=load,
        worker_count=settings.worker_count,
        batch_size=task.batch_size,
        gradient_count=_MEASURED_CLOCKS * settings.worker_count
        if base_s == 0
        else _gradient_count(settings, task),
        base_s=base_s,
        seed=settings.seed,
    )


def _gradient_count(settings: CompareSettings, task: Task) -> int:
    """Gradients of a run, a whole number of clocks."""
    of_clock = task.batch_size * settings.worker_count
    return math.ceil(settings.sample_count / of_clock) * settings.worker_count


def _say_rounding(settings: CompareSettings, task: Task, say: Say) -> None:
    """Says it when more samples are trained than were asked for."""
    sample_count = _gradient_count(settings, task) * task.batch_size
    if sample_count != settings.sample_count:
        say(
            f"--samples {settings.sample_count} is rounded up to {sample_count}: whole "
            f"steps of all workers, {task.batch_size} samples for each of "
            f"{settings.worker_count}"
        )
