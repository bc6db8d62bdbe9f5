"""What has happened to a job, for people: a bounded ring of events."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from psserver.coordinator.core.fence import NUMBERS_PER_START

EVENT_COUNT_MAX = 1_000
"""Events that are remembered, the newest ones."""

TEXT_BYTES_MAX = 2_000
"""Of the text of one, in UTF-8: that of an error may be as long as a stack, and all
events go into one message."""


def shortened(text: str) -> str:
    """A text that comes from outside, of at most `TEXT_BYTES_MAX`."""
    return text.encode(errors="replace")[:TEXT_BYTES_MAX].decode(errors="ignore")


class EventKind(StrEnum):
    """Kinds of events, by the word that clients see."""

    COORDINATOR_STARTED = "coordinator_started"
    JOB_STARTED = "job_started"
    JOB_FINISHED = "job_finished"
    JOB_FAILED = "job_failed"
    JOB_REWOUND = "job_rewound"
    WORKER_JOINED = "worker_joined"
    WORKER_LEFT = "worker_left"
    WORKER_SUSPECT = "worker_suspect"
    WORKER_LOST = "worker_lost"
    WORKER_RETURNED = "worker_returned"
    WORKER_EVICTED = "worker_evicted"
    WORKER_REPLACED = "worker_replaced"
    SHARD_REGISTERED = "shard_registered"
    SHARD_LOST = "shard_lost"
    SHARD_RETURNED = "shard_returned"
    RECORDING_ENDED = "recording_ended"
    MODE_CHANGED = "mode_changed"
    CHECKPOINT_COMPLETE = "checkpoint_complete"
    CHECKPOINT_FAILED = "checkpoint_failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEvent:
    """Something that has happened.

    Attributes:
        number: Its number; those of one job grow, over all starts of its coordinator.
        at_ms: When, monotonic.
        kind: What it is.
        text: What has happened, for a person.
        worker_id: The worker that it is about, empty for none.
        shard_index: The shard that it is about, None for none.
        clock: Clock of it, None where it has none.
    """

    number: int
    at_ms: int
    kind: EventKind
    text: str
    worker_id: str = ""
    shard_index: int | None = None
    clock: int | None = None


class Events:
    """Events of a job, the newest `EVENT_COUNT_MAX`."""

    def __init__(self, start_count: int = 0) -> None:
        """Remembers none.

        Args:
            start_count: Starts of the coordinator before this one: its numbers go on
                above theirs.
        """
        self._ring: deque[JobEvent] = deque(maxlen=EVENT_COUNT_MAX)
        self._next_number = start_count * NUMBERS_PER_START + 1

    @property
    def newest_number(self) -> int:
        """Number of the newest event, or the one before the first."""
        return self._next_number - 1

    def add(
        self,
        kind: EventKind,
        text: str,
        at_ms: int,
        *,
        worker_id: str = "",
        shard_index: int | None = None,
        clock: int | None = None,
    ) -> None:
        """Notes that something has happened."""
        self._ring.append(
            JobEvent(
                number=self._next_number,
                at_ms=at_ms,
                kind=kind,
                text=shortened(text),
                worker_id=worker_id,
                shard_index=shard_index,
                clock=clock,
            )
        )
        self._next_number += 1

    def after(self, number: int) -> Iterator[JobEvent]:
        """Events with greater numbers, oldest first."""
        return (event for event in self._ring if event.number > number)
