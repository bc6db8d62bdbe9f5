"""Evaluates snapshots while training goes on, as a side-car process would."""

import threading
from types import TracebackType
from typing import Final, Self

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
            model = self._task.build_model()
            model.load_state_dict(snapshot.state_dict(), strict=True)
            self.newest = (self._task.accuracy(model), snapshot.version)

    def _next(self) -> Snapshot:
        if self.newest is None:
            return self._reader.latest(_WAIT_S)
        return self._reader.wait_newer(self.newest[1], _WAIT_S)
