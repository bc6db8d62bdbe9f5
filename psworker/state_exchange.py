"""Optimizer state of this worker's job, between torch's form and the shards.

In the user's thread.
"""

from collections.abc import Iterator

from pswire.reasons import Refusal
from psworker.errors import error_of_refusal
from psworker.event_loop import EventLoop
from psworker.optimizer_state import States, gather, parts_of
from psworker.session import Session
from psworker.tensor_chunks import ValueStore
from psworker.transport.values import OptimizerSettings
from psworker.waiting_log import WaitingLog


class StateExchange:
    """Reads the state of optimizers from shards, and sends it to them."""

    def __init__(
        self, loop: EventLoop, session: Session, store: ValueStore, timeout_s: float
    ) -> None:
        """Remembers whom to ask.

        Args:
            loop: Where calls run.
            session: The worker.
            store: Knows how tensors are cut.
            timeout_s: Longest time for all shards.
        """
        self._loop = loop
        self._session = session
        self._store = store
        self._timeout_s = timeout_s

    def pull(self, optimizer: str, clock: int) -> States:
        """The state of an optimizer as of a clock.

        Raises:
            EvictedError: This worker is no member any more.
            WaitTimeoutError: It took too long.
        """
        parts, _ = self._loop.run(
            self._session.shards.states.pull(
                optimizer,
                clock,
                only_settings=False,
                on_waiting=WaitingLog().note,
                timeout_s=self._timeout_s,
            )
        )
        try:
            return gather(parts, self._store.placement)
        except Refusal as refusal:
            raise error_of_refusal(refusal) from None

    def pull_settings(self, optimizer: str, clock: int) -> OptimizerSettings:
        """What the newest update of an optimizer was made with; see `pull`."""
        _, settings = self._loop.run(
            self._session.shards.states.pull(
                optimizer,
                clock,
                only_settings=True,
                on_waiting=WaitingLog().note,
                timeout_s=self._timeout_s,
            )
        )
        return settings

    def stage(self, optimizer: str, sequence: int, states: States) -> None:
        """Sends state to all shards, which the push of this number will load.

        Raises:
            EvictedError: This worker is no member any more.
            HyperparameterError: It is none that the optimizer can go on from.
        """

        def parts(shard_index: int) -> Iterator[tuple[int, bytes]]:
            for chunk in self._store.placement.chunks_by_shard[shard_index]:
                for part in parts_of(chunk, states):
                    yield chunk.index, part

        self._loop.run(
            self._session.shards.states.stage(
                optimizer, sequence, parts, timeout_s=self._timeout_s
            )
        )
