"""A job whose chunks have the size that its coordinator was told."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import nn

import psworker
from psworker.host_connection import HostConnection
from tests.integration.host_processes import run_group
from tests.integration.job import Job, connect, deviation, run_workers

SEED: Final = 20261128
CHUNK_KIB: Final = 64
STEP_COUNT: Final = 3
BATCHES: Final = (slice(0, 11), slice(11, 16))
"""Samples of each worker in every step: 16 together."""


def new_model() -> nn.Module:
    """About 600 KiB: without the option one chunk for each shard."""
    generator = torch.Generator().manual_seed(SEED)
    model = nn.Sequential(nn.Linear(150, 500), nn.Tanh(), nn.Linear(500, 150))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 12)
    return model


def new_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)


def train(
    model: nn.Module,
    optimizer: Any,  # noqa: ANN401, torch's or a prepared one, whose steps have weights
    rows: slice,
    **weight: float,
) -> list[torch.Tensor]:
    for step in range(STEP_COUNT):
        generator = torch.Generator().manual_seed(SEED + step)
        inputs, targets = torch.randn(2, 16, 150, generator=generator)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs[rows]), targets[rows]).backward()
        optimizer.step(**weight)
    return [each.detach().clone() for each in model.parameters()]


def part(ps: psworker.Connection | HostConnection, index: int) -> list[torch.Tensor]:
    """Trains with one of the batches; the parameters then."""
    rows = BATCHES[index]
    model = new_model()
    model, optimizer = ps.prepare(model, new_optimizer(model))
    return train(model, optimizer, rows, weight=rows.stop - rows.start)


def as_workers(job: Job) -> list[list[torch.Tensor]]:
    def work(worker_id: str) -> list[torch.Tensor]:
        with connect(job, worker_id) as ps:
            return part(ps, int(worker_id))

    return list(run_workers({"0": work, "1": work}).values())


def as_host_group(job: Job) -> list[list[torch.Tensor]]:
    return run_group(job, 2, part)


@pytest.mark.parametrize(
    ("run", "settings"),
    [
        (as_workers, {"workers_min": 2}),
        (as_workers, {"workers_min": 2, "shares_memory": False}),
        (as_host_group, {}),
    ],
)
def test_a_job_has_the_numbers_of_one_process(
    run: Callable[[Job], list[list[torch.Tensor]]],
    settings: dict[str, Any],
    tmp_path: Path,
) -> None:
    alone = new_model()
    exact = train(alone, new_optimizer(alone), slice(None))
    with Job(tmp_path, chunk_kib=CHUNK_KIB, **settings) as job:
        trained = run(job)
        with psworker.SnapshotReader(job.address) as reader:
            snapshot = reader.latest()
        sizes = job.ask(
            lambda: [
                [chunk.byte_count for chunk in host.model.chunks] for host in job.shards
            ]
        )

    assert snapshot.clock == STEP_COUNT
    for found in (*trained, list(snapshot.state_dict().values())):
        measured = deviation(found, exact)
        print(f"seed {SEED}: deviation {measured:.2e}")
        assert measured <= 1e-6
    *full, last = sorted(sizes[0] + sizes[1], reverse=True)
    assert set(full) == {CHUNK_KIB << 10}
    assert 0 < last < CHUNK_KIB << 10
    assert [len(held) for held in sizes] == [5, 5]
