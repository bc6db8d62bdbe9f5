"""The same training in one process, to hold the demo's result against.

Takes the batches that the workers had: those of a clock, joined in the order of
worker ids, are one batch here.
"""

from collections.abc import Mapping

import torch
from torch import nn

from psctl.demo.tasks import Task


def train_in_one_process(
    task: Task, batches: Mapping[int, Mapping[str, list[int]]]
) -> nn.Module:
    """Trains on the workers' batches.

    Args:
        task: What is trained.
        batches: For each clock, the samples of each worker.
    """
    model = task.new_model()
    optimizer = task.new_optimizer(model)
    criterion = nn.CrossEntropyLoss()
    images, labels, _ = task.train_set.tensors
    for clock in sorted(batches):
        of_workers = batches[clock]
        joined = [index for name in sorted(of_workers) for index in of_workers[name]]
        loss = criterion(model(images[joined]), labels[joined])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def largest_difference(first: nn.Module, second: nn.Module) -> float:
    """The largest absolute difference of a parameter."""
    with torch.no_grad():
        return max(
            float((one - other).abs().max())
            for one, other in zip(first.parameters(), second.parameters(), strict=True)
        )
