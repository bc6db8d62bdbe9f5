"""Chunks that wait their turn: one update at a time for each chunk, in order."""

from collections import deque

from psserver.edge.push import PushId


class Lanes:
    """A queue of pushes for each chunk.

    Attributes:
        applying: Whose update of a chunk is being applied.
    """

    def __init__(self) -> None:
        self.applying: dict[int, PushId] = {}
        self._waiting: dict[int, deque[PushId]] = {}

    def enqueue(self, chunk_index: int, push: PushId) -> None:
        """A push's part of a chunk is there; once for each."""
        self._waiting.setdefault(chunk_index, deque()).append(push)

    def take(self, chunk_index: int) -> PushId | None:
        """The update of a chunk whose turn it is, marked as being applied."""
        waiting = self._waiting.get(chunk_index)
        if waiting is None or chunk_index in self.applying:
            return None
        push = waiting.popleft()
        if not waiting:
            del self._waiting[chunk_index]
        self.applying[chunk_index] = push
        return push

    @property
    def waiting(self) -> tuple[int, ...]:
        """Chunks for which some update waits."""
        return tuple(self._waiting)

    def applied(self, chunk_index: int) -> PushId:
        """An update is done; returns whose it was."""
        return self.applying.pop(chunk_index)

    def discard(self, push: PushId) -> None:
        """Takes out a push that does not count any more; none of it is applying."""
        assert push not in self.applying.values()
        for chunk_index, waiting in list(self._waiting.items()):
            kept = deque(other for other in waiting if other != push)
            if kept:
                self._waiting[chunk_index] = kept
            else:
                del self._waiting[chunk_index]
