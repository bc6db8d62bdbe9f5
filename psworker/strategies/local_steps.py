"""Local steps in general: every so many steps, with any outer optimizer."""

from collections.abc import Callable

import torch
from typing_extensions import override

from psworker.errors import ConfigurationError
from psworker.strategies.rounds import Progress
from psworker.strategies.strategy import InnerState, Strategy, Tensors

Outer = Callable[[Tensors], torch.optim.Optimizer]


class LocalSteps(Strategy):
    """Pushes the difference from the anchor after every so many local steps."""

    def __init__(
        self,
        every: int,
        outer: Outer | None = None,
        *,
        inner_state: InnerState = "keep",
    ) -> None:
        """Takes the length of a round.

        Args:
            every: Local steps of a round.
            outer: Makes the outer optimizer of the parameters of a fragment, as in
                `lambda parameters: torch.optim.SGD(parameters, lr=0.7)`; by default
                SGD of rate 1, so that the workers' values are averaged.
            inner_state: What becomes of the inner optimizer's state at each round:
                `"keep"`, `"reset"` or `"average"`.

        Raises:
            ConfigurationError: `every` is no whole number above 0.
        """
        if not isinstance(every, int) or isinstance(every, bool) or every < 1:
            raise ConfigurationError(
                f"every={every!r} is no number of local steps: give a whole number "
                "from 1 on"
            )
        self.every = every
        self.inner_state = inner_state
        self._outer = outer

    @override
    def outer(self, parameters: Tensors) -> torch.optim.Optimizer:
        if self._outer is None:
            return super().outer(parameters)
        return self._outer(parameters)

    @override
    def is_due(self, progress: Progress) -> bool:
        return progress.step_count >= self.every
