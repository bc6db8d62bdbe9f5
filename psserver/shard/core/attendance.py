"""When each worker was last heard, who is lost, and who said that it has no data."""

from collections.abc import Iterable, Mapping

from psserver.shard.core.push import PushId
from pswire.awaited import NOT_KNOWN
from pswire.limits import WAITING_INTERVAL_MS
from pswire.membership import WorkerKey


class Attendance:
    """Workers as one shard has heard them."""

    def __init__(self) -> None:
        self._heard_ms: dict[WorkerKey, int] = {}
        self._idle: dict[WorkerKey, int] = {}
        self._lost_ms: dict[WorkerKey, int] = {}
        self._told_ms: int | None = None

    def note_push(self, push: PushId, now_ms: int) -> None:
        """The worker pushes: it has data, unless that is an older push sent again."""
        self._heard_ms[push.worker] = now_ms
        if push.sequence >= self._idle.get(push.worker, 0):
            self._idle.pop(push.worker, None)

    def note_heard(self, worker: WorkerKey, now_ms: int) -> None:
        """The worker is there; whether it has data is not told."""
        self._heard_ms[worker] = now_ms

    def note_idle(self, worker: WorkerKey, sequence: int, now_ms: int) -> None:
        """The worker has no data for its next push."""
        self._heard_ms[worker] = now_ms
        self._idle[worker] = sequence

    def withdraw(self, worker: WorkerKey) -> None:
        """The worker does not wait to be told any more."""
        self._idle.pop(worker, None)

    def forget(self, worker: WorkerKey) -> None:
        """A record has closed this start of the worker."""
        self._heard_ms.pop(worker, None)
        self._idle.pop(worker, None)

    def note_lost(self, lost_ms: Mapping[WorkerKey, int], now_ms: int) -> None:
        """The coordinator has no sign of life of these, and one of all others."""
        self._lost_ms = dict(lost_ms)
        self._told_ms = now_ms

    def step_ms(self, worker: WorkerKey, now_ms: int) -> int:
        """Time in its step: since the worker was heard, or its push was done."""
        heard_ms = self._heard_ms.get(worker)
        return NOT_KNOWN if heard_ms is None else now_ms - heard_ms

    def lost_ms(self, worker: WorkerKey, now_ms: int) -> int:
        """Time without a sign of life, 0 while there is one; see `Awaited`."""
        if self._told_ms is None or now_ms - self._told_ms > WAITING_INTERVAL_MS:
            return NOT_KNOWN
        lost_ms = self._lost_ms.get(worker, 0)
        return lost_ms + now_ms - self._told_ms if lost_ms > 0 else lost_ms

    def has_data(self, worker: WorkerKey) -> bool:
        """Whether the worker has not said that it has none."""
        return worker not in self._idle

    def is_idle(self, push: PushId) -> bool:
        """Whether its worker said that it has no data for this push."""
        return self._idle.get(push.worker) == push.sequence

    def are_idle(self, pushes: Iterable[PushId]) -> bool:
        """Whether that is so for all of them."""
        return all(map(self.is_idle, pushes))
