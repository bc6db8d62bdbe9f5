"""How old the values are that gradients come from.

The staleness of a push is the count of updates that were applied on this shard between
the values its worker was last sent and the push itself.
Source: Zhang, Gupta, Lian and Liu, "Staleness-aware Async-SGD for Distributed Deep
Learning", IJCAI 2016.
"""

from psserver.shard.core.member_on_shard import MembersOnShard
from pswire.limits import STALENESS_COUNTED_MAX
from pswire.membership import WorkerKey


class StalenessCounter:
    """Updates of one shard, and which of them each worker has seen.

    Attributes:
        counts: Pushes by staleness, from 0; the last one is for all above, too.
    """

    def __init__(self, on_shard: MembersOnShard) -> None:
        self._on_shard = on_shard
        self.counts = [0] * (STALENESS_COUNTED_MAX + 1)
        self._update_count = 0

    def note_update(self) -> None:
        """The values have become newer by a push."""
        self._update_count += 1

    def note_first_values(self, worker: WorkerKey) -> None:
        """A worker is sent the first of its values, with its own push in them.

        They are as old as the first of them, whatever is applied until it has all.
        """
        known = self._on_shard.of(worker)
        if known.first_update is None:
            known.first_update = self._update_count + 1

    def note_values(self, worker: WorkerKey) -> None:
        """A worker is sent the values as they are now, or the last of them."""
        known = self._on_shard.of(worker)
        first, known.first_update = known.first_update, None
        known.seen_update = self._update_count if first is None else first

    def of_next(self, worker: WorkerKey) -> int:
        """Staleness that a push of a worker has if it is applied now.

        A worker that this shard has sent nothing since modes have changed has the
        values of the last clock of BSP, which all updates since are newer than.
        """
        return self._update_count - self._on_shard.of(worker).seen_update

    def count(self, staleness: int) -> None:
        """A push was applied."""
        self.counts[min(staleness, STALENESS_COUNTED_MAX)] += 1

    def begin(self) -> None:
        """A mode that applies pushes one by one begins: all have the same values."""
        self._update_count = 0
        for known in self._on_shard:
            known.seen_update, known.first_update = 0, None
