"""Shards as the coordinator knows them."""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from psserver.edge.memory_grant import NO_GRANT, MemoryGrant
from pswire.aggregation import GradientCounts
from pswire.awaited import Awaited, lost_text
from pswire.limits import WAITING_INTERVAL_MS
from pswire.membership import Member, WorkerKey
from pswire.reasons import ErrorReason, Refusal

CLAIM_TTL_MS = 2_000
"""Time in which a process that has registered must open its watch before its place is
given to another one."""

STANDING_COUNT_MAX = 11
"""Reports that are kept of a shard: ten seconds of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardStanding:
    """A shard's last report of its progress.

    Attributes:
        heard_ms: When it came, None before the first.
        applied_clock: Highest clock that is complete.
        version: Version of its values.
        frontier: Smallest clock over the members.
        parameter_bytes: Bytes of parameters that it holds.
        optimizer_bytes: Bytes of optimizer state that it holds.
        queued_push_count: Pushes that have begun to arrive and are not done.
        torn_step_count: Steps of evicted workers of which a part was applied.
        staleness_counts: Pushes by staleness; the last one is for that and more.
        done: Of each member, its last push that is done.
        gradients: Of members, those that did not count as they were sent.
        sharing: Members whose tensors go through memory that it shares with them.
        waiting_for: Whom its next clock waits for.
        waiting_reason: What it waits for, in words.
        waited_ms: For how long it had waited.
        resident_bytes: Memory of its process, 0 if it is not known.
        apply_s: Time that its threads have applied updates for, all together.
        received_bytes: Of the messages that its data plane was sent.
        sent_bytes: Of those that it has sent.
        duplicate_count: Pushes that were sent again and were done already.
        chunk_count: Chunks that it holds.
        recording_end: Why its recording has ended early, in words.
        is_recording_end_known: Whether it has reported that before, perhaps to an
            earlier process of the coordinator.
        waits: Of each member, for how many seconds its pushes were complete and waited
            for others.
    """

    heard_ms: int | None = None
    applied_clock: int = 0
    version: int = 0
    frontier: int = 0
    parameter_bytes: int = 0
    optimizer_bytes: int = 0
    queued_push_count: int = 0
    torn_step_count: int = 0
    staleness_counts: tuple[int, ...] = ()
    done: Mapping[WorkerKey, int] = field(default_factory=dict)
    gradients: Mapping[WorkerKey, GradientCounts] = field(default_factory=dict)
    sharing: frozenset[WorkerKey] = frozenset()
    waiting_for: tuple[Awaited, ...] = ()
    waiting_reason: str = ""
    waited_ms: int = 0
    resident_bytes: int = 0
    apply_s: float = 0.0
    received_bytes: int = 0
    sent_bytes: int = 0
    duplicate_count: int = 0
    chunk_count: int = 0
    recording_end: str = ""
    is_recording_end_known: bool = False
    waits: Mapping[WorkerKey, float] = field(default_factory=dict)

    def clock_of(self, member: Member) -> int:
        """Clock of a member here; that of its joining if the shard has not said."""
        sequence = self.done.get(member.worker)
        return member.base_clock if sequence is None else member.clock_of(sequence)


NOT_TOLD: Final = ShardStanding()
"""Of a shard that has not reported yet."""


@dataclass(slots=True)
class ShardSlot:
    """One place in the shard map.

    Attributes:
        index: Its position.
        address: Where workers reach it; empty while it is missing.
        incarnation: Count of starts.
        process_id: Unique to its process.
        heard_ms: Its last sign of life, None if never.
        is_watching: Whether its stream is open.
        broken_ms: When its stream broke, None while it is open.
        standing: Its last report of its progress.
        recent: The last ones, the newest last.
        memory: What its process may use.
        was_lost: Whether its process was away when the job returned to a checkpoint.
    """

    index: int
    address: str = ""
    incarnation: int = 0
    process_id: str = ""
    heard_ms: int | None = None
    is_watching: bool = False
    broken_ms: int | None = None
    standing: ShardStanding = NOT_TOLD
    recent: deque[ShardStanding] = field(
        default_factory=lambda: deque(maxlen=STANDING_COUNT_MAX)
    )
    memory: MemoryGrant = NO_GRANT
    was_lost: bool = False

    def take(self, standing: ShardStanding) -> None:
        """Takes a report of its progress, which is a sign of life."""
        self.heard_ms = standing.heard_ms
        self.standing = standing
        before = self.recent[-1] if self.recent else None
        if before is not None and (
            # Another process than before, or one that had no values yet: those of a
            # checkpoint have a version that nobody has trained meanwhile.
            standing.version < before.version or not before.done
        ):
            self.recent.clear()
        self.recent.append(standing)

    @property
    def steps_per_s(self) -> float | None:
        """Steps of all workers lately, None before there are two reports."""
        seconds = self._recent_s
        if not seconds:
            return None
        return (self.recent[-1].version - self.recent[0].version) / seconds

    @property
    def apply_ms(self) -> float | None:
        """How long its threads apply a clock lately, all together; a push outside BSP.

        None where there was none.
        """
        if not self._recent_s:
            return None
        first, last = self.recent[0], self.recent[-1]
        clock_count = last.applied_clock - first.applied_clock
        count = clock_count or last.version - first.version
        return 1000 * (last.apply_s - first.apply_s) / count if count > 0 else None

    def peer_wait_ms(self, worker: WorkerKey) -> float | None:
        """How long a push of a member waits here for those of others lately.

        None where it had none done.
        """
        first = next((each for each in self.recent if worker in each.done), None)
        if first is None:
            return None
        last = next(each for each in reversed(self.recent) if worker in each.done)
        count = last.done[worker] - first.done[worker]
        waited_s = last.waits.get(worker, 0.0) - first.waits.get(worker, 0.0)
        return 1000 * waited_s / count if count > 0 else None

    @property
    def _recent_s(self) -> float:
        """Time between the first and the last report that is kept."""
        times = [each.heard_ms for each in self.recent if each.heard_ms is not None]
        return (times[-1] - times[0]) / 1000 if times else 0.0

    def state_text(self, now_ms: int) -> str:
        """Its name, whether it lives, and where it stands, for who waits for it."""
        clock = self.standing.applied_clock
        if self.was_lost:
            state = "lost: a new one has to take its place"
        elif self.heard_ms is None:
            state = "not connected yet"
        elif not self.is_watching:
            state = f"{lost_text(max(0, now_ms - self.heard_ms))} at clock {clock}"
        elif now_ms - self.heard_ms >= WAITING_INTERVAL_MS:
            # Its connection is open, and a report is due every second.
            silent_s = (now_ms - self.heard_ms) / 1000
            state = f"no report for {silent_s:.0f} s, at clock {clock}"
        else:
            state = f"alive, at clock {clock}"
        return f"shard {self.index} ({state})"

    def loss_text(self, now_ms: int) -> str:
        """That its process is gone, and where it stood."""
        if self.heard_ms is None:
            return f"shard {self.index} did not come back"
        lost = lost_text(max(0, now_ms - self.heard_ms))
        return f"shard {self.index} was {lost} at clock {self.standing.applied_clock}"

    def is_free(self, now_ms: int) -> bool:
        """Whether no process has it, or its process is gone."""
        if not self.process_id:
            return True
        is_claimed = (
            self.broken_ms is None
            and self.heard_ms is not None
            and now_ms - self.heard_ms < CLAIM_TTL_MS
        )
        return not self.is_watching and not is_claimed


class ShardMap:
    """All places of a job."""

    def __init__(self, shard_count: int) -> None:
        self.slots = [ShardSlot(index) for index in range(shard_count)]
        # New processes that have asked for a place while all were taken, and when.
        self._seekers: dict[str, int] = {}

    def register(
        self,
        *,
        process_id: str,
        address: str,
        can_replace: bool,
        now_ms: int,
        memory: MemoryGrant = NO_GRANT,
        wanted_index: int | None = None,
    ) -> ShardSlot:
        """Gives a process its place; the same one when it asks again.

        Args:
            process_id: Unique to the process.
            address: Where workers reach it.
            can_replace: Whether a place whose process is gone may be given away:
                only before the start, when no values are lost with it.
            now_ms: Monotonic time.
            memory: What the process may use.
            wanted_index: Place that it asks for, which it gets if it is free.

        Raises:
            Refusal: `SHARD_UNKNOWN` when every place is taken; no state changed.
        """
        known = self.place_of(process_id)
        if known is not None:
            return known
        free = [
            slot
            for slot in self.slots
            if slot.is_free(now_ms) and (can_replace or not slot.process_id)
        ]
        if not free:
            places = ", ".join(f"shard {s.index} at {s.address}" for s in self.slots)
            away = " and ".join(f"shard {slot.index}" for slot in self.missing)
            lost = (
                f"; no answer from {away}, whose values a new process does not have: "
                "if it has ended, start a new job, with another --state-dir"
            )
            raise Refusal(
                ErrorReason.SHARD_UNKNOWN,
                f"the job has {len(self.slots)} shards and all are taken: {places}"
                + (lost if away and not can_replace else ""),
            )
        slot = min(
            free,
            key=lambda s: (
                s.index != wanted_index,
                not s.was_lost,
                bool(s.process_id),
                s.index,
            ),
        )
        slot.process_id = process_id
        slot.address = address
        slot.incarnation += 1
        slot.heard_ms = now_ms
        slot.broken_ms = None
        slot.standing = NOT_TOLD
        slot.recent.clear()
        slot.memory = memory
        slot.was_lost = False
        return slot

    def vacate(self) -> None:
        """Takes all places back: the values of the processes that had them are void."""
        for slot in self.slots:
            slot.was_lost = not slot.is_watching
            slot.process_id = slot.address = ""
            slot.heard_ms = slot.broken_ms = None
            slot.is_watching = False
            slot.standing = NOT_TOLD
            slot.recent.clear()
        self._seekers.clear()

    def note_seeker(self, process_id: str, now_ms: int) -> None:
        """A new process asks for a place, which it does again and again."""
        self._seekers[process_id] = now_ms

    def are_replaced(self, now_ms: int, grace_ms: int) -> bool:
        """Whether new processes ask for the places of all that are away."""
        self._seekers = {
            process_id: asked_ms
            for process_id, asked_ms in self._seekers.items()
            if now_ms - asked_ms < CLAIM_TTL_MS
        }
        away = self.missing
        return 0 < len(away) <= len(self._seekers) and all(
            slot.heard_ms is None
            or (slot.broken_ms is not None and now_ms - slot.broken_ms >= grace_ms)
            for slot in away
        )

    def place_of(self, process_id: str) -> ShardSlot | None:
        """The place that a process has, None if it has none."""
        return next((s for s in self.slots if s.process_id == process_id), None)

    def memento(self) -> Callable[[], None]:
        """What puts all places back as they are now, the same objects."""
        before = [replace(slot) for slot in self.slots]

        def put_back() -> None:
            for slot, old in zip(self.slots, before, strict=True):
                slot.process_id, slot.address = old.process_id, old.address
                slot.incarnation, slot.heard_ms = old.incarnation, old.heard_ms
                slot.broken_ms, slot.standing = old.broken_ms, old.standing
                slot.memory, slot.was_lost = old.memory, old.was_lost

        return put_back

    def slot(self, index: int, incarnation: int, process_id: str) -> ShardSlot:
        """The place of a calling shard.

        Index and incarnation are easily guessed, and a second watch ends the first:
        only the process that has registered knows the id that it drew.

        Raises:
            Refusal: `SHARD_UNKNOWN` or `SHARD_INCARNATION_STALE`.
        """
        if not 0 <= index < len(self.slots):
            raise Refusal(ErrorReason.SHARD_UNKNOWN, f"the job has no shard {index}")
        slot = self.slots[index]
        if slot.incarnation != incarnation:
            raise Refusal(
                ErrorReason.SHARD_INCARNATION_STALE,
                f"shard {index} is in incarnation {slot.incarnation}, the caller is "
                f"{incarnation}",
            )
        if slot.process_id != process_id:
            raise Refusal(
                ErrorReason.SHARD_INCARNATION_STALE,
                f"shard {index} is another process than the caller",
            )
        return slot

    def clock_of(self, member: Member) -> int:
        """Clock of a member that every shard has completed, as they last reported."""
        return min(slot.standing.clock_of(member) for slot in self.slots)

    def peer_wait_ms(self, worker: WorkerKey) -> float | None:
        """How long a step of a member waits for those of others lately.

        On the shard where that is longest: an answer comes from all. None where no push
        was done, or a shard has not said.
        """
        waits = [slot.peer_wait_ms(worker) for slot in self.slots]
        known = [each for each in waits if each is not None]
        return max(known) if len(known) == len(waits) else None

    @property
    def has_begun(self) -> bool:
        """Whether every shard has said how far its members are, and so its version."""
        return all(slot.standing.done for slot in self.slots)

    @property
    def steps_per_s(self) -> float | None:
        """Steps of all workers lately, None where a shard has not said."""
        rates = [slot.steps_per_s for slot in self.slots]
        known = [each for each in rates if each is not None]
        return min(known) if len(known) == len(rates) else None

    @property
    def version(self) -> int:
        """Version that every shard has reached, as they last reported."""
        return min(slot.standing.version for slot in self.slots)

    def lost(self, now_ms: int, grace_ms: int) -> list[ShardSlot]:
        """Places whose process has been away for too long."""
        return [
            slot
            for slot in self.slots
            if slot.broken_ms is not None and now_ms - slot.broken_ms >= grace_ms
        ]

    @property
    def missing(self) -> list[ShardSlot]:
        """Places without a process that listens."""
        return [slot for slot in self.slots if not slot.is_watching]
