"""`psctl demo`, from the first process to the report."""

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import torch
from torch import nn

from psctl.daemons import lines_until_all_end, start_daemons
from psctl.demo.display import Display, display_for_stderr
from psctl.demo.kill import Kill, Killing, Role, worker_name
from psctl.demo.progress import Progress, read_report
from psctl.demo.tasks import Task, load_task
from psctl.failures import CommandError
from psctl.folders import scratch_folder, writable_file
from psctl.processes import Children, Line, signals_interrupt
from psctl.protection import Protection, made_protection
from psctl.snapshot_watch import SnapshotWatch
from pswire.exit_codes import ExitCode
from pswire.failpoints import FAILPOINT_VARIABLE
from pswire.membership import Mode
from psworker.launch.cores import THREADS_VARIABLE, sharing_text
from psworker.snapshots.snapshot import Snapshot, SnapshotReader

THREAD_COUNT: Final = 1
"""Of torch in each process: they share the machine's cores as it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPlan:
    """What to start.

    Attributes:
        epoch_count: 0 for about ten seconds of them.
        staleness_bound: In SSP, clocks that a worker may be ahead.
        kill: Which process dies, `None` for none.
        is_secure: Whether the processes ask each other for tokens and certificates.
    """

    task_name: str
    worker_count: int
    shard_count: int
    epoch_count: int
    mode: str
    staleness_bound: int
    kill: Kill | None
    is_secure: bool = False

    @property
    def worker_names(self) -> list[str]:
        return [worker_name(index) for index in range(self.worker_count)]

    @property
    def is_synchronous(self) -> bool:
        """Whether the gradients of all workers make one update."""
        return Mode.labelled(self.mode).rules.is_clocked

    @property
    def killed_worker(self) -> str | None:
        """The worker that dies, if it's one that does."""
        if self.kill is None or self.kill.role is not Role.WORKER:
            return None
        return self.kill.process_name


class Job:
    """The processes while they train.

    Attributes:
        killing: The death of one of them, if one is to die.
    """

    def __init__(self, plan: JobPlan, children: Children, scratch: Path) -> None:
        """Starts all processes. CommandError: the coordinator didn't start."""
        self._plan = plan
        self._children = children
        environment = {"PYTHONUNBUFFERED": "1"}
        if THREADS_VARIABLE not in os.environ:
            environment[THREADS_VARIABLE] = str(THREAD_COUNT)
        takes_bound = Mode.labelled(plan.mode).rules.takes_bound
        bound = ["--staleness", str(plan.staleness_bound)] if takes_bound else []
        victim = plan.killed_worker
        protection = Protection()
        if plan.is_secure:
            folder = scratch / "credentials"
            folder.mkdir(mode=0o700)
            protection = made_protection(folder, has_tokens=True, has_tls=True)
        self.coordinator = start_daemons(
            children,
            scratch,
            shard_count=plan.shard_count,
            # Evictions stop at that many, and the others shall go on without it.
            worker_count=plan.worker_count - (victim is not None),
            mode=plan.mode,
            options=bound,
            environment=environment,
            protection=protection,
        )
        environment.update(protection.workers)
        self.killing = (
            Killing(plan.kill, children, self.coordinator) if plan.kill else None
        )
        environment["PS_COORDINATOR"] = str(self.coordinator)
        for name in plan.worker_names:
            self._start_worker(name, environment, dies=name == victim)

    def _start_worker(
        self, name: str, environment: dict[str, str], *, dies: bool
    ) -> None:
        plan = self._plan
        own = {**environment, "PS_WORKER_ID": name}
        if dies:
            assert plan.kill is not None, "it is the one that dies"
            own[FAILPOINT_VARIABLE] = f"worker.step=kill@{plan.kill.step}"
            self._children.allow_kill(name)
        updates_per_clock = 1 if plan.is_synchronous else plan.worker_count
        self._children.start(
            name,
            [
                *("psctl.demo.worker", plan.task_name),
                *(str(plan.epoch_count), str(updates_per_clock)),
            ],
            own,
        )

    def follow(self, progress: Progress, display: Display) -> None:
        """Counts the workers' reports until all of them have ended well."""
        for line in lines_until_all_end(
            self._children,
            self._plan.worker_names,
            shard_count=self._plan.shard_count,
            coordinator=self.coordinator,
        ):
            if progress.clocks:
                display.show(progress)
            if line is not None:
                self._take(line, progress)

    def _take(self, line: Line, progress: Progress) -> None:
        if self.killing is not None:
            self.killing.take_line(line, progress)
        if line.text is None or line.child not in self._plan.worker_names:
            return
        report = read_report(line.text)
        progress.take(report)
        if self.killing is not None:
            self.killing.take_report(report)
            self.killing.look(progress)


FILE_NAME: Final = "paramserver-demo.safetensors"
_SNAPSHOT_INTERVAL_S: Final = 1.0
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


