"""How many answers with values are under way at a time.

An answer that nobody reads keeps up to 8 MiB in gRPC until its reader ends the call,
which may be never. So a reader has few of them, and one more waits, holding nothing,
until one of those is read.
"""

from collections import Counter
from collections.abc import Hashable, Iterator
from contextlib import contextmanager

from psserver.edge.changes import Changes


class AnswerSlots:
    """In the event loop.

    Args:
        each_max: Answers under way to one reader.
        all_max: Answers under way in all, None for any number.
    """

    def __init__(self, *, each_max: int, all_max: int | None = None) -> None:
        self._each_max = each_max
        self._all_max = all_max
        self._counts: Counter[Hashable] = Counter()
        self._changes = Changes()

    async def is_free(self, reader: Hashable, timeout_s: float) -> bool:
        """Whether there is one for a reader now or before time is up.

        It is there still for who takes it without waiting for anything else.
        """
        return await self._changes.wait_until(lambda: self.has_one(reader), timeout_s)

    def has_one(self, reader: Hashable) -> bool:
        """Whether there is one for a reader now."""
        has_room = self._all_max is None or self._counts.total() < self._all_max
        return has_room and self._counts[reader] < self._each_max

    @contextmanager
    def taken(self, reader: Hashable) -> Iterator[None]:
        """An answer to a reader is under way meanwhile."""
        self._counts[reader] += 1
        try:
            yield
        finally:
            self._counts[reader] -= 1
            if not self._counts[reader]:
                del self._counts[reader]
            self._changes.notify()

    def count(self, reader: Hashable) -> int:
        """Answers that are under way to a reader."""
        return self._counts[reader]
