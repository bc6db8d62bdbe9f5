"""The coordinator's list of snapshots: cuts wanted, being made, ready, released.

Requests for the newest snapshot coalesce into one cut. At most two images exist, and
a pin lasts its time, then the snapshot is refused as gone.
"""

from collections import deque
from dataclasses import dataclass, field

from psserver.coordinator.core.cut import Cut, WorkerSequence
from pswire.reasons import ErrorReason, Refusal

IMAGE_COUNT_MAX = 2
"""Images a shard keeps, shared by all readers."""

READER_BYTES_PER_MS = 10_000
"""What a reader is given time for beside the least time of a pin: 10 MB/s, as over a
link of 100 Mbit/s. Without it a model that takes longer could never be read."""

PIN_COUNT_MAX = 4_096
"""Readers of one snapshot at a time. One that ends without a word keeps its pin."""

RELEASED_COUNT_MAX = 256
"""Releases remembered for a shard whose connection was away, which is seconds."""


@dataclass(slots=True)
class SnapshotEntry:
    """One snapshot.

    Attributes:
        snapshot_id: Its name.
        version: Steps of all workers ever that are in it.
        clock: Clock of the cut.
        generation: Generation of the cut.
        sequences: Of each member, its last push that is in.
        open_pushes: Pushes of the cut that only their senders can complete.
        decided_ms: When the cut was decided.
        ready: Shards that have copied.
        pins: Readers that may still read it, with the end of each pin.
    """

    snapshot_id: int
    version: int
    clock: int
    generation: int
    sequences: tuple[WorkerSequence, ...] = ()
    open_pushes: tuple[WorkerSequence, ...] = ()
    decided_ms: int = 0
    ready: set[int] = field(default_factory=set)
    pins: dict[int, int] = field(default_factory=dict)


