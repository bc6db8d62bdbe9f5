"""Pulls snapshots while a job trains, as a process beside it would."""

import threading
from collections.abc import Callable
from typing import Final, Self

from psworker.errors import ClosedError, JobEndedError, PsError, WaitTimeoutError
from psworker.snapshots.snapshot import Snapshot, SnapshotReader

_WAIT_S: Final = 5.0


class SnapshotWatch:
    """A thread that pulls a newer snapshot now and then. A context manager.

    Attributes:
        failure: Why the newest pull failed, `None` if it didn't.
    """

    def __init__(
        self,
        reader: SnapshotReader,
        interval_s: float,
        take: Callable[[Snapshot], None],
    ) -> None:
        """Pulls nothing before the `with` block, at whose end it closes the reader.

        `take` is called with each snapshot, on the thread. Each pull costs the training
        a moment.
        """
        self._reader = reader
        self._interval_s = interval_s
        self._take = take
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pull-snapshots")
        self.failure: PsError | None = None

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *unused: object) -> None:
        self._stopped.set()
        self._reader.close()
        self._thread.join()

    def _run(self) -> None:
        version: int | None = None
        while not self._stopped.wait(self._interval_s):
            try:
                snapshot = (
                    self._reader.latest(_WAIT_S)
                    if version is None
                    else self._reader.wait_newer(version, _WAIT_S)
                )
            except WaitTimeoutError:
                continue
            except (JobEndedError, ClosedError):
                return
            except PsError as failure:
                self.failure = failure
                continue
            self.failure = None
            version = snapshot.version
            self._take(snapshot)
