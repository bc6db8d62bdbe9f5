"""`psctl demo`, from the first process to the report."""

import os
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from torch import nn

from psctl.demo.display import Display, display_for_stderr
from psctl.demo.evaluation import Evaluator
from psctl.demo.job import THREAD_COUNT, Job, JobPlan
from psctl.demo.kill import Kill
from psctl.demo.progress import Progress
from psctl.demo.reference import largest_difference, train_in_one_process
from psctl.demo.tasks import Task, load_task
from psctl.failures import CommandError
from psctl.processes import Children, signals_interrupt
from psctl.scratch import scratch_folder
from pswire.exit_codes import ExitCode
from psworker.launch.cores import THREADS_VARIABLE, sharing_text
from psworker.snapshots.snapshot import Snapshot, SnapshotReader
from psworker.snapshots.snapshot_path import refusal_text

FILE_NAME: Final = "paramserver-demo.safetensors"
_SNAPSHOT_TIMEOUT_S: Final = 20.0

_POINTS_MAX: Final = 2.0
"""By which the accuracies may differ where updates are made from old values."""

FOUR_LINES: Final = """\
    + import psworker
      ...
    + ps = psworker.connect()
    + model, optimizer, loader = ps.prepare(model, optimizer, loader)
      for inputs, targets in loader:
          loss = criterion(model(inputs), targets)
          loss.backward()
          optimizer.step()
          optimizer.zero_grad()
    + ps.close()"""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoSettings:
    """What to show.

    Attributes:
        task_name: As `--data` names it.
        worker_count: Workers.
        shard_count: Shards.
        epoch_count: Epochs, `None` for about ten seconds of them.
        mode: How workers keep together.
        staleness_bound: In SSP, clocks that a worker may be ahead.
        kill: Which process dies, `None` for none.
        out: File or folder for the snapshot.
    """

    task_name: str
    worker_count: int
    shard_count: int
    epoch_count: int | None
    mode: str
    staleness_bound: int
    kill: Kill | None
    out: Path | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoResult:
    """What the demo has to show.

    Attributes:
        clock_count: Clocks of the job.
        push_count: Steps of all workers.
        duration_s: What they took.
        version: Version of the last snapshot.
        accuracy: Held-out accuracy of that snapshot.
        reference_accuracy: The same of the training in one process.
        difference: Largest difference of a parameter between the two.
        story: What came of the death of a process, `None` if none was to die.
        path: Where the snapshot is.
    """

    clock_count: int
    push_count: int
    duration_s: float
    version: int
    accuracy: float
    reference_accuracy: float
    difference: float
    story: str | None
    path: Path


def run_demo(settings: DemoSettings) -> str:
    """Runs the demo; the report.

    Raises:
        CommandError: A process failed; the text has the end of its log.
        KeyboardInterrupt: Stopped by a signal; everything is gone by then.
    """
    path = _path_of(settings.out)
    # More would take the cores from the processes that are to be shown.
    if THREADS_VARIABLE not in os.environ:
        torch.set_num_threads(THREAD_COUNT)
    task = load_task(settings.task_name)
    plan = _plan_of(settings, task)
    with (
        signals_interrupt(),
        scratch_folder("paramserver-demo-") as scratch,
        display_for_stderr() as display,
    ):
        display.note(
            f"{task.described}: a coordinator, {plan.shard_count} shards and "
            f"{plan.worker_count} workers as processes on this machine"
        )
        shared = sharing_text(
            plan.worker_count + plan.shard_count, THREAD_COUNT, os.environ
        )
        if shared:
            display.note(shared)
        display.note("starting them; each imports torch, which takes a few seconds")
        progress, snapshot, story = _train(task, plan, display, scratch)
        model = _loaded(task, snapshot)
        snapshot.save(path)
        display.note("the same training in one process, to compare with")
        reference = train_in_one_process(task, progress.batches)
    return _report(
        task,
        plan,
        DemoResult(
            clock_count=progress.clock,
            push_count=progress.push_count,
            duration_s=progress.duration_s,
            version=snapshot.version,
            accuracy=task.accuracy(model),
            reference_accuracy=task.accuracy(reference),
            difference=largest_difference(model, reference),
            story=story,
            path=path,
        ),
    )


