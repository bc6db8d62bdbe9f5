"""Asynchronous local SGD, with Nesterov momentum that waits for several arrivals."""

from typing import ClassVar

import torch
from typing_extensions import override

from pswire.delayed_nesterov import DelayedNesterov
from psworker.strategies.local_steps import LocalSteps
from psworker.strategies.pace import Every, Pace
from psworker.strategies.strategy import Tensors


class AsyncLocalSGD(LocalSteps):
    """Local steps on clocks of their own, with a delayed Nesterov momentum.

    Of B. Liu and others, "Asynchronous Local-SGD Training for Language Modeling"
    (arXiv:2401.09135, 2024). Each push is applied as it arrives; the shards' momentum
    moves once in `buffer_size` arrivals. Where machines differ, give each worker its
    own `every`, in proportion to its speed, as the paper's dynamic local updates do:
    then all their pushes are about as old.
    """

    modes: ClassVar[tuple[str, ...]] = ("ssp", "asp")

    def __init__(
        self,
        every: Every | Pace = 50,
        *,
        lr: float = 0.7,
        momentum: float = 0.9,
        buffer_size: int = 4,
        activation: float = 0.0,
    ) -> None:
        """Takes the numbers of the paper.

        Args:
            every: Local steps of a round.
            lr: Outer learning rate, as for `psworker.DelayedNesterov`.
            momentum: Outer momentum.
            buffer_size: Arrivals to one move of the momentum: the number of workers.
            activation: How much of the momentum the arrivals between apply.

        Raises:
            ConfigurationError: `every` is no number of steps.
            ValueError: A value of the outer optimizer is out of its range.
        """
        super().__init__(every)
        self._outer_values = {
            "lr": lr,
            "momentum": momentum,
            "buffer_size": buffer_size,
            "activation": activation,
        }
        self.outer([torch.zeros(1)])  # so that bad values are refused here

    @override
    def outer(self, parameters: Tensors) -> torch.optim.Optimizer:
        return DelayedNesterov(parameters, **self._outer_values)  # type: ignore[arg-type]
