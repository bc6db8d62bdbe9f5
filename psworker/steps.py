"""What an optimizer needs of whoever takes its steps."""

from typing import TYPE_CHECKING, Protocol

from pswire.schema import OptimizerSpec
from psworker.push_result import PushResult

if TYPE_CHECKING:
    import torch

Groups = tuple[tuple[float, ...], ...]


class Steps(Protocol):
    """Takes the steps of all optimizers of a process, see `Stepper`."""

    def step(
        self,
        spec: OptimizerSpec,
        groups: Groups,
        *,
        weight: float | None,
        is_finite: bool = True,
        scale: "torch.Tensor | None" = None,
    ) -> PushResult:
        """Pushes the gradient of one optimizer and leaves the newest values."""
        ...

    def push_nothing(self, spec: OptimizerSpec, groups: Groups) -> PushResult:
        """Pushes weight 0 for the next clock."""
        ...
