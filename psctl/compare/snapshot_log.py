"""Keeps snapshots while a job trains, to be evaluated when nothing runs any more."""

import threading
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self

from psworker.errors import ClosedError, JobEndedError, PsError, WaitTimeoutError
from psworker.snapshots.snapshot import Snapshot, SnapshotReader

_WAIT_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class KeptSnapshot:
    """A snapshot, and when it was there on the machine's monotonic clock."""

    at_s: float
    snapshot: Snapshot


class SnapshotLog:
    """A thread that pulls a snapshot now and then. A context manager.

    Attributes:
        kept: What it has pulled, oldest first.
    """

    def __init__(self, reader: SnapshotReader, interval_s: float) -> None:
        self._reader = reader
        self._interval_s = interval_s
        self._stopped = threading.Event()
        self._failure: PsError | None = None
        self._thread = threading.Thread(target=self._run, name="keep-snapshots")
        self.kept: list[KeptSnapshot] = []

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stopped.set()
        self._reader.close()
        self._thread.join()
        # A failure of the run itself says more than that no snapshot came of it.
        if error is None and self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        while not self._stopped.wait(self._interval_s):
            try:
                snapshot = self._next()
            except WaitTimeoutError:
                continue
            except JobEndedError:
                return
            except ClosedError:
                assert self._stopped.is_set(), "only the end of this log closes it"
                return
            except PsError as failure:
                self._failure = failure
                return
            self.kept.append(KeptSnapshot(time.monotonic(), snapshot))

    def _next(self) -> Snapshot:
        if not self.kept:
            return self._reader.latest(_WAIT_S)
        return self._reader.wait_newer(self.kept[-1].snapshot.version, _WAIT_S)
