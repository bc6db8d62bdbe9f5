"""Runs one mode under one load, with real daemons and workers."""

import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from psctl.compare.figures import CurvePoint, RunConditions, first_began_s
from psctl.compare.snapshot_log import SnapshotLog
from psctl.compare.steps import Step, read_step
from psctl.daemons import STALL_TIMEOUT_S, daemon_names, stalled, start_daemons
from psctl.demo.tasks import Task
from psctl.processes import Children
from pswire.addresses import Address
from psworker.snapshots.snapshot import SnapshotReader

SHARD_COUNT: Final = 2

_TELL_INTERVAL_S: Final = 5.0
_SNAPSHOT_TIMEOUT_S: Final = 20.0
_POLL_S: Final = 0.1

Tell = Callable[[str], None]
"""Says what happens now."""


def run_job(
    conditions: RunConditions,
    task: Task,
    scratch: Path,
    *,
    snapshot_interval_s: float,
    tell: Tell,
) -> tuple[list[Step], list[CurvePoint]]:
    """Trains once; the steps of its workers, and the accuracy over time.

    Args:
        conditions: Mode, load and size.
        task: What is trained.
        scratch: Folder for the processes' files, of this run alone.
        snapshot_interval_s: Time between two points of the curve.
        tell: Told now and then how far it is.

    Raises:
        CommandError: A process failed, or nothing happens any more.
    """
    with ExitStack() as stack:
        children = stack.enter_context(Children(scratch))
        coordinator = _start(conditions, children, scratch)
        reader = SnapshotReader(str(coordinator))
        log = stack.enter_context(SnapshotLog(reader, snapshot_interval_s))
        steps = _follow(conditions, children, coordinator, tell)
        last = reader.latest(_SNAPSHOT_TIMEOUT_S)
    # Evaluated now that nobody needs the cores.
    began_s = first_began_s(steps)
    ended_s = max(step.ended_s for step in steps)
    points = [(kept.at_s, kept.snapshot) for kept in log.kept]
    points = [(at_s, each) for at_s, each in points if began_s < at_s < ended_s]
    points.append((ended_s, last))
    first = CurvePoint(0.0, task.accuracy(task.new_model()))
    return steps, [
        first,
        *(
            CurvePoint(at_s - began_s, task.accuracy(task.model_of(each)))
            for at_s, each in points
        ),
    ]


def _start(conditions: RunConditions, children: Children, scratch: Path) -> Address:
    """Starts all processes; the coordinator's address."""
    mode = conditions.mode
    environment = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    address = start_daemons(
        children,
        scratch,
        shard_count=SHARD_COUNT,
        worker_count=conditions.worker_count,
        mode=mode.mode,
        options=mode.coordinator_options(),
        environment=environment,
    )
    environment["PS_COORDINATOR"] = str(address)
    for index, name in enumerate(_worker_names(conditions)):
        children.start(
            name,
            ["psctl.compare.worker", conditions.to_argument(), str(index)],
            {**environment, "PS_WORKER_ID": name},
        )
    return address


def _worker_names(conditions: RunConditions) -> list[str]:
    return [f"w{index}" for index in range(conditions.worker_count)]


def _follow(
    conditions: RunConditions, children: Children, coordinator: Address, tell: Tell
) -> list[Step]:
    """Takes the workers' steps until all of them have ended well."""
    steps: list[Step] = []
    running = set(_worker_names(conditions))
    heard_s = told_s = time.monotonic()
    while running:
        line = children.next_line(_POLL_S)
        children.check(daemon_names(SHARD_COUNT))
        now_s = time.monotonic()
        if steps and now_s - told_s >= _TELL_INTERVAL_S:
            told_s = now_s
            done = sum(not step.is_dropped for step in steps)
            wanted = conditions.gradient_count
            tell(f"{min(done, wanted)} of {wanted} gradients are in updates")
        if line is None or line.child not in running:
            if now_s - heard_s > STALL_TIMEOUT_S:
                raise stalled(coordinator)
            continue
        heard_s = now_s
        if line.text is None:
            running.discard(line.child)
        else:
            steps.append(read_step(line.text))
    return steps
