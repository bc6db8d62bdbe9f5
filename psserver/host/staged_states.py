"""Optimizer state that workers have sent and that their next push will load."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from psserver.core.push import PushId
from psserver.core.record import WorkerKey
from pswire.optimizer_states import ChunkState


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

    def put(self, worker: WorkerKey, state: StagedState) -> None:
        """Keeps what a worker has sent, in place of what it sent before."""
        self._states[worker] = state

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
