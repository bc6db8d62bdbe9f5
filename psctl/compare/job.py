"""The runs of a comparison: a job of its own for each, followed to its end."""

import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

import torch

from psctl.bench.limited_link import Link
from psctl.bench.workload import OVER_TCP
from psctl.compare.modes import ComparedMode
from psctl.compare.picture import NOT_INSTALLED, can_draw
from psctl.daemons import lines_until_all_end, start_daemons
from psctl.failures import CommandError
from psctl.folders import made_folder, scratch_folder
from psctl.processes import Children, signals_interrupt
from psctl.snapshot_watch import SnapshotWatch
from pswire.addresses import Address
from psworker import event_loop
from psworker.snapshots.snapshot import Snapshot, SnapshotReader

T = TypeVar("T")

Say = Callable[[str], None]
"""Is called with what happens now."""

SAY_INTERVAL_S: Final = 5.0
_SNAPSHOT_TIMEOUT_S: Final = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPlan:
    """A job of a comparison.

    Attributes:
        options: Of `psserver coordinator` besides `--mode`.
        worker: What a worker runs, `python -m` and its arguments; its number follows.
        snapshot_interval_s: Between two points of the curve.
        link: Between workers and shards; None for none.
    """

    mode: ComparedMode
    options: Sequence[str]
    worker: Sequence[str]
    worker_count: int
    shard_count: int
    snapshot_interval_s: float
    link: Link | None = None


@contextmanager
def comparing(out: Path, say: Say) -> Iterator[tuple[Path, Path]]:
    """Around all runs: the folder of the results, made, and one for the jobs' state."""
    folder = made_folder(out)
    if not can_draw():
        say(NOT_INSTALLED)
    torch.set_num_threads(1)
    with signals_interrupt(), scratch_folder("paramserver-compare-") as scratch:
        # One event loop for all runs: gRPC can't follow to another.
        event_loop.acquire()
        try:
            yield folder, scratch
        finally:
            event_loop.release()


def run_job(
    plan: JobPlan,
    scratch: Path,
    kind: Callable[..., T],
    said: Callable[[Sequence[T]], str],
    say: Say,
) -> tuple[list[T], list[tuple[float, Snapshot]]]:
    """Trains once; what the workers printed, and the snapshots with their times.

    The last snapshot is that of the end.

    Args:
        plan: What to run.
        scratch: Folder for the job's state.
        kind: What a worker prints the fields of, a line each.
        said: How far the job is, from all lines so far.
        say: Is called with that now and then.
    """
    folder = Path(tempfile.mkdtemp(dir=scratch))
    kept: list[tuple[float, Snapshot]] = []
    with Children(folder) as children:
        names = [f"w{index}" for index in range(plan.worker_count)]
        coordinator = _start(plan, children, folder, names)
        reader = SnapshotReader(str(coordinator))
        with SnapshotWatch(
            reader,
            plan.snapshot_interval_s,
            lambda snapshot: kept.append((time.monotonic(), snapshot)),
        ) as watch:
            lines: list[T] = []
            said_s = time.monotonic()
            for line in lines_until_all_end(
                children, names, shard_count=plan.shard_count, coordinator=coordinator
            ):
                if line is not None and line.child in names and line.text is not None:
                    lines.append(read_line(kind, line.text))
                if lines and time.monotonic() - said_s >= SAY_INTERVAL_S:
                    said_s = time.monotonic()
                    say(said(lines))
            last = reader.latest(_SNAPSHOT_TIMEOUT_S)
        if watch.failure is not None:
            raise watch.failure
    return lines, [*kept, (time.monotonic(), last)]


def read_line(kind: Callable[..., T], text: str) -> T:
    """Reads a worker's line; CommandError: it's none."""
    try:
        return kind(**json.loads(text))
    except (ValueError, TypeError) as error:
        raise CommandError(f"a worker printed {text[:200]!r}") from error


def _start(
    plan: JobPlan, children: Children, folder: Path, names: Sequence[str]
) -> Address:
    environment = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    places = []
    if plan.link is not None:
        environment |= OVER_TCP
        places = [plan.link.shard_place(children) for _ in range(plan.shard_count)]
    address = start_daemons(
        children,
        folder,
        shard_count=plan.shard_count,
        worker_count=plan.worker_count,
        mode=plan.mode.mode,
        options=plan.options,
        environment=environment,
        places=places,
    )
    environment["PS_COORDINATOR"] = str(address)
    for index, name in enumerate(names):
        children.start(
            name, [*plan.worker, str(index)], {**environment, "PS_WORKER_ID": name}
        )
    return address
