"""Messages under way between simulated processes.

Each link delivers in order; which link goes next is drawn. A delivery may say that it
can't happen yet, and then holds up its own link only.
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

    def send(self, source: str, target: str, deliver: Delivery) -> None:
        """Puts a message at the end of a link."""
        self._queues.setdefault((source, target), deque()).append(deliver)

    def cut(self, source: str, target: str) -> None:
        """Loses all that is under way on a link."""
        self._queues.pop((source, target), None)

    def cut_all(self, process: str) -> None:
        """Loses all that is under way to and from a process."""
        for source, target in list(self._queues):
            if process in (source, target):
                self.cut(source, target)

    def deliver_one(self) -> bool:
        """Delivers the first message of some link; False when none can be."""
        names = [name for name, queue in self._queues.items() if queue]
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
