"""How good the demo's result is: its snapshots, and the same training in one process.

Snapshots are evaluated while training goes on, as a side-car process would.
"""

import threading
from collections.abc import Mapping
from types import TracebackType
from typing import Final, Self

import torch
from torch import nn

from psctl.demo.tasks import Task
from psworker.errors import PsError
from psworker.snapshots.snapshot import Snapshot, SnapshotReader

INTERVAL_S: Final = 1.0
"""Between two snapshots: each one costs the training a moment."""

_WAIT_S: Final = 5.0


class Evaluator:
    """A thread that pulls a snapshot each second and tests it.

    Attributes:
        newest: Accuracy of the newest snapshot and its version.
    """

    def __init__(self, task: Task, reader: SnapshotReader) -> None:
        self._task = task
        self._reader = reader
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="evaluate", daemon=True)
        self.newest: tuple[float, int] | None = None

    def stop(self) -> None:
        """Ends the thread; a wait under way goes on until the reader is closed."""
        self._stopped.set()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def _run(self) -> None:
        while not self._stopped.wait(INTERVAL_S):
            try:
                snapshot = self._next()
            except PsError:
                # Nothing new in time, or the end of the job: the run itself tells.
                continue
            accuracy = self._task.accuracy(self._task.model_of(snapshot))
            self.newest = (accuracy, snapshot.version)

    def _next(self) -> Snapshot:
        if self.newest is None:
            return self._reader.latest(_WAIT_S)
        return self._reader.wait_newer(self.newest[1], _WAIT_S)


def train_in_one_process(
    task: Task, batches: Mapping[int, Mapping[str, list[int]]]
) -> nn.Module:
    """Trains on the workers' batches.

    Args:
        task: What is trained.
        batches: For each clock, the samples of each worker.
    """
    model = task.new_model()
    optimizer = task.new_optimizer(model)
    criterion = nn.CrossEntropyLoss()
    images, labels, _ = task.train_set.tensors
    for clock in sorted(batches):
        of_workers = batches[clock]
        joined = [index for name in sorted(of_workers) for index in of_workers[name]]
        loss = criterion(model(images[joined]), labels[joined])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def largest_difference(first: nn.Module, second: nn.Module) -> float:
    """The largest absolute difference of a parameter."""
    with torch.no_grad():
        return max(
            float((one - other).abs().max())
            for one, other in zip(first.parameters(), second.parameters(), strict=True)
        )
