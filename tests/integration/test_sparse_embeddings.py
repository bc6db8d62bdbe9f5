"""Embeddings with `sparse=True` train to the numbers of one process.

Each worker sends the rows that its own samples touch; one process has the rows of all
of them. Chunks are so small that they cut rows.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import nn

from tests.doubles.chunk_sizes import cut_into
from tests.doubles.promised_numbers import DEVIATION_MAX
from tests.integration.job import Job, connect, deviation, run_workers

STEP_COUNT: Final = 16
SEED: Final = 20261128
BATCHES: Final = {1: (16,), 2: (11, 5), 3: (3, 9, 4)}
"""Samples of each worker in every step: 16 together."""

ROW_COUNT: Final = 60
PADDING: Final = 7

Optimizers = list[torch.optim.Optimizer]


class Tables(nn.Module):
    """Two tables beside a layer; row lengths that no chunk is a multiple of."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(ROW_COUNT, 7, padding_idx=PADDING, sparse=True)
        self.bags = nn.EmbeddingBag(ROW_COUNT, 5, mode="sum", sparse=True)
        self.layer = nn.Linear(12, 3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        words = self.words(ids[:, :3]).mean(1)
        out: torch.Tensor = self.layer(torch.cat([words, self.bags(ids[:, 3:])], 1))
        return out


class WideRows(nn.Module):
    """Rows that are longer than a chunk, and rows of one element."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Embedding(9, 300, sparse=True)
        self.narrow = nn.Embedding(ROW_COUNT, 1, sparse=True)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        wide = self.wide(ids[:, :2] % 9).mean(1)
        out: torch.Tensor = wide[:, :3] * self.narrow(ids[:, 2]) + wide[:, 297:]
        return out


class Tied(nn.Module):
    """A table that is the output layer too: its gradient is dense."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(ROW_COUNT, 6, sparse=True)
        self.head = nn.Linear(6, ROW_COUNT, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(torch.tanh(self.table(ids).mean(1)))[:, :3]
        return out


def all_by(class_name: str, **settings: Any) -> Callable[[nn.Module], Optimizers]:  # noqa: ANN401
    return lambda model: [
        getattr(torch.optim, class_name)(model.parameters(), **settings)
    ]


def tables_apart(model: nn.Module) -> Optimizers:
    """A table needs SparseAdam where the rest has Adam: two optimizers in one job."""
    assert isinstance(model, Tables)
    tables = [model.words.weight, model.bags.weight]
    return [
        torch.optim.SparseAdam(tables, lr=0.02, betas=(0.8, 0.99)),
        torch.optim.Adam(model.layer.parameters(), lr=0.01),
    ]


@dataclass(frozen=True)
class Case:
    """One script, for one process and for every worker."""

    make: Callable[[], nn.Module]
    optimizers: Callable[[nn.Module], Optimizers]
    shard_count: int = 2
    worker_count: int = 2

    def build(self, seed: int) -> nn.Module:
        generator = torch.Generator().manual_seed(seed)
        model = self.make()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 3)
        return model

    def samples(self, rank: int) -> slice:
        counts = BATCHES[self.worker_count]
        return slice(sum(counts[:rank]), sum(counts[: rank + 1]))

    def in_one_process(self) -> list[torch.Tensor]:
        model = self.build(0).double()
        optimizers = self.optimizers(model)
        for step in range(STEP_COUNT):
            ids, targets = batch(step, self)
            model.zero_grad()
            nn.functional.mse_loss(model(ids), targets.double()).backward()
            for optimizer in optimizers:
                optimizer.step()
        return values_of(model)

    def on_worker(self, job: Job, worker_id: str) -> list[torch.Tensor]:
        rank = int(worker_id[1:])
        model = self.build(rank)
        with connect(job, worker_id) as ps:
            model, *optimizers = ps.prepare(model, *self.optimizers(model))
            own = self.samples(rank)
            for step in range(STEP_COUNT):
                ids, targets = (each[own] for each in batch(step, self))
                model.zero_grad()
                nn.functional.mse_loss(model(ids), targets).backward()
                for optimizer in optimizers:
                    optimizer.step(weight=len(ids))
        return values_of(model)


def batch(step: int, case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids of few rows, so that workers meet in some; at times a worker touches none."""
    generator = torch.Generator().manual_seed(SEED + step)
    ids = torch.randint(ROW_COUNT, (16, 5), generator=generator)
    if step % 4 == 1:
        ids[case.samples(case.worker_count - 1), :3] = PADDING
    if step % 4 == 2:
        ids[:, :3] = PADDING
    return ids, torch.randn(16, 3, generator=generator)


def values_of(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


CASES: Final = {
    "SGD": Case(Tables, all_by("SGD", lr=0.3), 2, 3),
    "SGD with momentum": Case(Tables, all_by("SGD", lr=0.03, momentum=0.9), 3, 2),
    "SGD with Nesterov's momentum": Case(
        Tables,
        all_by("SGD", lr=0.002, momentum=0.8, nesterov=True, maximize=True),
        1,
        2,
    ),
    "Adagrad": Case(Tables, all_by("Adagrad", lr=0.1, lr_decay=0.01), 2, 2),
    "Adagrad with a first sum": Case(
        Tables,
        all_by("Adagrad", lr=0.1, initial_accumulator_value=0.3, maximize=True),
        3,
        3,
    ),
    "SparseAdam beside Adam": Case(Tables, tables_apart, 3, 2),
    "SparseAdam beside Adam, three workers": Case(Tables, tables_apart, 1, 3),
    "SparseAdam on wide rows": Case(WideRows, all_by("SparseAdam", lr=0.02), 2, 3),
    "Adagrad on wide rows": Case(WideRows, all_by("Adagrad", lr=0.1), 3, 2),
    "a tied table under Adam": Case(Tied, all_by("Adam", lr=0.01), 2, 2),
    "a tied table under SGD": Case(
        Tied, all_by("SGD", lr=0.1, momentum=0.9, weight_decay=0.01), 3, 2
    ),
}

small_chunks = cut_into(64, 512)
"""Cuts a model of a few KiB into a dozen chunks, on both sides alike."""


@pytest.mark.parametrize("name", CASES)
def test_sparse_gradients_train_as_in_one_process(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    with Job(
        tmp_path, shard_count=case.shard_count, workers_min=case.worker_count
    ) as job:
        results = run_workers(
            {
                f"w{rank}": lambda worker_id: case.on_worker(job, worker_id)
                for rank in range(case.worker_count)
            }
        )

    for each in results.values():
        assert all(map(torch.equal, each, results["w0"]))
    expected = case.in_one_process()
    assert all(each.isfinite().all() for each in expected)
    measured = deviation(results["w0"], expected)
    print(f"seed {SEED}: deviation {measured:.2e}")
    assert measured <= DEVIATION_MAX
