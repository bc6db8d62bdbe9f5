"""A gradient that is `None` does on shards what it does in one process."""

from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import nn

from tests.doubles.chunk_sizes import cut_into
from tests.integration.job import Job, connect, deviation, run_workers

SEED: Final = 11
STEP_COUNT: Final = 30
WEIGHTS: Final = {"w0": 2.0, "w1": 7.0}
SHAPES: Final = {
    "late": (40, 3),
    "never": (7,),
    "never_on_w1": (5, 5),
    "always": (33,),
    "sometimes": (3, 20),
}

CASES: Final[list[tuple[str, dict[str, Any]]]] = [
    ("SGD", {"lr": 0.05, "momentum": 0.9, "dampening": 0.2, "weight_decay": 0.05}),
    ("SGD", {"lr": 0.05, "momentum": 0.9, "nesterov": True}),
    ("Adam", {"lr": 0.01, "weight_decay": 0.05}),
    ("AdamW", {"lr": 0.01, "weight_decay": 0.05}),
    ("Adagrad", {"lr": 0.01, "lr_decay": 0.05}),
    ("RMSprop", {"lr": 0.01, "momentum": 0.9, "weight_decay": 0.05}),
    ("NAdam", {"lr": 0.01, "weight_decay": 0.05}),
    ("RAdam", {"lr": 0.01, "weight_decay": 0.05}),
]


small_chunks = cut_into(64, 256)
"""Cuts the model so that tensors share chunks and chunks share tensors."""


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(SEED)
        for name, shape in SHAPES.items():
            values = torch.randn(shape, generator=generator)
            self.register_parameter(name, nn.Parameter(values))

    def values(self) -> list[torch.Tensor]:
        return [parameter.detach().clone() for parameter in self.parameters()]


def gradient(name: str, worker_id: str, step: int) -> torch.Tensor | None:
    """The gradient of a worker in a step, from 1."""
    is_absent = {
        "late": step <= 10 or (worker_id == "w0" and step % 5 == 0),
        "never": True,
        "never_on_w1": worker_id == "w1",
        "sometimes": step % 3 > 0,
    }
    if is_absent.get(name, False):
        return None
    seed = hash((worker_id == "w0", step, list(SHAPES).index(name)))
    generator = torch.Generator().manual_seed(seed % 2**31)
    return torch.randn(SHAPES[name], generator=generator)


def make_optimizer(
    class_name: str, settings: dict[str, Any], model: Model
) -> torch.optim.Optimizer:
    made: torch.optim.Optimizer = getattr(torch.optim, class_name)(
        model.parameters(), **settings
    )
    return made


def train_in_one_process(
    class_name: str, settings: dict[str, Any]
) -> tuple[Model, torch.optim.Optimizer]:
    """A present gradient is over the weight of all, absent ones count as zero."""
    model = Model()
    optimizer = make_optimizer(class_name, settings, model)
    total = sum(WEIGHTS.values())
    for step in range(1, STEP_COUNT + 1):
        for name, parameter in model.named_parameters():
            present = [
                each.double() * weight
                for worker_id, weight in WEIGHTS.items()
                if (each := gradient(name, worker_id, step)) is not None
            ]
            parameter.grad = (
                (torch.stack(present).sum(0) / total).float() if present else None
            )
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize(("class_name", "settings"), CASES)
def test_absent_gradients_are_skipped_as_in_one_process(
    class_name: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    def work(worker_id: str) -> list[torch.Tensor]:
        model = Model()
        optimizer = make_optimizer(class_name, settings, model)
        with connect(job, worker_id) as ps:
            _, optimizer = ps.prepare(model, optimizer)
            for step in range(1, STEP_COUNT + 1):
                for name, parameter in model.named_parameters():
                    parameter.grad = gradient(name, worker_id, step)
                optimizer.step(weight=WEIGHTS[worker_id])
        return model.values()

    with Job(tmp_path, shard_count=2, workers_min=2) as job:
        results = run_workers(dict.fromkeys(WEIGHTS, work))
        step_counts = [job.step_counts(index) for index in range(len(SHAPES))]

    expected, optimizer = train_in_one_process(class_name, settings)
    for values in results.values():
        assert deviation(values, expected.values()) <= 1e-6, f"seed {SEED}"
        never = list(SHAPES).index("never")
        assert torch.equal(values[never], Model().values()[never])
    counts = {"late": 20, "never": 0, "sometimes": 10}
    for found, (name, parameter) in zip(
        step_counts, expected.named_parameters(), strict=True
    ):
        assert found == {counts.get(name, STEP_COUNT)}, name
        state = optimizer.state.get(parameter, {})
        if "step" in state:
            assert int(state["step"]) == counts.get(name, STEP_COUNT)
