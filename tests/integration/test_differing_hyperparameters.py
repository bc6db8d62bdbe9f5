"""A worker whose hyperparameters do not count hears of it where its user looks."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pswire.membership import Mode
from tests.integration.job import Job, connect, run_workers


@pytest.mark.parametrize("mode", [Mode.BSP, Mode.SSP])
def test_a_worker_that_differs_is_told_once_with_the_values(
    tmp_path: Path, mode: Mode, caplog: pytest.LogCaptureFixture
) -> None:
    rates = {"w0": 0.1, "w1": 0.25}

    def work(worker_id: str) -> None:
        model = nn.Linear(3, 2)
        sgd = torch.optim.SGD(model.parameters(), lr=rates[worker_id], momentum=0.5)
        optimizer: Any
        with connect(job, worker_id) as ps:
            model, optimizer = ps.prepare(model, sgd)
            for _ in range(4):
                optimizer.zero_grad()
                model(torch.ones(2, 3)).sum().backward()
                optimizer.step()

    bound: dict[str, Any] = {"staleness_bound": 1} if mode is Mode.SSP else {}
    with (
        Job(tmp_path, shard_count=2, workers_min=2, mode=mode, **bound) as job,
        caplog.at_level(logging.WARNING, logger="psworker"),
    ):
        run_workers({"w0": work, "w1": work})
    told = [
        record.getMessage()
        for record in caplog.records
        if record.name == "psworker" and "hyperparameters" in record.getMessage()
    ]
    assert len(told) == 1, "by both shards, in four steps"
    assert told[0].startswith("workers step optimizer with different hyperparameters, ")
    assert told[0].endswith(
        "those of w0 count, which is longest in the job, lr=0.1 in group 0, and this "
        "worker's do not, lr=0.25; let scripts and schedules of all workers agree"
    )


def test_workers_that_agree_are_told_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def work(worker_id: str) -> None:
        model = nn.Linear(3, 2)
        optimizer: Any
        with connect(job, worker_id) as ps:
            model, optimizer = ps.prepare(
                model, torch.optim.SGD(model.parameters(), lr=0.1)
            )
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()

    with Job(tmp_path, workers_min=2) as job:
        run_workers({"w0": work, "w1": work})
    assert "hyperparameters" not in caplog.text