def _plan_of(settings: DemoSettings, task: Task) -> JobPlan:
    """The plan.

    Raises:
        CommandError: The process would die after the end of the training.
    """
    epoch_count = settings.epoch_count or task.epoch_count
    step_count = epoch_count * task.step_count(settings.worker_count)
    if settings.kill is not None and settings.kill.step >= step_count:
        raise CommandError(
            f"--kill ...@{settings.kill.step} is too late: {settings.worker_count} "
            f"workers make about {step_count} steps in {epoch_count} epochs; say a "
            "smaller step or more --epochs",
            ExitCode.USAGE,
        )
    return JobPlan(
        task_name=settings.task_name,
        worker_count=settings.worker_count,
        shard_count=settings.shard_count,
        epoch_count=epoch_count,
        mode=settings.mode,
        staleness_bound=settings.staleness_bound,
        kill=settings.kill,
    )


def _train(
    task: Task, plan: JobPlan, display: Display, scratch: Path
) -> tuple[Progress, Snapshot, str | None]:
    progress = Progress(epoch_count=plan.epoch_count)
    with ExitStack() as stack:
        children = stack.enter_context(Children(scratch))
        job = Job(plan, children, scratch)
        reader = stack.enter_context(SnapshotReader(str(job.coordinator)))
        with Evaluator(task, reader) as evaluator:
            job.follow(progress, evaluator, display)
        snapshot = reader.latest(_SNAPSHOT_TIMEOUT_S)
        progress.accuracy = (task.accuracy(_loaded(task, snapshot)), snapshot.version)
        display.show(progress)
        story = None if job.killing is None else job.killing.story(progress)
        return progress, snapshot, story


def _loaded(task: Task, snapshot: Snapshot) -> nn.Module:
    model = task.build_model()
    model.load_state_dict(snapshot.state_dict(), strict=True)
    return model


def _path_of(out: Path | None) -> Path:
    path = Path(FILE_NAME) if out is None else out
    if path.is_dir():
        path = path / FILE_NAME
    path = path.absolute()
    if not path.parent.is_dir():
        raise CommandError(
            f"there is no folder {path.parent}; create it", ExitCode.USAGE
        )
    if text := refusal_text(path):
        raise CommandError(text, ExitCode.USAGE)
    return path


def _report(task: Task, plan: JobPlan, result: DemoResult) -> str:
    return f"""\
{task.described}
{plan.worker_count} workers, {plan.shard_count} shards, mode {_mode_text(plan)}: \
{_step_text(plan, result)} in {result.duration_s:.1f} s
{"" if result.story is None else f"{chr(10)}{result.story}{chr(10)}"}
{_comparison(plan, result)}

The snapshot, version {result.version}, is in
    {result.path}
and loads into the plain model with strict=True.

Four lines turn your own script into a worker:
{FOUR_LINES}

Start it, with the coordinator and the shards, in any order:
    psserver coordinator --listen 127.0.0.1:7070 --state-dir state/c --shards 2
    psserver shard --coordinator 127.0.0.1:7070 --listen 127.0.0.1:0 --state-dir state/0
    psserver shard --coordinator 127.0.0.1:7070 --listen 127.0.0.1:0 --state-dir state/1
    psworker run --coordinator 127.0.0.1:7070 -- train.py"""


def _mode_text(plan: JobPlan) -> str:
    return f"ssp({plan.staleness_bound})" if plan.mode == "ssp" else plan.mode


def _step_text(plan: JobPlan, result: DemoResult) -> str:
    if plan.is_synchronous:
        return f"{result.clock_count} steps"
    return f"{result.push_count} steps of workers, each an update,"


def _comparison(plan: JobPlan, result: DemoResult) -> str:
    """The result beside that of one process."""
    lines = [
        ("test accuracy of the pulled snapshot", f"{result.accuracy:.4f}"),
        ("test accuracy of one process", f"{result.reference_accuracy:.4f}"),
    ]
    note = "one process took the workers' batches of each step as one batch"
    if not plan.is_synchronous:
        points = 100 * abs(result.accuracy - result.reference_accuracy)
        verdict = "within" if points <= _POINTS_MAX else "MORE THAN"
        lines.append(("difference in points", f"{points:.1f}"))
        note += (
            f";\nwhat {plan.mode} leaves between the two, since its workers compute "
            f"with values some\nupdates old, is {verdict} {_POINTS_MAX:g} points"
        )
    elif result.story is None:
        lines.append(("largest difference of a parameter", f"{result.difference:.2g}"))
    return "\n".join([*(f"{key:<40}  {value}" for key, value in lines), f"({note})"])
