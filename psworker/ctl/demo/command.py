"""`psctl demo`, from the first process to the report."""

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from torch import nn

from psworker.ctl.demo.display import Display, display_for_stderr
from psworker.ctl.demo.evaluation import Evaluator
from psworker.ctl.demo.job import JobPlan, follow_job, start_job
from psworker.ctl.demo.progress import Progress
from psworker.ctl.demo.reference import largest_difference, train_in_one_process
from psworker.ctl.demo.tasks import Task, load_task
from psworker.ctl.failures import CommandError
from psworker.ctl.processes import Children, signals_interrupt
from psworker.ctl.scratch import scratch_folder
from psworker.snapshot import Snapshot, SnapshotReader

FILE_NAME: Final = "paramserver-demo.safetensors"
_SNAPSHOT_TIMEOUT_S: Final = 20.0

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
class DemoResult:
    """What the demo has to show.

    Attributes:
        clock_count: Steps of the job.
        duration_s: What they took.
        version: Version of the last snapshot.
        accuracy: Held-out accuracy of that snapshot.
        reference_accuracy: The same of the training in one process.
        difference: Largest difference of a parameter between the two.
        path: Where the snapshot is.
    """

    clock_count: int
    duration_s: float
    version: int
    accuracy: float
    reference_accuracy: float
    difference: float
    path: Path


def run_demo(
    task_name: str,
    *,
    worker_count: int,
    shard_count: int,
    epoch_count: int | None,
    out: Path | None,
) -> str:
    """Runs the demo; the report.

    Raises:
        CommandError: A process failed; the text has the end of its log.
        KeyboardInterrupt: Stopped by a signal; everything is gone by then.
    """
    path = _path_of(out)
    # Threads would take the cores from the processes that are to be shown.
    torch.set_num_threads(1)
    task = load_task(task_name)
    plan = JobPlan(
        task_name=task_name,
        worker_count=worker_count,
        shard_count=shard_count,
        epoch_count=epoch_count or task.epoch_count,
        mode="bsp",
    )
    with (
        signals_interrupt(),
        scratch_folder("paramserver-demo-") as scratch,
        display_for_stderr() as display,
    ):
        display.note(
            f"{task.described}: a coordinator, {shard_count} shards and "
            f"{worker_count} workers as processes on this machine"
        )
        display.note("starting them; each imports torch, which takes a few seconds")
        progress, snapshot = _train(task, plan, display, scratch)
        model = _loaded(task, snapshot)
        snapshot.save(path)
        display.note("the same training in one process, to compare with")
        reference = train_in_one_process(task, progress.batches)
    return _report(
        task,
        plan,
        DemoResult(
            clock_count=progress.clock,
            duration_s=progress.duration_s,
            version=snapshot.version,
            accuracy=task.accuracy(model),
            reference_accuracy=task.accuracy(reference),
            difference=largest_difference(model, reference),
            path=path,
        ),
    )


def _train(
    task: Task, plan: JobPlan, display: Display, scratch: Path
) -> tuple[Progress, Snapshot]:
    progress = Progress(epoch_count=plan.epoch_count)
    with ExitStack() as stack:
        children = stack.enter_context(Children(scratch))
        coordinator = start_job(plan, children, scratch)
        reader = stack.enter_context(SnapshotReader(str(coordinator)))
        with Evaluator(task, reader) as evaluator:
            follow_job(
                plan, children, progress, evaluator, display, coordinator=coordinator
            )
        snapshot = reader.latest(_SNAPSHOT_TIMEOUT_S)
        progress.accuracy = (task.accuracy(_loaded(task, snapshot)), snapshot.version)
        display.show(progress)
        return progress, snapshot


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
        raise CommandError(f"there is no folder {path.parent}; create it")
    return path


def _report(task: Task, plan: JobPlan, result: DemoResult) -> str:
    return f"""\
{task.described}
{plan.worker_count} workers, {plan.shard_count} shards, mode {plan.mode}: \
{result.clock_count} steps in {result.duration_s:.1f} s

test accuracy of the pulled snapshot      {result.accuracy:.4f}
test accuracy of one process              {result.reference_accuracy:.4f}
largest difference of a parameter         {result.difference:.2g}
(one process took the workers' batches of each step as one batch)

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
