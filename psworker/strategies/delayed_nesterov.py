"""Asynchronous local SGD, with Nesterov momentum that waits for several arrivals."""

from typing import ClassVar

import torch
from typing_extensions import override

from pswire.delayed_nesterov import DelayedNesterov
from pswire.number_range import NumberRange
from psworker.errors import refuse_numbers
from psworker.strategies.local_steps import LocalSteps
from psworker.strategies.pace import Every, Pace
from psworker.strategies.strategy import RATE, SHARE, Tensors


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
            ConfigurationError: A number is out of its range.
        """
        super().__init__(every)
        refuse_numbers(RATE, lr=lr)
        refuse_numbers(SHARE, momentum=momentum)
        refuse_numbers(NumberRange(1, 1_000_000), buffer_size=buffer_size)
        all_of_it = NumberRange(0.0, 1 / buffer_size, why="that is 1 / buffer_size")
        refuse_numbers(all_of_it, activation=activation)
        self._outer_values = {
            "lr": lr,
            "momentum": momentum,
            "buffer_size": buffer_size,
            "activation": activation,
        }

    @override
    def outer(self, parameters: Tensors) -> torch.optim.Optimizer:
        return DelayedNesterov(parameters, **self._outer_values)  # type: ignore[arg-type]
