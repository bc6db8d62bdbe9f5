"""A parameter server that collects everything, then computes: one line after another.

No shards, no chunks, no bytes. Means and sums are taken with Python's own floats,
element by element, and torch's own optimizer does the step on whole tensors.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

Gradient = list[float] | None


@dataclass(frozen=True)
class WholePush:
    """One worker's part of a clock: a gradient for each tensor, or none."""

    worker_id: str
    weight: float
    gradients: tuple[Gradient, ...]


class DumbServer:
    """Parameters and an optimizer in one place."""

    def __init__(
        self,
        first_values: Sequence[torch.Tensor],
        make_optimizer: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer],
        *,
        adds_up: bool = False,
    ) -> None:
        self._adds_up = adds_up
        self.parameters = [torch.nn.Parameter(each.clone()) for each in first_values]
        self._optimizer = make_optimizer(self.parameters)

    def step(self, pushes: Sequence[WholePush]) -> None:
        """One clock of all these pushes."""
        total = sum(push.weight for push in pushes)
        if total == 0:
            return
        for position, parameter in enumerate(self.parameters):
            parameter.grad = None
            present = [
                (1.0 if self._adds_up else push.weight / total, gradient)
                for push in pushes
                if push.weight > 0
                and (gradient := push.gradients[position]) is not None
            ]
            if present:
                mean = [
                    sum(share * gradient[index] for share, gradient in present)
                    for index in range(parameter.numel())
                ]
                parameter.grad = torch.tensor(mean, dtype=parameter.dtype)
        self._optimizer.step()