def run_demo(plan: JobPlan, out: Path | None) -> str:
    """Runs the demo; the report.

    The snapshot is written to the file or folder `out`, by default in this folder.
    """
    path = _path_of(out)
    # More would take the cores from the processes that are to be shown.
    if THREADS_VARIABLE not in os.environ:
        torch.set_num_threads(THREAD_COUNT)
    task = load_task(plan.task_name)
    plan = replace(plan, epoch_count=plan.epoch_count or task.epoch_count)
    _check_kill(plan, task)
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
        model = task.model_of(snapshot)
        snapshot.save(path)
        display.note("the same training in one process, to compare with")
        reference = task.trained_in_one_process(progress.batches)
    takes_bound = Mode.labelled(plan.mode).rules.takes_bound
    mode = f"{plan.mode}({plan.staleness_bound})" if takes_bound else plan.mode
    steps = f"{progress.clock} steps"
    if not plan.is_synchronous:
        steps = f"{progress.push_count} steps of workers, each an update,"
    return f"""\
{task.described}
{plan.worker_count} workers, {plan.shard_count} shards, mode {mode}: \
{steps} in {progress.duration_s:.1f} s
{"" if story is None else f"{chr(10)}{story}{chr(10)}"}
{_comparison(plan, task, model, reference)}

The snapshot, version {snapshot.version}, is in
    {path}
and loads into the plain model with strict=True.

Four lines turn your own script into a worker:
{FOUR_LINES}

Start it, with the coordinator and the shards, in any order:
    psserver coordinator --listen 127.0.0.1:7070 --state-dir state/c --shards 2
    psserver shard --coordinator 127.0.0.1:7070 --listen 127.0.0.1:0 --state-dir state/0
    psserver shard --coordinator 127.0.0.1:7070 --listen 127.0.0.1:0 --state-dir state/1
    psworker run --coordinator 127.0.0.1:7070 -- train.py"""


def _check_kill(plan: JobPlan, task: Task) -> None:
    """Refuses a process that would die after the end of the training."""
    step_count = plan.epoch_count * task.step_count(plan.worker_count)
    if plan.kill is not None and plan.kill.step >= step_count:
        raise CommandError(
            f"--kill ...@{plan.kill.step} is too late: {plan.worker_count} workers "
            f"make about {step_count} steps in {plan.epoch_count} epochs; say a "
            "smaller step or more --epochs",
            ExitCode.USAGE,
        )


def _train(
    task: Task, plan: JobPlan, display: Display, scratch: Path
) -> tuple[Progress, Snapshot, str | None]:
    progress = Progress(
        epoch_count=plan.epoch_count,
        step_count=plan.epoch_count * task.step_count(plan.worker_count),
    )

    def evaluate(snapshot: Snapshot) -> None:
        accuracy = task.accuracy(task.model_of(snapshot))
        progress.accuracy = (accuracy, snapshot.version)

    with Children(scratch) as children:
        job = Job(plan, children, scratch)
        reader = SnapshotReader(str(job.coordinator))
        with SnapshotWatch(reader, _SNAPSHOT_INTERVAL_S, evaluate):
            job.follow(progress, display)
            snapshot = reader.latest(_SNAPSHOT_TIMEOUT_S)
        evaluate(snapshot)
        display.show(progress)
        story = None if job.killing is None else job.killing.story(progress)
        return progress, snapshot, story


def _path_of(out: Path | None) -> Path:
    path = Path(FILE_NAME) if out is None else out
    return writable_file(path / FILE_NAME if path.is_dir() else path)


def _largest_difference(first: nn.Module, second: nn.Module) -> float:
    """The largest absolute difference of a parameter."""
    with torch.no_grad():
        return max(
            float((one - other).abs().max())
            for one, other in zip(first.parameters(), second.parameters(), strict=True)
        )


def _comparison(
    plan: JobPlan, task: Task, model: nn.Module, reference: nn.Module
) -> str:
    accuracy, of_reference = task.accuracy(model), task.accuracy(reference)
    lines = [
        ("test accuracy of the pulled snapshot", f"{accuracy:.4f}"),
        ("test accuracy of one process", f"{of_reference:.4f}"),
    ]
    note = "one process took the workers' batches of each step as one batch"
    if not plan.is_synchronous:
        points = 100 * abs(accuracy - of_reference)
        verdict = "within" if points <= _POINTS_MAX else "MORE THAN"
        lines.append(("difference in points", f"{points:.1f}"))
        note += (
            f";\nwhat {plan.mode} leaves between the two, since its workers compute "
            f"with values some\nupdates old, is {verdict} {_POINTS_MAX:g} points"
        )
    elif plan.kill is None:
        difference = _largest_difference(model, reference)
        lines.append(("largest difference of a parameter", f"{difference:.2g}"))
    return "\n".join([*(f"{key:<40}  {value}" for key, value in lines), f"({note})"])
