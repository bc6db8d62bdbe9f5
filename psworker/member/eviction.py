"""What an eviction leaves behind, and what comes after it: plain values."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from pswire.membership import Member, WorkerKey
from psworker.member.outgoing_push import OutgoingPush
from psworker.member.stand_in import StandIn
from psworker.optim.push_result import PushResult


@dataclass(frozen=True, slots=True)
class LostStart:
    """A start of this worker that the job has given up.

    Attributes:
        worker: Which start.
        pushes: Each shard's part of its push that was under way; empty if none was.
    """

    worker: WorkerKey
    pushes: Sequence[OutgoingPush] = ()

    @property
    def sequence(self) -> int:
        """Number of the push that was under way, 0 if none was."""
        return self.pushes[0].header.sequence if self.pushes else 0


@dataclass(frozen=True, slots=True)
class Rejoined:
    """This worker's new place in the job.

    Attributes:
        member: The place.
        push: What became of the push that was under way, with the numbers of the
            values that are in the model now.
        stand_in: Takes this worker's place until its next step.
    """

    member: Member
    push: PushResult
    stand_in: StandIn | None = None


class Rejoining(Protocol):
    """How a worker that was evicted takes part again."""

    def rejoin(self, lost: LostStart) -> Rejoined:
        """Joins as a new start under the same id; the model then holds its values.

        Called again after an error, it goes on where it stopped.

        Raises:
            StepTimeoutError: It was not taken in in time.
            EvictedError: A replacement has its place.
            PsError: The job can't go on.
        """
        ...
