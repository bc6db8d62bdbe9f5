"""How every mode is trained, so that their accuracies can be compared.

N updates from batches of B samples aren't one update from N x B: with the same
learning rate they go N times as far. So an update's rate here is proportional to the
samples that it is made of, and there's no momentum: in asynchronous modes the updates
of several workers in a row act as one already.
"""

from collections.abc import Iterator
from typing import Final

import torch
from torch import nn

TASK_NAME: Final = "mnist5k"

LEARNING_RATE: Final = 0.06
"""Of an update that is made of one worker's batch."""

_HOLD: Final = 0.5
"""Share of the training after which the learning rate falls, in a line to 0. It makes
the accuracy at the end one of the mode and not of the last few batches."""


def learning_rate(gradients_per_update: int, progress: float) -> float:
    """Learning rate of an update.

    Args:
        gradients_per_update: Workers whose gradients it is the mean of.
        progress: Share of the training that is done, 0 to 1.
    """
    left = min(1.0, max(0.0, 1 - progress) / (1 - _HOLD))
    return LEARNING_RATE * gradients_per_update * left


def new_optimizer(model: nn.Module, gradients_per_update: int) -> torch.optim.SGD:
    """The optimizer at the beginning."""
    return torch.optim.SGD(
        model.parameters(), lr=learning_rate(gradients_per_update, 0.0)
    )


def batches(
    sample_count: int, *, batch_size: int, worker_index: int, seed: int
) -> Iterator[torch.Tensor]:
    """Positions of a worker's batches, for ever: passes over all data, shuffled.

    Each worker draws for itself, whatever its pace: data that is dealt out would make
    the workers wait for each other at the end of each epoch, in every mode.
    """
    generator = torch.Generator().manual_seed(1_000 * seed + worker_index)
    while True:
        order = torch.randperm(sample_count, generator=generator)
        whole = sample_count - sample_count % batch_size
        yield from order[:whole].split(batch_size)
