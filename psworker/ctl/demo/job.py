"""The demo's processes: a coordinator, shards and workers on loopback."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pswire.addresses import Address
from psworker.ctl.daemons import daemon_names, start_daemons
from psworker.ctl.demo.display import Display
from psworker.ctl.demo.evaluation import Evaluator
from psworker.ctl.demo.progress import Progress, read_report
from psworker.ctl.processes import Children
from psworker.ctl.stall import STALL_TIMEOUT_S, stalled

_POLL_S: Final = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPlan:
    """What to start.

    Attributes:
        task_name: As `--data` names it.
        worker_count: Workers.
        shard_count: Shards.
        epoch_count: Epochs.
        mode: How workers keep together.
    """

    task_name: str
    worker_count: int
    shard_count: int
    epoch_count: int
    mode: str

    @property
    def worker_names(self) -> list[str]:
        """Ids of the workers."""
        return [f"w{index}" for index in range(self.worker_count)]


def start_job(plan: JobPlan, children: Children, scratch: Path) -> Address:
    """Starts all processes; the coordinator's address.

    Raises:
        CommandError: The coordinator didn't start.
    """
    # One thread each: the processes share the machine's cores as it is.
    environment = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    address = start_daemons(
        children,
        scratch,
        shard_count=plan.shard_count,
        worker_count=plan.worker_count,
        mode=plan.mode,
        environment=environment,
    )
    environment["PS_COORDINATOR"] = str(address)
    for name in plan.worker_names:
        children.start(
            name,
            ["psworker.ctl.demo.worker", plan.task_name, str(plan.epoch_count)],
            {**environment, "PS_WORKER_ID": name},
        )
    return address


def follow_job(
    plan: JobPlan,
    children: Children,
    progress: Progress,
    evaluator: Evaluator,
    display: Display,
    *,
    coordinator: Address,
) -> None:
    """Takes the workers' reports until all of them have ended well.

    Raises:
        CommandError: A process failed, or nothing happens any more.
    """
    running = set(plan.worker_names)
    heard_s = time.monotonic()
    while running:
        line = children.next_line(_POLL_S)
        children.check(daemon_names(plan.shard_count))
        progress.accuracy = evaluator.newest
        if progress.clocks:
            display.show(progress)
        if line is None or line.child not in running:
            if time.monotonic() - heard_s > STALL_TIMEOUT_S:
                raise stalled(coordinator)
            continue
        heard_s = time.monotonic()
        if line.text is None:
            running.discard(line.child)
        else:
            progress.take(read_report(line.text))
