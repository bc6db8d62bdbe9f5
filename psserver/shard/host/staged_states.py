"""Optimizer state that workers have sent and that their next push will load."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from psserver.shard.core.push import PushId
from psserver.shard.core.shard import ShardCore
from pswire.membership import WorkerKey
from pswire.optimizer_states import ChunkState
from pswire.reasons import ErrorReason, Refusal

MEMBERS_ONLY = "only members read and load optimizer state"


@dataclass(frozen=True, slots=True)
class StagedState:
    """State for one push.

    Attributes:
        sequence: The push.
        optimizer: Name of the optimizer.
        chunks: State by chunk; what is not named is without.
    """

    sequence: int
    optimizer: str
    chunks: Mapping[int, ChunkState]


class StagedStates:
    """At most one for each worker."""

    def __init__(self) -> None:
        self._states: dict[WorkerKey, StagedState] = {}

    def check_next(self, core: ShardCore, push: PushId) -> None:
        """Refuses state for a push beyond the sender's next.

        One that is done needs none: with backup workers its clock may have closed.

        Raises:
            Refusal: `WORKER_INCARNATION_STALE` or `SEQUENCE_GAP`.
        """
        if core.clocks.member_of(push.worker) is None:
            raise Refusal(
                ErrorReason.WORKER_INCARNATION_STALE,
                f"{push.worker} is no member; {MEMBERS_ONLY}",
            )
        done = core.closed_sequence(push.worker)
        if push.sequence > done + 1:
            raise Refusal(
                ErrorReason.SEQUENCE_GAP,
                f"state is staged for push {push.sequence} of {push.worker}, the next "
                f"is {done + 1}",
                sequence=push.sequence,
                sequence_done_max=done,
            )

    def put(
        self,
        core: ShardCore,
        push: PushId,
        optimizer: str,
        chunks: Mapping[int, ChunkState],
    ) -> None:
        """Keeps what a worker has sent, in place of what it sent before.

        Raises:
            Refusal: As `check_next`, or `PUSH_CONFLICT` for a push that is under way;
                no state changed.
        """
        self.check_next(core, push)
        entry = core.on_shard.entry_of(push)
        if entry is not None and entry.trailer is not None and entry.outcome is None:
            raise Refusal(
                ErrorReason.PUSH_CONFLICT,
                f"push {push.sequence} of {push.worker} is under way: state for it is "
                "too late",
            )
        if push.sequence > core.closed_sequence(push.worker):
            self._states[push.worker] = StagedState(push.sequence, optimizer, chunks)

    def check_staged(self, core: ShardCore, push: PushId, optimizer: str) -> None:
        """Refuses a trailer that would load what is not here.

        A push that is done loads nothing any more: with backup workers its clock may
        have closed without it.

        Raises:
            Refusal: `RECOVERING`.
        """
        if push.sequence <= core.closed_sequence(push.worker):
            return
        if self.of(push, optimizer) is None:
            raise Refusal(
                ErrorReason.RECOVERING,
                f"push {push.sequence} of {push.worker} loads state of "
                f"{optimizer[:64]!r}, and none is staged for it",
            )

    def of(self, push: PushId, optimizer: str) -> StagedState | None:
        """What a push loads, if it is there."""
        state = self._states.get(push.worker)
        if state is None or (state.sequence, state.optimizer) != (
            push.sequence,
            optimizer,
        ):
            return None
        return state

    def drop(self, push: PushId) -> None:
        """The push is done."""
        state = self._states.get(push.worker)
        if state is not None and state.sequence <= push.sequence:
            del self._states[push.worker]

    def keep_only(
        self,
        workers: Collection[WorkerKey],
        last_sequence_of: Callable[[WorkerKey], int],
    ) -> None:
        """Drops the state of workers that have ended, unless its push still counts.

        Args:
            workers: The members.
            last_sequence_of: The last push that counts of one that has ended.
        """
        self._states = {
            worker: state
            for worker, state in self._states.items()
            if worker in workers or state.sequence <= last_sequence_of(worker)
        }