class SnapshotList:
    """Snapshots of a job.

    Attributes:
        is_wanted: Whether a reader waits for a cut that has not begun.
        pending: Decided, and not yet copied by all shards.
        newest: The newest one that is ready; None also while it makes room for a
            newer one.
        finished_cut_count: Cuts that were finished or failed: a reader that wants a
            newer snapshot than any before its call waits for one that began after.
        failure: Why the last cut failed, empty when it did not.
        released: Ids that were released lately, oldest first.
        closed_id: Newest id of earlier processes of the coordinator, whose snapshots
            nobody knows any more.
    """

    def __init__(self, *, shard_count: int, pin_ttl_ms: int, first_id: int = 1) -> None:
        self.is_wanted = False
        self.pending: SnapshotEntry | None = None
        self.newest: SnapshotEntry | None = None
        self.finished_cut_count = 0
        self.failure = ""
        self.released: deque[int] = deque(maxlen=RELEASED_COUNT_MAX)
        self._shard_count = shard_count
        self._pin_ttl_ms = pin_ttl_ms
        self._kept: list[SnapshotEntry] = []
        self.closed_id = first_id - 1
        self._next_id = first_id
        self._next_pin_id = 1

    def want(self, *, is_cutting: bool) -> int:
        """A reader wants a cut that begins after this call.

        Returns:
            The value of `finished_cut_count` from which on the newest snapshot is
            what the reader wants.
        """
        self.is_wanted = True
        began_before = is_cutting or self.pending is not None
        return self.finished_cut_count + 1 + began_before

    def begin(self) -> None:
        """A fence for a cut opens: it serves all who have asked so far."""
        self.is_wanted = False

    def decide(
        self,
        cut: Cut,
        *,
        generation: int,
        now_ms: int = 0,
        open_pushes: tuple[WorkerSequence, ...] = (),
    ) -> SnapshotEntry:
        """Names a cut; its images are being copied."""
        entry = SnapshotEntry(
            self.take_id(),
            cut.version,
            cut.clock,
            generation,
            sequences=cut.sequences,
            open_pushes=open_pushes,
            decided_ms=now_ms,
        )
        self.pending = entry
        return entry

    def take_id(self) -> int:
        """The name of another cut."""
        self._next_id += 1
        return self._next_id - 1

    def is_newest(self, cut: Cut) -> bool:
        """Whether the newest snapshot has all that this cut would have.

        By the sequences too: members that are not the same ones may have come equally
        far, and of one that was evicted in between shards may have applied more.
        """
        newest = self.newest
        return newest is not None and cut == Cut(
            clock=newest.clock, sequences=newest.sequences, version=newest.version
        )

    def still_newest(self, generation: int) -> None:
        """A cut found that nothing has changed since the newest snapshot."""
        assert self.newest is not None
        self.newest.generation = generation
        self.finished_cut_count += 1
        self.failure = ""

    def copied(self, snapshot_id: int, shard_index: int) -> bool:
        """A shard has its image.

        Returns:
            Whether the image is of any use: False for one of a cut that has failed.
        """
        entry = self.pending
        if entry is None or entry.snapshot_id != snapshot_id:
            return any(kept.snapshot_id == snapshot_id for kept in self._kept)
        entry.ready.add(shard_index)
        if len(entry.ready) == self._shard_count:
            self.pending = None
            self.failure = ""
            self.finished_cut_count += 1
            self.newest = entry
            self._kept.append(entry)
        return True

    def fail(self, reason: str) -> int | None:
        """The cut came to nothing; returns the snapshot to free, if it had a name."""
        self.failure = reason
        self.finished_cut_count += 1
        ended, self.pending = self.pending, None
        if ended is None:
            return None
        self.released.append(ended.snapshot_id)
        return ended.snapshot_id

    def drop_all(self) -> None:
        """No shard has an image any more."""
        if self.pending is not None:
            self.fail("the job has returned to a checkpoint")
        self.newest = None
        self._kept.clear()

    def pin(
        self,
        entry: SnapshotEntry,
        now_ms: int,
        byte_count: int = 0,
        *,
        pin_id: int | None = None,
    ) -> int:
        """Somebody is going to read so many bytes; returns the name of the pin.

        Args:
            entry: What is read.
            now_ms: The time.
            byte_count: Bytes of it.
            pin_id: Name of the pin, None for the next number.

        Raises:
            Refusal: `BUSY`.
        """
        if len(entry.pins) >= PIN_COUNT_MAX:
            raise Refusal(
                ErrorReason.BUSY, f"{len(entry.pins)} readers read this snapshot"
            )
        if pin_id is None:
            pin_id = self._next_pin_id
            self._next_pin_id += 1
        lasts_ms = self._pin_ttl_ms + byte_count // READER_BYTES_PER_MS
        entry.pins[pin_id] = now_ms + lasts_ms
        return pin_id

    def unpin(self, snapshot_id: int, pin_id: int) -> None:
        for entry in self._kept:
            if entry.snapshot_id == snapshot_id:
                entry.pins.pop(pin_id, None)

    def take_released(self, now_ms: int) -> list[int]:
        """Ids of images to free: those nobody reads that are not the newest."""
        freed = []
        for entry in list(self._kept):
            live = {pin: end for pin, end in entry.pins.items() if end > now_ms}
            entry.pins = live
            if entry is not self.newest and not live:
                self._kept.remove(entry)
                freed.append(entry.snapshot_id)
        self.released.extend(freed)
        return freed

    def has_room(self) -> bool:
        """Whether another image may be made, be it in the place of the newest."""
        if self.pending is not None:
            return False
        return len(self._kept) < IMAGE_COUNT_MAX or self._spare is not None

    def make_room(self) -> int | None:
        """Gives up the newest snapshot if it stands in the way of a newer one.

        So one reader that is slow, or died, costs the others nothing.

        Returns:
            The snapshot to free, if there is one.
        """
        spare = self._spare
        if len(self._kept) < IMAGE_COUNT_MAX or spare is None:
            return None
        self._kept.remove(spare)
        self.newest = None
        self.released.append(spare.snapshot_id)
        return spare.snapshot_id

    @property
    def _spare(self) -> SnapshotEntry | None:
        """The newest one, when nobody reads it."""
        return None if self.newest is None or self.newest.pins else self.newest

    def held_by(self, now_ms: int) -> str:
        """Who keeps another image from being made, in words; empty when nobody."""
        if self.pending is not None or self.has_room():
            return ""
        ends = [end for entry in self._kept for end in entry.pins.values()]
        left_s = max([0, *(end - now_ms for end in ends)]) / 1000
        return (
            f"{IMAGE_COUNT_MAX} older ones are kept for {len(ends)} readers that have "
            f"not said that they are done, for {left_s:.0f} s more"
        )
