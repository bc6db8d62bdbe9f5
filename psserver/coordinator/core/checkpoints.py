"""When a checkpoint is made, and the one that is being made.

At most one is in the making; wishes that come meanwhile share the next one. It is cut
by a fence, as a snapshot is. When all shards have copied it gets a name, the shards
write their parts, and when all parts are there it is committed. What the coordinator
adds is of the same cut: the record and the data ledger as they were at its decision. A
checkpoint that can't be completed is given up whole, and another one is tried later.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from psserver.coordinator.core.cut import Cut, WorkerSequence
from psserver.coordinator.core.data.ledger import DataLedger
from psserver.edge.coordinator_settings import CheckpointSettings
from psserver.edge.fence_report import WorkerHolding
from pswire.checkpoint.manifest import FilePart
from pswire.checkpoint.place import CheckpointPlace
from pswire.job_terms import JobTerms
from pswire.membership import Record, WorkerKey

RETRY_MS = 30_000
"""Pause after a checkpoint that has failed: what is wrong with a disk takes longer to
mend than the writing that would fail again."""

POSTPONED_MS = 200
"""Pause after a cut that could not be decided yet: each try stops all shards for a
round trip."""

BATCHES_MS = 50
"""The same while workers are held between two batches, and wait for the cut."""

STATE_WAIT_MS = 600_000
"""Longest wait for the registered state of the worker that leads, from the decision of
a cut: at the end of an epoch its script may evaluate before it goes on."""

SLOW_MS = 60_000
"""Time from a cut after which a status says what its checkpoint waits for."""

LAST_STATE_WAIT_MS = 20_000
"""The same of the last checkpoint, before this process ends."""


@dataclass(slots=True, kw_only=True)
class PendingCheckpoint:
    """A checkpoint whose cut is decided, and that is not committed.

    Attributes:
        snapshot_id: Name of the cut.
        cut: The cut.
        record: Newest record as of the cut.
        terms: What the job trains, as of the cut.
        ledger: The data ledger as of the cut; settled when all shards have copied.
        incarnations: Last incarnation of each worker id.
        open_pushes: Pushes of the cut that only their senders can complete.
        decided_ms: When the cut was decided.
        place: Where it is written, None until it has a name.
        holdings: What each shard's copy has of each member.
        parts: What each shard has written.
        is_finite: Whether all of their values are finite.
        is_committing: Whether the manifest is being written.
        state_of: Worker whose registered state is waited for.
        state: What scripts have registered, empty for nothing.
        lacks_state_of: Worker whose registered state has not come in time.
    """

    snapshot_id: int
    cut: Cut
    record: Record
    terms: JobTerms
    ledger: DataLedger
    incarnations: Mapping[str, int]
    open_pushes: tuple[WorkerSequence, ...] = ()
    decided_ms: int = 0
    place: CheckpointPlace | None = None
    holdings: dict[int, tuple[WorkerHolding, ...]] = field(default_factory=dict)
    parts: dict[int, FilePart] = field(default_factory=dict)
    is_finite: bool = True
    is_committing: bool = False
    state_of: WorkerKey | None = None
    state: bytes = b""
    lacks_state_of: WorkerKey | None = None

    @property
    def ready(self) -> Mapping[int, object]:
        """Shards that have copied."""
        return self.holdings

    @property
    def byte_count(self) -> int:
        """Bytes of all parts that are written."""
        return sum(part.byte_count for part in self.parts.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class CommittedCheckpoint:
    """A checkpoint that is complete.

    Attributes:
        name: Its name in the folder.
        version: Steps of all workers ever that are in it.
        clock: Clock of the cut.
        byte_count: Bytes of its parts.
        committed_ms: When it was committed.
        cut: The cut; None where an earlier process has made it.
    """

    name: str
    version: int
    clock: int
    byte_count: int
    committed_ms: int
    cut: Cut | None = None


class Checkpoints:
    """Checkpoints of a job.

    Attributes:
        settings: Where they go, and how often; None for a job that makes none.
        is_cutting: Whether the fence of a checkpoint's cut is open.
        pending: The one whose cut is decided.
        newest: The newest one that is complete.
        failure: Why the last try has failed, empty when it has not.
        completed_count: Those that this process has completed.
        failed_count: Tries that have failed.
        duration_ms: What the last one took, from its cut on; None before.
        answered: Wishes that were met, or whose checkpoint has failed.
        state_wait_ms: Longest wait for registered state.
        holds_batches: Whether workers are held between two batches, for a cut.
    """

    def __init__(self, settings: CheckpointSettings | None, shard_count: int) -> None:
        self.settings = settings
        self.is_cutting = False
        self.pending: PendingCheckpoint | None = None
        self.newest: CommittedCheckpoint | None = None
        self.failure = ""
        self.completed_count = self.failed_count = 0
        self.duration_ms: int | None = None
        self.answered = 0
        self.state_wait_ms = STATE_WAIT_MS
        self.holds_batches = False
        self._shard_count = shard_count
        self._asked = 0
        self._serving = 0
        self._since_ms: int | None = None
        self._due_ms = 0
        self._postponed_ms: int | None = None
        self._is_owed = False

    @property
    def copying(self) -> PendingCheckpoint | None:
        """The one that some shard has still to copy."""
        pending = self.pending
        is_copied = pending is None or len(pending.holdings) == self._shard_count
        return None if is_copied else pending

    @property
    def is_in_cut(self) -> bool:
        """Whether a cut for one is under way, from its fence to the last copy."""
        return self.is_cutting or self.copying is not None

    @property
    def is_unwritten(self) -> bool:
        """Whether one is being made that shards have still to cut, copy or write."""
        pending = self.pending
        return self.is_cutting or (pending is not None and not pending.is_committing)

    def want(self) -> int:
        """Somebody wants one that is cut after this call.

        Returns:
            The value of `answered` from which on the wish is met, or has failed.
        """
        self._asked += 1
        self._due_ms = 0
        return self._asked

    def is_due(self, version: int, now_ms: int) -> bool:
        """Whether a cut for one is to begin.

        Args:
            version: What all shards have reached.
            now_ms: Monotonic time.
        """
        if self.settings is None or self.pending is not None:
            return False
        if self._since_ms is None:
            self._since_ms = now_ms
        if now_ms < self._due_ms:
            return False
        if self._asked > self.answered or self._is_owed:
            return True
        step_count = version - (self.newest.version if self.newest is not None else 0)
        interval = self.settings.interval
        if interval.step_count:
            return step_count >= interval.step_count
        return step_count > 0 and now_ms - self._since_ms >= interval.duration_ms

    def begin(self) -> None:
        """The fence of a cut opens: it serves all who have asked so far."""
        self.is_cutting = True
        self._serving = self._asked

    def postpone(self, now_ms: int, *, holds_batches: bool = False) -> int:
        """The cut can't be decided yet, and is tried again.

        Returns:
            For how long it was tried before.
        """
        self.is_cutting = False
        self.holds_batches = holds_batches
        self._is_owed = True
        self._due_ms = now_ms + (BATCHES_MS if holds_batches else POSTPONED_MS)
        if self._postponed_ms is None:
            self._postponed_ms = now_ms
        return now_ms - self._postponed_ms

    def is_newest(self, cut: Cut) -> bool:
        """Whether the newest one is of this cut, so that nothing has changed since."""
        return self.newest is not None and self.newest.cut == cut

    def still_newest(self, now_ms: int) -> None:
        """A cut found that nothing has changed since the newest one."""
        self.is_cutting = self.holds_batches = False
        self._postponed_ms = None
        self._end(now_ms)

    def decide(self, pending: PendingCheckpoint) -> None:
        """The cut is decided, and shards copy."""
        self.is_cutting = self.holds_batches = False
        self._postponed_ms = None
        self.pending = pending

    def of(self, snapshot_id: int) -> PendingCheckpoint | None:
        """The one that is being made, if it is of this cut."""
        pending = self.pending
        is_it = pending is not None and pending.snapshot_id == snapshot_id
        return pending if is_it else None

    def copied(self, shard_index: int, holdings: tuple[WorkerHolding, ...]) -> bool:
        """A shard has copied the one that is being made; it may say so again.

        Returns:
            Whether it is the last one, so that a name is needed.
        """
        pending = self.copying
        if pending is None:
            return False
        pending.holdings[shard_index] = holdings
        if self.copying is not None:
            return False
        pending.ledger.settle_cut(pending.cut.sequences, pending.holdings.values())
        return True

    def written(self, shard_index: int, part: FilePart, *, is_finite: bool) -> bool:
        """A shard has written its part of the one that is being made.

        Returns:
            Whether it is the last one, so that all can be committed.
        """
        pending = self.pending
        assert pending is not None, "a part of it"
        pending.parts[shard_index] = part
        pending.is_finite &= is_finite
        return self._completes(pending)

    def take_state(self, pending: PendingCheckpoint, state: bytes) -> bool:
        """The worker that leads has sent its registered state, or has none.

        Returns:
            Whether nothing else is missing, so that all can be committed.
        """
        if not state:
            pending.lacks_state_of = pending.state_of
        pending.state, pending.state_of = state, None
        return self._completes(pending)

    def _completes(self, pending: PendingCheckpoint) -> bool:
        pending.is_committing = (
            len(pending.parts) == self._shard_count and pending.state_of is None
        )
        return pending.is_committing

    def committed(self, pending: PendingCheckpoint, now_ms: int) -> None:
        """The manifest is durable."""
        assert pending.place is not None, "it was written somewhere"
        self.pending = None
        self.completed_count += 1
        self.duration_ms = now_ms - pending.decided_ms
        self.newest = CommittedCheckpoint(
            name=pending.place.name,
            version=pending.cut.version,
            clock=pending.cut.clock,
            byte_count=pending.byte_count,
            committed_ms=now_ms,
            cut=pending.cut,
        )
        self._end(pending.decided_ms)

    def is_overdue(self, now_ms: int) -> bool:
        """Whether the shards have had too long to write.

        One that is being committed is waited for: its manifest may be there already.
        """
        pending = self.pending
        if self.settings is None or pending is None or pending.is_committing:
            return False
        return now_ms - pending.decided_ms >= self.settings.timeout_ms

    def waiting_text(self, now_ms: int) -> str:
        """What the one in the making has long waited for, in words; else empty."""
        pending = self.pending
        if pending is None or now_ms - pending.decided_ms < SLOW_MS:
            return ""
        indexes = range(self._shard_count)
        missing = [i for i in indexes if i not in pending.holdings]
        unwritten = [i for i in indexes if i not in pending.parts]
        if missing:
            awaited = f"{_shards_text(missing)} to copy"
        elif pending.place is None:
            awaited = "its folder to answer"
        elif unwritten:
            awaited = f"{_shards_text(unwritten)} to write"
        elif pending.state_of is not None:
            awaited = f"the registered state of {pending.state_of}"
        else:
            awaited = "its folder to take the manifest"
        passed_s = (now_ms - pending.decided_ms) // 1000
        return (
            f"the one of version {pending.cut.version} waits {passed_s} s for {awaited}"
        )

    def late_state(self, now_ms: int) -> PendingCheckpoint | None:
        """The one that has waited too long for registered state, if it is so."""
        pending = self.pending
        if pending is None or pending.state_of is None:
            return None
        is_late = now_ms - pending.decided_ms >= self.state_wait_ms
        return pending if is_late else None

    def give_way(self) -> int | None:
        """The cut ends for another fence, and is made again after it.

        Returns:
            The copies to free.
        """
        ended, self.pending = self.pending, None
        self._is_owed = True
        return None if ended is None else ended.snapshot_id

    def fail(self, reason: str, now_ms: int) -> int | None:
        """The checkpoint has failed, and another one is tried after a pause.

        Returns:
            The copies to free, if the cut had a name.
        """
        self.failure = reason
        self.failed_count += 1
        self.answered = self._serving
        self.is_cutting = self.holds_batches = False
        self._due_ms = now_ms + RETRY_MS
        self._postponed_ms = None
        return self.give_way()

    def returned(self, newest: CommittedCheckpoint, now_ms: int) -> None:
        """The job has gone back to a checkpoint, which is the newest one now."""
        self.newest = newest
        self._since_ms = now_ms

    def _end(self, since_ms: int) -> None:
        self.failure = ""
        self.answered = self._serving
        self._since_ms = since_ms
        self._is_owed = False


def _shards_text(indexes: list[int]) -> str:
    return " and ".join(f"shard {index}" for index in indexes)
