"""One push on its way to all shards, as a state machine: send, ask, commit.

A call whose outcome is unknown is followed by a question: what the shard has of the
push is not sent again. Shards say `staged` once they have everything that a clock
needs; a worker that has the same from all of them commits it on all of them, and says
what follows from what they have measured. Any contributor is enough, and a
repeated commit changes nothing. A clock whose contributors died is finished by a
record. Source: docs/decisions/0006.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

from pswire.aggregation import UpdateRules
from pswire.membership import ClockChoice, WorkerKey
from pswire.reasons import ErrorReason
from psworker.transport.values import ShardSession

_CORRUPTION_COUNT_MAX: Final = 3

NOT_MEASURED: Final = UpdateRules()


@dataclass(frozen=True, slots=True)
class Send:
    """Send the push to a shard.

    Attributes:
        held: Chunks that the shard has already.
        is_first: Whether the shard can have nothing of it.
    """

    held: frozenset[int] = frozenset()
    is_first: bool = False


@dataclass(frozen=True, slots=True)
class Ask:
    """Ask a shard what it has of the push.

    Attributes:
        failure_count: Calls to it that have failed since the push was opened.
    """

    failure_count: int


@dataclass(frozen=True, slots=True)
class Commit:
    """Commit a clock on all shards."""

    choice: ClockChoice


@dataclass(frozen=True, slots=True)
class Choose:
    """Ask shard 0 which pushes a clock consists of: all shards have this one."""

    clock: int
    sequence: int


class OpenPush:
    """A push until every shard has answered."""

    def __init__(
        self,
        worker: WorkerKey,
        sequence: int,
        chunk_indexes: Sequence[Collection[int]],
        *,
        update: UpdateRules = NOT_MEASURED,
        drives_others: bool = False,
    ) -> None:
        """Begins a push of which nothing is sent.

        Args:
            worker: Whose it is.
            sequence: Its number.
            chunk_indexes: For each shard, the chunks that are part of it.
            update: How the pushes of a clock become an update.
            drives_others: Whether it also commits a clock that closes without it, since
                those that it consists of may all be stopped.
        """
        self._worker = worker
        self.sequence = sequence
        self._chunk_indexes = [frozenset(each) for each in chunk_indexes]
        self._update = update
        self._drives_others = drives_others
        self._failure_counts = [0] * len(chunk_indexes)
        self._staged: dict[int, ClockChoice] = {}

    @property
    def shard_count(self) -> int:
        """Shards that it goes to."""
        return len(self._chunk_indexes)

    def begin(self, *, asks_first: bool = False) -> Send | Ask:
        """What each shard gets first.

        Args:
            asks_first: Whether it may have some of the push from another process.
        """
        return Ask(0) if asks_first else Send(is_first=True)

    def failed(
        self, shard_index: int, reason: ErrorReason | None, *, is_retryable: bool
    ) -> Ask | None:
        """A call that carried the push has failed.

        Args:
            shard_index: Whose call.
            reason: Why the shard refused it, None where nobody did.
            is_retryable: Whether the same call may succeed later.

        Returns:
            None if it is over: the failure stands.
        """
        count = self._failure_counts[shard_index] = (
            self._failure_counts[shard_index] + 1
        )
        is_corrupt = reason is ErrorReason.CHUNK_DIGEST_MISMATCH
        if not is_retryable or (is_corrupt and count > _CORRUPTION_COUNT_MAX):
            return None
        return Ask(count)

    def found(self, shard_index: int, session: ShardSession) -> Send:
        """A shard says what it has of this worker's pushes."""
        if self.sequence <= session.sequence_done_max:
            return Send(self._chunk_indexes[shard_index])
        return Send(session.held_chunks.get(self.sequence, frozenset()))

    def staged(self, shard_index: int, choice: ClockChoice) -> Commit | Choose | None:
        """A shard has everything that it needs for a clock with these contributors."""
        self._staged[shard_index] = choice
        return self.agreed

    @property
    def agreed(self) -> Commit | Choose | None:
        """What follows once all shards have said the same, and until then nothing.

        Where clocks are measured, with what follows from what all shards have measured.
        """
        staged = self._staged
        if len(staged) < self.shard_count:
            return None
        if len({(each.clock, each.workers) for each in staged.values()}) > 1:
            return None
        choice = staged[0]
        if not choice.workers:
            # With backup workers: each shard speaks of this worker's push alone.
            return Choose(choice.clock, self.sequence)
        # In the order of shards, as every worker that commits adds them up.
        parts = tuple(staged[index] for index in sorted(staged))
        found = self._update.decided(parts)
        return self.chosen(
            found._replace(parts=parts if self._update.is_measured else ())
        )

    def chosen(self, choice: ClockChoice) -> Commit | None:
        """The contributors of the clock are known, or that it is closed already."""
        drives = self._worker in choice.workers or self._drives_others
        return Commit(choice) if drives and choice.workers else None
