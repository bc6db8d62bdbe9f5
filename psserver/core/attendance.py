"""When each worker was last heard, and who said that it has no data."""

from collections.abc import Collection

from psserver.core.record import WorkerKey


class Attendance:
    """Workers as one shard has heard them."""

    def __init__(self) -> None:
        self._heard_ms: dict[WorkerKey, int] = {}
        self._idle_clocks: dict[WorkerKey, int] = {}

    def note_push(self, worker: WorkerKey, now_ms: int) -> None:
        """The worker pushes: it has data."""
        self._heard_ms[worker] = now_ms
        self._idle_clocks.pop(worker, None)

    def note_idle(self, worker: WorkerKey, clock: int, now_ms: int) -> None:
        """The worker has no data for its next clock."""
        self._heard_ms[worker] = now_ms
        self._idle_clocks[worker] = clock

    def withdraw(self, worker: WorkerKey) -> None:
        """The worker does not wait to be told any more."""
        self._idle_clocks.pop(worker, None)

    def forget(self, worker: WorkerKey) -> None:
        """A record has closed this start of the worker."""
        self._heard_ms.pop(worker, None)
        self._idle_clocks.pop(worker, None)

    def silent_ms(self, worker: WorkerKey, now_ms: int) -> int:
        """Time since the worker was heard, -1 if never."""
        heard_ms = self._heard_ms.get(worker)
        return -1 if heard_ms is None else now_ms - heard_ms

    def are_idle(self, workers: Collection[WorkerKey], clock: int) -> bool:
        """Whether all of them said that they have no data for `clock`."""
        return all(self._idle_clocks.get(worker) == clock for worker in workers)
