"""What an optimizer needs of whoever takes its steps."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from pswire.schema import OptimizerSpec
from psworker.optim.optimizer_state import States
from psworker.optim.push_result import PushResult
from psworker.transport.values import OptimizerSettings

if TYPE_CHECKING:
    import torch

Groups = tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True)
class PushExtras:
    """What goes with a push of an optimizer beside its gradient.

    Attributes:
        spec_digest: Which declaration of the optimizer it is by, empty for the first.
        loads: State that shards shall give the optimizer first.
        on_loaded: Called once shards have taken that state, by the push that carried
            it. A call of `step` may only end an earlier push, which did not.
        scheduler_steps: Steps of its schedulers.
        is_awaited: Whether the script needs the result before it goes on.
        averaged_over: Processes over which a gradient that is to be a sum was averaged.
    """

    spec_digest: str = ""
    loads: States | None = None
    on_loaded: Callable[[], None] | None = None
    scheduler_steps: tuple[int, ...] = ()
    is_awaited: bool = False
    averaged_over: int = 1


NO_EXTRAS: Final = PushExtras()


class Steps(Protocol):
    """Takes the steps of all optimizers of a process, see `Stepper`."""

    @property
    def reads_state(self) -> bool:
        """Whether this process can ask shards for optimizer state."""
        ...

    def step(
        self,
        spec: OptimizerSpec,
        groups: Groups,
        *,
        weight: float | None,
        is_finite: bool = True,
        scale: "torch.Tensor | None" = None,
        extras: PushExtras = NO_EXTRAS,
    ) -> PushResult | None:
        """Pushes the gradient of one optimizer and leaves the newest values.

        Returns:
            What became of it, `None` while that is left under way.
        """
        ...

    def push_nothing(
        self, spec: OptimizerSpec, groups: Groups, extras: PushExtras = NO_EXTRAS
    ) -> PushResult:
        """Pushes weight 0 for the next clock."""
        ...

    def publish(
        self,
        spec: OptimizerSpec,
        groups: Groups,
        entry_indexes: Collection[int],
        extras: PushExtras = NO_EXTRAS,
    ) -> PushResult:
        """Makes the values of these tensors, as they are here, those of the job."""
        ...

    def note_zeroed(self) -> None:
        """The script has zeroed gradients, perhaps some that no step has taken."""
        ...

    def optimizer_state(self, optimizer: str, spec_digest: str) -> States:
        """The state of an optimizer after all that this worker has pushed."""
        ...

    def settings_used(self, optimizer: str) -> OptimizerSettings:
        """What the newest update of an optimizer was made with."""
        ...

    def declare(self, spec: OptimizerSpec) -> None:
        """Tells the job that an optimizer has other groups, or is another one."""
        ...
