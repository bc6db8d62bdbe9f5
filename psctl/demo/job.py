"""The demo's processes: a coordinator, shards and workers on loopback."""

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from psctl.daemons import STALL_TIMEOUT_S, daemon_names, stalled, start_daemons
from psctl.demo.display import Display
from psctl.demo.evaluation import Evaluator
from psctl.demo.kill import Kill, Killing, Role, worker_name
from psctl.demo.progress import Progress, read_report
from psctl.processes import Children, Line
from pswire.failpoints import FAILPOINT_VARIABLE
from pswire.membership import Mode
from psworker.launch.cores import THREADS_VARIABLE

THREAD_COUNT: Final = 1
"""Of torch in each process: they share the machine's cores as it is."""

_POLL_S: Final = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPlan:
    """What to start.

    Attributes:
        task_name: As `--data` names it.
        worker_count: Workers.
        shard_count: Shards.
        epoch_count: Epochs; 0 for about ten seconds of them.
        mode: How workers keep together: `bsp`, `ssp` or `asp`.
        staleness_bound: In SSP, clocks that a worker may be ahead.
        kill: Which process dies, `None` for none.
    """

    task_name: str
    worker_count: int
    shard_count: int
    epoch_count: int
    mode: str
    staleness_bound: int
    kill: Kill | None

    @property
    def worker_names(self) -> list[str]:
        """Ids of the workers."""
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
        coordinator: Where the coordinator listens.
        killing: The death of one of them, if one is to die.
    """

    def __init__(self, plan: JobPlan, children: Children, scratch: Path) -> None:
        """Starts all processes.

        Args:
            plan: What to start.
            children: To which they belong.
            scratch: Folder for their state.

        Raises:
            CommandError: The coordinator didn't start.
        """
        self._plan = plan
        self._children = children
        environment = {"PYTHONUNBUFFERED": "1"}
        if THREADS_VARIABLE not in os.environ:
            environment[THREADS_VARIABLE] = str(THREAD_COUNT)
        takes_bound = Mode.labelled(plan.mode).rules.takes_bound
        bound = ["--staleness", str(plan.staleness_bound)] if takes_bound else []
        victim = plan.killed_worker
        self.coordinator = start_daemons(
            children,
            scratch,
            shard_count=plan.shard_count,
            # None is given up below that many: the others shall go on without it.
            worker_count=plan.worker_count - (victim is not None),
            mode=plan.mode,
            options=bound,
            environment=environment,
        )
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

    def follow(
        self, progress: Progress, evaluator: Evaluator, display: Display
    ) -> None:
        """Takes the workers' reports until all of them have ended well.

        Raises:
            CommandError: A process failed, or nothing happens any more.
        """
        running = set(self._plan.worker_names)
        heard_s = time.monotonic()
        while running:
            line = self._children.next_line(_POLL_S)
            self._children.check(daemon_names(self._plan.shard_count))
            progress.accuracy = evaluator.newest
            if progress.clocks:
                display.show(progress)
            if line is not None:
                self._take(line, progress, running)
            if line is not None and line.child in self._plan.worker_names:
                heard_s = time.monotonic()
            elif time.monotonic() - heard_s > STALL_TIMEOUT_S:
                raise stalled(self.coordinator)

    def _take(self, line: Line, progress: Progress, running: set[str]) -> None:
        if self.killing is not None:
            self.killing.take_line(line, progress)
        if line.child not in running:
            return
        if line.text is None:
            running.discard(line.child)
            return
        report = read_report(line.text)
        progress.take(report)
        if self.killing is not None:
            self.killing.take_report(report)
            self.killing.look(progress)
