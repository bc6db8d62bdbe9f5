"""Messages under way between simulated processes.

Each link delivers in order; which link goes next is drawn. A delivery may say that it
can't happen yet, and then holds up its own link only. A link may be blocked in one
direction, and a process may be stopped: what is under way to it waits.
"""

import random
from collections import deque
from collections.abc import Callable

Delivery = Callable[[], bool | None]
"""Returns False when the receiver must hold the message."""


class Links:
    """All links of a world."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._queues: dict[tuple[str, str], deque[Delivery]] = {}
        self._blocked: set[tuple[str, str]] = set()
        self._stopped: set[str] = set()
        self._severed: set[frozenset[str]] = set()
        self._lost: set[str] = set()

    def send(self, source: str, target: str, deliver: Delivery) -> None:
        """Puts a message at the end of a link, if there is anybody at its ends."""
        if not self._lost.intersection((source, target)):
            self._queues.setdefault((source, target), deque()).append(deliver)

    def cut(self, source: str, target: str) -> None:
        """Loses all that is under way on a link."""
        self._queues.pop((source, target), None)

    def lose(self, process: str) -> None:
        """A process is dead: what is under way to it or from it comes nowhere."""
        for link in [link for link in self._queues if process in link]:
            del self._queues[link]
        self._lost.add(process)

    def is_lost(self, process: str) -> bool:
        """Whether a process is dead."""
        return process in self._lost

    def block(self, source: str, target: str) -> None:
        """Holds what is under way on a link, in this direction only."""
        self._blocked.add((source, target))

    def stop(self, process: str) -> None:
        """Holds what is under way to a process."""
        self._stopped.add(process)

    def go_on(self, process: str) -> None:
        """The process takes what has come meanwhile."""
        self._stopped.discard(process)

    def heal(self) -> bool:
        """Unblocks all links; returns whether any was blocked."""
        was_blocked = bool(self._blocked)
        self._blocked.clear()
        return was_blocked

    @property
    def has_blocked(self) -> bool:
        """Whether any link is blocked."""
        return bool(self._blocked)

    def sever(self, one: str, other: str) -> None:
        """Holds what is under way between two processes, until they are joined."""
        self._severed.add(frozenset((one, other)))

    def join(self, one: str, other: str) -> None:
        """Two processes reach each other again."""
        self._severed.discard(frozenset((one, other)))

    def _is_severed(self, source: str, target: str) -> bool:
        # A process has several links to another, as `w0/1 pull` beside `w0/1`.
        ends = frozenset(
            name if name.startswith("shard") else name.partition(" ")[0]
            for name in (source, target)
        )
        return ends in self._severed

    def random_link(self) -> tuple[str, str] | None:
        """Some link that has something under way."""
        names = [name for name, queue in self._queues.items() if queue]
        return self._rng.choice(names) if names else None

    def deliver_one(self) -> bool:
        """Delivers the first message of some link; False when none can be."""
        names = [
            name
            for name, queue in self._queues.items()
            if queue
            and name not in self._blocked
            and name[1] not in self._stopped
            and not self._is_severed(*name)
        ]
        self._rng.shuffle(names)
        for name in names:
            queue = self._queues[name]
            deliver = queue.popleft()
            if deliver() is not False:
                return True
            queue.appendleft(deliver)
        return False

    def __str__(self) -> str:
        return ", ".join(
            f"{source}->{target}: {len(queue)}"
            for (source, target), queue in sorted(self._queues.items())
            if queue
        )
