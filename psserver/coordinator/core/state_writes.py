"""Changes of the durable state on their way to the disk, one at a time.

A change is decided, written, and only then sent to anybody. One that can't be written
is undone, so that memory is never ahead of the disk.
"""

from collections.abc import Callable
from dataclasses import dataclass

PROBE_MS = 1_000
"""How often a disk that has refused a change is tried again. What must be retried, as a
change of membership, begins again when a try succeeds, since shards hold for it."""


@dataclass(frozen=True, slots=True)
class _Change:
    undo: Callable[[], None]
    then: Callable[[], None]
    now_ms: int


class StateWrites:
    """Whether the durable state can be written, and what is being written.

    Attributes:
        failure: Why the disk did not take the last change; empty when it did.
        failed_ms: Since when it takes none.
    """

    def __init__(self) -> None:
        self.failure = ""
        self.failed_ms = 0
        self._change: _Change | None = None
        self._probe_ms = 0

    @property
    def is_open(self) -> bool:
        """Whether a change is being written: nothing else may be decided."""
        return self._change is not None

    def begin(
        self, undo: Callable[[], None], then: Callable[[], None], now_ms: int
    ) -> None:
        """A change is handed to the disk."""
        assert self._change is None, "one change at a time"
        self._change = _Change(undo, then, now_ms)

    def written(self) -> int:
        """The change is on the disk; returns when it was decided."""
        change = self._end()
        self.failure = ""
        change.then()
        return change.now_ms

    def unwritten(self, reason: str) -> int:
        """The change is not on the disk and is undone; returns when it was decided."""
        change = self._end()
        if not self.failure:
            self.failed_ms = change.now_ms
        self.failure = reason
        self._probe_ms = change.now_ms + PROBE_MS
        change.undo()
        return change.now_ms

    def is_probe_due(self, now_ms: int) -> bool:
        """Whether a disk that took nothing is to be tried again."""
        return bool(self.failure) and self._change is None and now_ms >= self._probe_ms

    def _end(self) -> _Change:
        change, self._change = self._change, None
        assert change is not None, "a change is being written"
        return change
