"""Leased data in a host group: the ledger is exact, and runs repeat."""

from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from psworker.connection import Connection
from tests.doubles.children import Nursery
from tests.integration.host_processes import run_group
from tests.integration.job import Job, deviation
from tests.integration.processes import Processes

SAMPLE_COUNT = 53
BATCH_SIZE = 4
EPOCH_COUNT = 2


def samples() -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(3)
    x = torch.randn(SAMPLE_COUNT, 5, generator=draw)
    return x, torch.randn(SAMPLE_COUNT, 1, generator=draw)


def ahead(loader: Iterable[Any], count: int) -> Iterator[Any]:
    """Draws some batches before it hands out the first."""
    drawn = deque[Any]()
    for batch in loader:
        drawn.append(batch)
        if len(drawn) > count:
            yield drawn.popleft()
    yield from drawn


def train(
    ps: Connection, model: nn.Module, ahead_count: int = 0
) -> tuple[list[list[float]], list[torch.Tensor], list[int]]:
    """First numbers of the samples seen, by epoch; the model; samples seen once."""
    x, y = samples()
    loader = DataLoader(TensorDataset(x, y), batch_size=BATCH_SIZE, shuffle=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    model, optimizer, loader = ps.prepare(model, optimizer, loader)
    seen, once = [], []
    for _ in range(EPOCH_COUNT):
        mine = []
        for inputs, targets in ahead(loader, ahead_count):
            mine += inputs[:, 0].tolist()
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
        seen.append(mine)
        report = loader.report
        assert report is not None
        once.append(report.seen_once)
    return seen, [each.detach().clone() for each in model.parameters()], once


def new_models(count: int) -> list[nn.Module]:
    torch.manual_seed(1)
    return [nn.Linear(5, 1) for _ in range(count)]


def test_each_sample_is_seen_once_by_one_process_and_runs_repeat(
    tmp_path: Path,
) -> None:
    runs = []
    for turn in range(2):
        models = new_models(3)

        def script(
            ps: Connection, index: int, models: list[nn.Module] = models
        ) -> tuple[list[list[float]], list[torch.Tensor], list[int]]:
            return train(ps, models[index])

        with Job(tmp_path / f"{turn}", shard_count=2) as job:
            runs.append(run_group(job, 3, script))
    wanted = sorted(samples()[0][:, 0].tolist())
    for run in runs:
        for epoch in range(EPOCH_COUNT):
            assert sorted(e for seen, _, _ in run for e in seen[epoch]) == wanted
            assert {once[epoch] for _, _, once in run} == {SAMPLE_COUNT}
    for (seen, values, _), (again, others, _) in zip(*runs, strict=True):
        assert seen == again
        assert all(map(torch.equal, values, others))


@pytest.mark.parametrize("ahead_count", [0, 2])
def test_a_group_has_the_numbers_of_one_process_with_a_larger_batch(
    tmp_path: Path, ahead_count: int
) -> None:
    models = new_models(3)
    start = [each.detach().clone() for each in models[0].parameters()]
    with Job(tmp_path, shard_count=2) as job:
        run = run_group(job, 3, lambda ps, index: train(ps, models[index], ahead_count))
    x, y = samples()
    alone = nn.Linear(5, 1).double()
    with torch.no_grad():
        for mine, first in zip(alone.parameters(), start, strict=True):
            mine.copy_(first)
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.05, momentum=0.9)
    for epoch in range(EPOCH_COUNT):
        parts = [seen[epoch] for seen, _, _ in run]
        while any(parts):
            union = [value for part in parts for value in part[:BATCH_SIZE]]
            parts = [part[BATCH_SIZE:] for part in parts]
            rows = [int((x[:, 0] - value).abs().argmin()) for value in union]
            optimizer.zero_grad()
            nn.functional.mse_loss(alone(x[rows].double()), y[rows].double()).backward()
            optimizer.step()
    found = [each.detach() for each in alone.parameters()]
    assert deviation(run[0][1], found) < 1e-5


def test_the_command_line_starts_a_group_and_a_lost_process_again(
    tmp_path: Path, nursery: Nursery
) -> None:
    with (
        Job(tmp_path / "job", shard_count=2, sockets=True) as job,
        Processes(tmp_path, nursery, launches=True) as processes,
    ):
        processes.start(
            "run",
            *("-m", "psworker", "run", f"--coordinator={job.address}", "--nproc=2"),
            *("--one-push-per-host", "--max-restarts=1", "--worker-id=box", "--"),
            *("-m", "tests.integration.host_script", str(tmp_path / "died")),
        )
        assert processes.code("run", 200.0) == 0
        lines = processes.rest("run")
    assert (tmp_path / "died").exists()
    ends = [line for line in lines if "end as box of 1" in line]
    assert sorted(end[:4] for end in ends) == ["[p0]", "[p1]"]
    epochs = [line.partition("] ")[2] for line in lines if "epoch" in line]
    assert {"epoch 0: 64 seen once", "epoch 1: 64 seen once"} == set(epochs)
