"""Which workers a shard gives no answer, and whom that cuts off from the job.

A worker whose call waits for a shard probes that shard now and then, and reports how
long ago it answered. One worker's report does not show where the fault is: the worker
is cut off once the same shard answers others. If it answers none, the job waits for the
shard. Pure; see the package.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from psserver.coordinator.core.shard_map import ShardSlot
from pswire.membership import WorkerKey

PUSHES_BETWEEN: Final = 2
"""Pushes that a shard must have done of a worker for it to be reached since some time:
all of the first one may have been there before."""


class CutOff(NamedTuple):
    """A worker that can't reach a shard which others reach.

    Attributes:
        shard_index: The shard.
        other: One that reaches it.
        silent_ms: For how long the shard has not answered the worker.
    """

    shard_index: int
    other: WorkerKey
    silent_ms: int


@dataclass(frozen=True, slots=True)
class _Word:
    """What a worker has last reported of a shard.

    Attributes:
        told_ms: When.
        answered_ms: When the shard had last answered it.
        done: Pushes of all members that the shard had done when its silence was
            reported for the first time.
    """

    told_ms: int
    answered_ms: int
    done: Mapping[WorkerKey, int]


class Reach:
    """What workers have reported of the shards that they wait for.

    Args:
        lease_ttl_ms: Silence after which a shard counts as out of reach. A
            report is forgotten after the same time: a worker that waits repeats it.
    """

    def __init__(self, lease_ttl_ms: int) -> None:
        self._lease_ttl_ms = lease_ttl_ms
        self._margin_ms = lease_ttl_ms // 4
        self._words: dict[tuple[WorkerKey, int], _Word] = {}
        # Since when others are known to reach a shard that a worker can't reach.
        self._reached_since_ms: dict[tuple[WorkerKey, int], int] = {}

    def note(
        self,
        worker: WorkerKey,
        silent_ms: Mapping[int, int],
        shards: Sequence[ShardSlot],
        now_ms: int,
    ) -> None:
        """A worker has reported since when each shard that it waits for is silent."""
        for index, silence_ms in silent_ms.items():
            known = self._words.get((worker, index))
            is_new = known is None or not self._is_silent(known, now_ms)
            done = shards[index].standing.done
            self._words[worker, index] = _Word(
                told_ms=now_ms,
                answered_ms=now_ms - silence_ms,
                done=dict(done) if known is None or is_new else known.done,
            )

    def admit(self, worker: WorkerKey) -> None:
        """A worker asks to join, which it does when every shard answers it."""
        self._words = {
            place: word for place, word in self._words.items() if place[0] != worker
        }

    def forget(self, now_ms: int) -> None:
        """Forgets what was not reported again."""
        self._words = {
            place: word
            for place, word in self._words.items()
            if now_ms - word.told_ms <= self._lease_ttl_ms
        }

    def unreached(self, worker: WorkerKey, now_ms: int) -> list[int]:
        return sorted(
            index
            for (other, index), word in self._words.items()
            if other == worker and self._is_silent(word, now_ms)
        )

    def cut_off(
        self, members: Collection[WorkerKey], shards: Sequence[ShardSlot], now_ms: int
    ) -> dict[WorkerKey, CutOff]:
        """Members that can't reach a shard which other members reach.

        Of a shard that is away from the coordinator, too, nothing follows for workers.
        """
        found: dict[WorkerKey, CutOff] = {}
        before, self._reached_since_ms = self._reached_since_ms, {}
        for (worker, index), word in sorted(self._words.items()):
            is_silent = self._is_silent(word, now_ms) and shards[index].is_watching
            if not is_silent or worker not in members:
                continue
            others = (
                other
                for other in sorted(members)
                if other != worker and self._reaches(other, shards[index], word, now_ms)
            )
            if (other := next(others, None)) is None:
                continue
            since_ms = before.get((worker, index), now_ms)
            self._reached_since_ms[worker, index] = since_ms
            # Where nobody was answered and all are again, some hear of it later.
            if worker not in found and word.told_ms - since_ms >= self._margin_ms:
                found[worker] = CutOff(index, other, now_ms - word.answered_ms)
        return found

    # Inside

    def _is_silent(self, word: _Word, now_ms: int) -> bool:
        is_fresh = now_ms - word.told_ms <= self._lease_ttl_ms
        return is_fresh and word.told_ms - word.answered_ms >= self._lease_ttl_ms

    def _reaches(
        self, other: WorkerKey, slot: ShardSlot, word: _Word, now_ms: int
    ) -> bool:
        """Whether a shard has answered another worker well after it fell silent."""
        own = self._words.get((other, slot.index))
        if own is not None and self._is_silent(own, now_ms):
            return False
        if own is not None:
            # Their connections need not have broken at the same moment.
            return own.answered_ms - word.answered_ms >= self._margin_ms
        done = slot.standing.done.get(other, 0) - word.done.get(other, 0)
        return done >= PUSHES_BETWEEN
