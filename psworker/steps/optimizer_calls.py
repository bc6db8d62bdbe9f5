"""What an optimizer asks of its job beside the steps: state, settings, declarations.

In the user's thread.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TypeVar

from pswire.schema import OptimizerSpec
from psworker.optim.optimizer_state import States
from psworker.steps.state_exchange import StateExchange
from psworker.transport.values import OptimizerSettings

T = TypeVar("T")


class OptimizerCalls(ABC):
    """Calls of a member, for who can see to it that the worker is one."""

    def __init__(self, states: StateExchange) -> None:
        self._states = states

    @property
    def reads_state(self) -> bool:
        """Whether this process can ask shards for optimizer state: yes."""
        return True

    @abstractmethod
    def as_member(self, work: Callable[[int], T]) -> T:
        """Does work at this worker's clock, again as a new start if it was evicted.

        Args:
            work: Given the clock.
        """

    def declare(self, spec: OptimizerSpec) -> None:
        """Tells the job of other groups, or another optimizer, for pushes to come.

        Returns when every shard knows, so that no push waits for that.

        Raises:
            OptimizerUnsupportedError: Shards can't run it.
            LimitError: Too much was declared already.
            WaitTimeoutError: The shards did not hear of it in time.
        """
        self.as_member(lambda clock: self._states.declare(spec, clock))

    def optimizer_state(self, optimizer: str, spec_digest: str) -> States:
        """The state of an optimizer after all that this worker has pushed.

        Raises:
            StepTimeoutError: What was pushed is not complete in time.
            WaitTimeoutError: The state did not come in time.
        """
        return self.as_member(
            lambda clock: self._states.pull(optimizer, clock, spec_digest)
        )

    def settings_used(self, optimizer: str) -> OptimizerSettings:
        """What the newest update of an optimizer was made with."""
        return self.as_member(
            lambda clock: self._states.pull_settings(optimizer, clock)
        )
