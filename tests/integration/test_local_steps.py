"""Local steps in a whole job: whatever a script does, as its paper has it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import psworker
from pswire.membership import Mode
from tests.integration.job import Job, connect, deviation, run_workers

SAMPLE_COUNT = 60
WORKER_IDS = ("w0", "w1", "w2")


def _loader(**options: object) -> DataLoader[Any]:
    inputs = torch.linspace(-1, 1, SAMPLE_COUNT * 3).reshape(SAMPLE_COUNT, 3)
    indices = torch.arange(SAMPLE_COUNT)
    options.setdefault("batch_size", 4)
    return DataLoader(TensorDataset(inputs, indices), **options)  # type: ignore[arg-type]


def _model() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(3, 2)


def _step(
    model: nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor
) -> None:
    optimizer.zero_grad()
    model(inputs).square().mean().backward()
    optimizer.step()


Work = Callable[[str], tuple[list[list[int]], list[torch.Tensor], Any]]


def _training(job: Job, strategy: psworker.Strategy, epoch_count: int) -> Work:
    """A worker's work; what it saw, its parameters, and the last report."""

    def work(worker_id: str) -> tuple[list[list[int]], list[torch.Tensor], Any]:
        seen: list[list[int]] = []
        with connect(job, worker_id) as ps:
            model = _model()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            returned = ps.prepare(model, optimizer, _loader(), strategy=strategy)
            assert returned[0] is model
            assert returned[1] is optimizer
            loader = returned[2]
            for _ in range(epoch_count):
                for inputs, indices in loader:
                    seen.append(indices.tolist())
                    _step(model, optimizer, inputs)
            values = [each.detach().clone() for each in model.parameters()]
            return seen, values, loader.report

    return work


@pytest.mark.parametrize("mode", [Mode.BSP, Mode.SSP, Mode.ASP])
@pytest.mark.parametrize("every", [1, 3, 50])
def test_every_sample_counts_once_whatever_the_length_of_a_round(
    tmp_path: Path, mode: Mode, every: int
) -> None:
    with Job(tmp_path, workers_min=3, mode=mode) as job:
        work = _training(job, psworker.LocalSteps(every), 2)
        results = run_workers(dict.fromkeys(WORKER_IDS, work))
    seen = sorted(i for batches, _, _ in results.values() for b in batches for i in b)
    assert seen == sorted(2 * list(range(SAMPLE_COUNT)))
    reports = [report for _, _, report in results.values()]
    assert all(each.seen_once == SAMPLE_COUNT for each in reports), reports


def test_a_worker_alone_averages_with_nobody(tmp_path: Path) -> None:
    plain = _plain(2)
    with Job(tmp_path) as job:
        _, values, _ = _training(job, psworker.LocalSteps(4), 2)("w0")
    assert deviation(values, plain) < 1e-6
    with psworker.LocalConnection() as ps:
        model = _model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        *_, loader = ps.prepare(
            model, optimizer, _loader(), strategy=psworker.LocalSteps(4)
        )
        for _ in range(2):
            for inputs, _ in loader:
                _step(model, optimizer, inputs)
        assert ps.clock == 8
        assert loader.report.is_complete
        values = [each.detach() for each in model.parameters()]
        assert deviation(values, plain) < 1e-6


def _plain(epoch_count: int) -> list[torch.Tensor]:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(epoch_count):
        for inputs, _ in _loader():
            _step(model, optimizer, inputs)
    return [each.detach() for each in model.parameters()]
