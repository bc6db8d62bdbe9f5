"""DiLoCo: many local steps, and Nesterov's momentum over their mean."""

from functools import partial

import torch

from psworker.strategies.local_steps import LocalSteps
from psworker.strategies.pace import Every, Pace
from psworker.strategies.strategy import InnerState


class DiLoCo(LocalSteps):
    """Pushes the difference from the anchor; the shards run Nesterov with the mean.

    Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language
    Models", arXiv 2311.08105. The defaults are the paper's, whose inner optimizer is
    AdamW and keeps its state. With few local steps a lower `lr` or `momentum` is
    steadier: see docs/strategies.md.
    """

    def __init__(
        self,
        every: Every | Pace = 500,
        *,
        lr: float = 0.7,
        momentum: float = 0.9,
        inner_state: InnerState = "keep",
    ) -> None:
        """Takes the length of a round, and the outer optimizer.

        Args:
            every: Local steps of a round, as of `LocalSteps`.
            lr: Rate of the outer optimizer.
            momentum: Nesterov's; 0 for none.
            inner_state: What becomes of the inner optimizer's state at each round.

        Raises:
            ConfigurationError: `every` is no number of local steps.
        """
        outer = partial(
            torch.optim.SGD, lr=lr, momentum=momentum, nesterov=momentum > 0
        )
        super().__init__(every, outer, inner_state=inner_state)
