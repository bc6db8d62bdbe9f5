"""What `psctl bench overlap` trains: a model of real arithmetic, in turns of steps.

As a process it is another worker, which makes the same turns, in step with the first.
"""

import json
import sys
import time
from contextlib import ExitStack
from typing import Any, Final

import torch
from torch import nn

import psworker

_WIDTH: Final = 1024
_SEED: Final = 7


class Training:
    """One contender: a model, its optimizer and, in a job, its connection."""

    def __init__(self, parameter_count: int, batch_size: int, rank: int = 0) -> None:
        """Makes the same model in each process, and a batch of each worker's own.

        Args:
            parameter_count: About how many parameters.
            batch_size: Samples of a step.
            rank: Of the worker.
        """
        torch.manual_seed(_SEED)
        layer_count = max(2, round(parameter_count / (_WIDTH * (_WIDTH + 1))))
        layers: list[nn.Module] = []
        for _ in range(layer_count):
            layers += [nn.Linear(_WIDTH, _WIDTH), nn.ReLU()]
        self.model: Any = nn.Sequential(*layers)
        self.optimizer: Any = torch.optim.SGD(
            self.model.parameters(), lr=1e-3, momentum=0.9
        )
        generator = torch.Generator().manual_seed(_SEED + rank)
        self._inputs = torch.randn(batch_size, _WIDTH, generator=generator)
        self._ps: Any = None

    @property
    def parameter_count(self) -> int:
        """Parameters of the model."""
        return sum(each.numel() for each in self.model.parameters())

    def prepare(self, ps: Any, *, overlap: bool) -> None:  # noqa: ANN401, a connection
        """Trains in a job from now on."""
        self._ps = ps
        self.model, self.optimizer = ps.prepare(
            self.model, self.optimizer, overlap=overlap
        )

    def turn(self, step_count: int) -> float:
        """Takes steps; seconds for each, until the values of the last one are there."""
        began = time.perf_counter()
        for _ in range(step_count):
            self.model(self._inputs).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        if self._ps is not None:
            self._ps.wait()
        return (time.perf_counter() - began) / step_count

    def values(self) -> list[torch.Tensor]:
        """The parameters."""
        return [each.detach() for each in self.model.parameters()]


def main(settings: dict[str, int], plain: str, overlapped: str) -> None:
    """Trains in both jobs in turn.

    Args:
        settings: Sizes and counts.
        plain: Coordinator of the job without overlap.
        overlapped: Coordinator of the job with it.
    """
    torch.set_num_threads(settings["threads"])
    with ExitStack() as stack:
        # Alone first, as the other one: so all figures come from the same turns.
        alone = Training(settings["parameters"], settings["batch"], rank=1)
        trainings = [alone]
        for address, overlap in ((plain, False), (overlapped, True)):
            ps = stack.enter_context(psworker.connect(address, "w1"))
            training = Training(settings["parameters"], settings["batch"], rank=1)
            training.prepare(ps, overlap=overlap)
            trainings.append(training)
        for _ in range(settings["turns"]):
            for training in trainings:
                training.turn(settings["steps"])


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), *sys.argv[2:])
