"""Runs one mode under one load, with real daemons and workers."""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from psctl.compare.figures import (
    CurvePoint,
    RunConditions,
    Step,
    first_began_s,
    read_step,
)
from psctl.daemons import lines_until_all_end, start_daemons
from psctl.demo.tasks import Task
from psctl.processes import Children
from psctl.snapshot_watch import SnapshotWatch
from pswire.addresses import Address
from psworker.snapshots.snapshot import Snapshot, SnapshotReader

SHARD_COUNT: Final = 2

_SAY_INTERVAL_S: Final = 5.0
_SNAPSHOT_TIMEOUT_S: Final = 20.0

Say = Callable[[str], None]
"""Is called with what happens now."""


def run_job(
    conditions: RunConditions,
    task: Task,
    scratch: Path,
    *,
    snapshot_interval_s: float,
    say: Say,
) -> tuple[list[Step], list[CurvePoint]]:
    """Trains once; the steps of its workers, and the accuracy over time.

    Raises:
        CommandError: A process failed, or nothing happens any more.
    """
    folder = Path(tempfile.mkdtemp(dir=scratch))
    kept: list[tuple[float, Snapshot]] = []
    with Children(folder) as children:
        names = [f"w{index}" for index in range(conditions.worker_count)]
        coordinator = _start(conditions, children, folder, names)
        reader = SnapshotReader(str(coordinator))
        with SnapshotWatch(
            reader,
            snapshot_interval_s,
            lambda snapshot: kept.append((time.monotonic(), snapshot)),
        ) as watch:
            steps = _follow(conditions, children, coordinator, names, say)
            last = reader.latest(_SNAPSHOT_TIMEOUT_S)
        if watch.failure is not None:
            raise watch.failure
    # Evaluated now that no process needs the cores.
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


def _start(
    conditions: RunConditions, children: Children, folder: Path, names: list[str]
) -> Address:
    mode = conditions.mode
    environment = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    address = start_daemons(
        children,
        folder,
        shard_count=SHARD_COUNT,
        worker_count=conditions.worker_count,
        mode=mode.mode,
        options=mode.coordinator_options(),
        environment=environment,
    )
    environment["PS_COORDINATOR"] = str(address)
    for index, name in enumerate(names):
        children.start(
            name,
            ["psctl.compare.worker", conditions.to_argument(), str(index)],
            {**environment, "PS_WORKER_ID": name},
        )
    return address


def _follow(
    conditions: RunConditions,
    children: Children,
    coordinator: Address,
    names: list[str],
    say: Say,
) -> list[Step]:
    """Collects the workers' steps until all of them have ended well."""
    steps: list[Step] = []
    said_s = time.monotonic()
    for line in lines_until_all_end(
        children, names, shard_count=SHARD_COUNT, coordinator=coordinator
    ):
        if line is not None and line.child in names and line.text is not None:
            steps.append(read_step(line.text))
        if steps and time.monotonic() - said_s >= _SAY_INTERVAL_S:
            said_s = time.monotonic()
            wanted = conditions.gradient_count
            done = sum(not step.is_dropped for step in steps)
            say(f"{min(done, wanted)} of {wanted} gradients are in updates")
    return steps
