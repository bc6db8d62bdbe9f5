"""The training that a group, a plain worker and one process share."""

from typing import Final

import torch
from torch import nn

STEP_COUNT: Final = 10
SAMPLE_COUNT: Final = 80
"""Of the group; a plain worker has as many, behind them."""

OTHER_COUNT: Final = 50
CLIP_NORM: Final = 0.3
"""Below that of most gradients here."""


def new_model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3))


def new_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def samples() -> tuple[torch.Tensor, torch.Tensor, list[slice]]:
    """Inputs, targets, and the rows of each step of the group."""
    generator = torch.Generator().manual_seed(20261128)
    count = SAMPLE_COUNT + OTHER_COUNT
    rows = SAMPLE_COUNT // STEP_COUNT
    return (
        torch.randn(count, 6, generator=generator),
        torch.randn(count, 3, generator=generator),
        [slice(step * rows, (step + 1) * rows) for step in range(STEP_COUNT)],
    )


def rows_of_other(step: int) -> slice:
    rows = OTHER_COUNT // STEP_COUNT
    return slice(SAMPLE_COUNT + step * rows, SAMPLE_COUNT + (step + 1) * rows)
