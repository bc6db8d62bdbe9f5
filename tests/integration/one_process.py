"""A script as its user wrote it, once in one process and once on a job.

With one worker the two differ in nothing but who adds and multiplies, so that what a
script does around its optimizer shows at once.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

import torch
from torch import nn

from tests.doubles.promised_numbers import DEVIATION_MAX
from tests.integration.job import Job, connect, deviation

SEED: Final = 20261128


class Prepare(Protocol):
    """`ps.prepare`, or what returns its arguments."""

    def __call__(self, *objects: Any, **options: Any) -> Any: ...  # noqa: ANN401


Script = Callable[[Prepare], Sequence[torch.Tensor]]
"""Trains with what `prepare` returns, and returns the tensors to compare."""


def as_given(*objects: Any, **options: Any) -> Any:  # noqa: ANN401, as `prepare`
    """One process: nothing is prepared."""
    return objects[0] if len(objects) == 1 else objects


def on_job(script: Script, folder: Path, **settings: Any) -> list[torch.Tensor]:  # noqa: ANN401
    """Runs a script as the only worker of a job with two shards."""
    with Job(folder, **settings) as job, connect(job, "w0") as ps:
        return [each.detach().clone() for each in script(ps.prepare)]


def check_same(script: Script, folder: Path, tolerance: float = DEVIATION_MAX) -> None:
    """Checks that a script has the same numbers in one process and on a job."""
    plain = [each.detach().clone() for each in script(as_given)]
    measured = deviation(on_job(script, folder), plain)
    print(f"seed {SEED}: deviation {measured:.2e}")
    assert measured <= tolerance


def small_model() -> nn.Module:
    """A model of four tensors, the same every time."""
    generator = torch.Generator().manual_seed(SEED)
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model


def batch(step: int, rows: slice = slice(None)) -> tuple[torch.Tensor, torch.Tensor]:
    """Eight samples of a step, or some of their rows."""
    generator = torch.Generator().manual_seed(SEED + step)
    inputs = torch.randn(8, 5, generator=generator)
    return inputs[rows], torch.randn(8, 3, generator=generator)[rows]


def loss_of(model: nn.Module, step: int, rows: slice = slice(None)) -> torch.Tensor:
    """The loss of a step's samples."""
    inputs, targets = batch(step, rows)
    return nn.functional.mse_loss(model(inputs), targets)
