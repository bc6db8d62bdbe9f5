"""Where a shard stands, as it last told: for people, never for a decision."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from pswire.awaited import Awaited
from pswire.membership import Member, WorkerKey


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
        sharing: Members whose tensors go through memory that it shares with them.
        waiting_for: Whom its next clock waits for.
        waiting_reason: What it waits for, in words.
        waited_ms: For how long it had waited.
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
    sharing: frozenset[WorkerKey] = frozenset()
    waiting_for: tuple[Awaited, ...] = ()
    waiting_reason: str = ""
    waited_ms: int = 0

    def clock_of(self, member: Member) -> int:
        """Clock of a member here; that of its joining if the shard has not told."""
        sequence = self.done.get(member.worker)
        return member.base_clock if sequence is None else member.clock_of(sequence)


NOT_TOLD: Final = ShardStanding()
"""Of a shard that has not reported yet."""
