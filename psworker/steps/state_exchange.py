"""Optimizer state of this worker's job, between torch's form and the shards.

In the user's thread.
"""

from collections.abc import Iterator, Sequence

from pswire.reasons import Refusal
from pswire.schema import OptimizerSpec
from psworker.errors import error_of_refusal
from psworker.event_loop import EventLoop
from psworker.member.optimizer_state_calls import StateAnswer
from psworker.member.session import Session
from psworker.optim.optimizer_state import States, gather, parts_of
from psworker.tensors.value_store import ValueStore
from psworker.transport.values import OptimizerSettings
from psworker.transport.waiting_log import WaitingLog


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

    def declare(self, spec: OptimizerSpec, clock: int) -> None:
        """Declares an optimizer to the job; returns when every shard knows.

        Raises:
            EvictedError: This worker is no member any more.
            WaitTimeoutError: It took too long.
        """
        self._loop.run(lambda: self._session.declare_optimizer(spec))
        self.pull_settings(spec.name, clock, spec.digest)

    def pull(self, optimizer: str, clock: int, spec_digest: str = "") -> States:
        """The state of an optimizer as of a clock.

        Raises:
            EvictedError: This worker is no member any more.
            WaitTimeoutError: It took too long.
        """
        answers = self._pull(optimizer, clock, spec_digest, only_settings=False)
        parts = [part for own, _ in answers for part in own]
        try:
            return gather(parts, self._store.placement)
        except Refusal as refusal:
            raise error_of_refusal(refusal) from None

    def pull_settings(
        self, optimizer: str, clock: int, spec_digest: str = ""
    ) -> OptimizerSettings:
        """What the newest update of an optimizer was made with; see `pull`."""
        answers = self._pull(optimizer, clock, spec_digest, only_settings=True)
        # Every shard sees every push, also one that holds nothing of the optimizer.
        return answers[0][1]

    def _pull(
        self, optimizer: str, clock: int, spec_digest: str, *, only_settings: bool
    ) -> Sequence[StateAnswer]:
        return self._loop.run(
            lambda: self._session.shards.states.pull(
                optimizer,
                clock,
                spec_digest=spec_digest,
                only_settings=only_settings,
                on_waiting=WaitingLog().note,
                timeout_s=self._timeout_s,
            )
        )

    def stage(
        self, optimizer: str, sequence: int, states: States, spec_digest: str = ""
    ) -> None:
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
            lambda: self._session.shards.states.stage(
                optimizer,
                sequence,
                parts,
                spec_digest=spec_digest,
                timeout_s=self._timeout_s,
            )
        )
