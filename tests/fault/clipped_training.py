"""A training whose gradients are clipped, and the same by one process.

Half of its norms are above what it clips to. A worker's batch follows from its id and
from the number of its push, so that one process can train on what each clock had.
Tensors of two types in turn make chunks on two shards.
"""

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import torch
from torch import nn

import psworker
from tests.fault.training import say

CLIP: Final = 3.5
SAMPLE_COUNTS: Final = {"w0": 4, "w1": 3, "w2": 7}

PushKey = tuple[str, int]
"""Worker id and sequence."""


class Regression(nn.Module):
    """Two layers, computed in float64."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(7)

        def drawn(*shape: int, dtype: torch.dtype) -> nn.Parameter:
            values = torch.randn(shape, generator=generator, dtype=torch.float64) / 2
            return nn.Parameter(values.to(dtype))

        self.inner = drawn(12, 24, dtype=torch.float32)
        self.bias = drawn(24, dtype=torch.float64)
        self.outer = drawn(24, 5, dtype=torch.float32)
        self.offset = drawn(5, dtype=torch.float64)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(inputs @ self.inner.double() + self.bias)
        return hidden @ self.outer.double() + self.offset


def make_training() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Regression()
    return model, torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)


def batch_of(push: PushKey) -> tuple[torch.Tensor, torch.Tensor]:
    """What a worker trains on in a step; never fitted, so that norms stay large."""
    worker_id, sequence = push
    generator = torch.Generator().manual_seed(1_000 * int(worker_id[1:]) + sequence)
    count = SAMPLE_COUNTS[worker_id]

    def drawn(width: int) -> torch.Tensor:
        return torch.randn(count, width, generator=generator, dtype=torch.float64)

    return drawn(12), drawn(5) * (1 + sequence % 2)


def in_one_process(
    clocks: Sequence[Sequence[PushKey]],
) -> tuple[list[torch.Tensor], list[float]]:
    """Trains on the batches of each clock at once.

    Returns:
        The values at the end, and the norm of each clock before it was clipped.
    """
    model, optimizer = make_training()
    norms = []
    for pushes in clocks:
        parts = [batch_of(push) for push in pushes]
        inputs, targets = (torch.cat(part) for part in zip(*parts, strict=True))
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()], norms


def train() -> None:
    """Steps once told to, until told to stop; arguments as in `training.py`."""
    torch.set_num_threads(1)
    folder, pace_s = Path(sys.argv[2]), float(sys.argv[3])
    model, optimizer = make_training()
    with psworker.connect(
        connect_timeout_s=60.0, step_timeout_s=60.0, start_timeout_s=90.0
    ) as ps:
        model, optimizer = ps.prepare(model, optimizer, clip_grad_norm=CLIP)
        say("joined", clock=ps.clock, worker_id=ps.worker_id)
        while not (folder / "begin").exists():
            time.sleep(0.01)
        sequence = 0
        while not (folder / "stop").exists():
            sequence += 1
            inputs, targets = batch_of((ps.worker_id, sequence))
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step(weight=len(inputs))
            result = ps.last_push
            assert result is not None
            say(
                "step",
                clock=result.clock,
                outcome=result.outcome,
                grad_norm=result.grad_norm,
            )
            time.sleep(pace_s)
    say("done", clock=ps.clock)


if __name__ == "__main__":
    train()
