"""Nesterov momentum for updates that come one by one, and late: an outer optimizer."""

from collections.abc import Callable, Iterable
from typing import Any

import torch


class DelayedNesterov(torch.optim.Optimizer):
    """SGD with Nesterov momentum that moves once in `buffer_size` updates.

    Of B. Liu and others, "Asynchronous Local-SGD Training for Language Modeling"
    (arXiv:2401.09135, 2024), Algorithm 3. Where workers push one after another, each
    from values of its own age, momentum that is applied at every arrival adds up what
    is late. Here each arrival moves the values by its own part alone, and their mean
    enters the momentum at every `buffer_size`-th: over so many updates the values move
    as by one step of Nesterov's with the mean of these gradients. With `buffer_size=1`
    it is `torch.optim.SGD(lr=lr, momentum=momentum, nesterov=True)`.

    Elementwise, so that shards run it on slices. State of a parameter: `step`, the
    updates so far, `gradient_sum`, of the gradients since the momentum last moved, and
    with a momentum `momentum_buffer`.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 0.7,
        momentum: float = 0.9,
        buffer_size: int = 4,
        activation: float = 0.0,
    ) -> None:
        """Makes no state: that comes with the first update of a parameter.

        Args:
            params: Parameters, or groups of them.
            lr: Learning rate of a mean of `buffer_size` gradients; one of them moves
                the values by a `buffer_size`-th of it.
            momentum: Decay of the momentum (the paper's beta), at least 0.
            buffer_size: Updates to one of the momentum (N). The paper takes the number
                of workers.
            activation: How much of the momentum every update between applies (c), at
                most 1 / `buffer_size`; the paper's choice is 0.

        Raises:
            ValueError: A value is out of its range.
        """
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "buffer_size": buffer_size,
            "activation": activation,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's.

        Raises:
            ValueError: A value is out of its range.
        """
        values = {**self.defaults, **param_group}
        size = values["buffer_size"]
        if not float(values["lr"]) >= 0.0:
            raise ValueError(f"lr is {values['lr']}; it must be at least 0")
        if not float(values["momentum"]) >= 0.0:
            raise ValueError(f"momentum is {values['momentum']}; it must be at least 0")
        if int(size) != size or size < 1:
            raise ValueError(f"buffer_size is {size}; it must be a whole number from 1")
        if not 0.0 <= float(values["activation"]) * size <= 1.0:
            raise ValueError(
                f"activation is {values['activation']}; it must be from 0 to "
                f"1 / buffer_size, here {1 / size:g}"
            )
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # noqa: ANN401
        """Updates every parameter that has a gradient.

        Args:
            closure: Computes the loss and the gradients again.

        Returns:
            What `closure` returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)
        return loss

    def _update(
        self, parameter: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]
    ) -> None:
        rate, momentum = float(group["lr"]), float(group["momentum"])
        size, activation = int(group["buffer_size"]), float(group["activation"])
        state = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0, dtype=torch.float32)
            state["gradient_sum"] = torch.zeros_like(parameter)
            if momentum:
                state["momentum_buffer"] = torch.zeros_like(parameter)
        state["step"] += 1
        total = state["gradient_sum"].add_(gradient)
        parameter.add_(gradient, alpha=-rate / size)
        if not momentum:
            return
        moving = state["momentum_buffer"]
        part = activation
        if int(state["step"]) % size == 0:
            moving.mul_(momentum).add_(total, alpha=1 / size)
            total.zero_()
            part = 1 - activation * size + activation
        if part:
            parameter.add_(moving, alpha=-rate * part * momentum)
