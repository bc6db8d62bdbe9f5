"""How old the values are that gradients come from.

The staleness of a push is the count of updates that were applied on this shard between
the values its worker was last given and the push itself.
Source: Zhang, Gupta, Lian and Liu, "Staleness-aware Async-SGD for Distributed Deep
Learning", IJCAI 2016.
"""

from typing import Final

from pswire.membership import WorkerKey

COUNTED_MAX: Final = 63
"""Largest staleness that is counted by itself; the last count is for more, too."""


class StalenessCounter:
    """Updates of one shard, and which of them each worker has seen.

    Attributes:
        counts: Pushes by staleness, from 0; the last one is for all above, too.
    """

    def __init__(self) -> None:
        self.counts = [0] * (COUNTED_MAX + 1)
        self._update_count = 0
        self._seen: dict[WorkerKey, int] = {}
        self._giving: dict[WorkerKey, int] = {}

    def note_update(self) -> None:
        """The values have become newer by a push."""
        self._update_count += 1

    def note_first_values(self, worker: WorkerKey) -> None:
        """A worker is given the first of its values, with its own push in them.

        They are as old as the first of them, whatever is applied until it has all.
        """
        self._giving.setdefault(worker, self._update_count + 1)

    def note_values(self, worker: WorkerKey) -> None:
        """A worker is given the values as they are now, or the last of them."""
        self._seen[worker] = self._giving.pop(worker, self._update_count)

    def of_next(self, worker: WorkerKey) -> int:
        """Staleness that a push of a worker has if it is applied now.

        A worker that this shard has given nothing since modes have changed has the
        values of the last clock of BSP, which all updates since are newer than.
        """
        return self._update_count - self._seen.get(worker, 0)

    def count(self, staleness: int) -> None:
        """A push was applied."""
        self.counts[min(staleness, COUNTED_MAX)] += 1

    def forget(self, worker: WorkerKey) -> None:
        """A record has closed this start of the worker."""
        self._seen.pop(worker, None)
        self._giving.pop(worker, None)

    def begin(self) -> None:
        """A mode that applies pushes one by one begins: all have the same values."""
        self._update_count = 0
        self._seen.clear()
        self._giving.clear()
