"""The demo's processes: a coordinator, shards and workers on loopback."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from psctl.daemons import lines_until_all_end, start_daemons
from psctl.demo.display import Display
from psctl.demo.kill import Kill, Killing, Role, worker_name
from psctl.demo.progress import Progress, read_report
from psctl.processes import Children, Line
from pswire.failpoints import FAILPOINT_VARIABLE
from pswire.membership import Mode
from psworker.launch.cores import THREADS_VARIABLE

THREAD_COUNT: Final = 1
"""Of torch in each process: they share the machine's cores as it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPlan:
    """What to start.

    Attributes:
        epoch_count: 0 for about ten seconds of them.
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
        self.coordinator = start_daemons(
            children,
            scratch,
            shard_count=plan.shard_count,
            # Evictions stop at that many, and the others shall go on without it.
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

    def follow(self, progress: Progress, display: Display) -> None:
        """Counts the workers' reports until all of them have ended well.

        Raises:
            CommandError: A process failed, or nothing happens any more.
        """
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
