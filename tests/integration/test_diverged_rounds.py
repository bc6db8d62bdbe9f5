"""Local steps whose values are no numbers count for nobody and end with a round."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.utils.data import DataLoader, TensorDataset

import psworker
from pswire.membership import Mode
from tests.doubles.children import wait_until
from tests.integration.job import Job, connect, run_workers

SAMPLE_COUNT = 96
STREAMING: dict[str, Any] = {"every": 4, "fragment_count": 2, "taken_after": 1}
WAYS: dict[str, tuple[Mode, Any, dict[str, Any]]] = {
    "diloco": (Mode.BSP, psworker.DiLoCo, {"every": 3}),
    "averaged": (
        Mode.BSP,
        psworker.ModelAveraging,
        {"every": 3, "inner_state": "average"},
    ),
    "streaming": (Mode.BSP, psworker.StreamingDiLoCo, STREAMING),
    "elastic": (Mode.BSP, psworker.EASGD, {"every": 3}),
    "fedavg": (Mode.BSP, psworker.FedAvg, {"every": 3, "fraction": 1.0}),
    "async elastic": (Mode.ASP, psworker.AsynchronousEASGD, {"every": 3}),
    "async": (Mode.SSP, psworker.AsyncLocalSGD, {"every": 3, "buffer_size": 2}),
    "downpour": (Mode.ASP, psworker.Downpour, {"n_push": 2, "n_fetch": 4}),
    "quorum": (Mode.QUORUM, psworker.DecoupledDiLoCo, STREAMING),
}


def _model() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for each in model.parameters():
            each.copy_(torch.randn(each.shape, generator=generator))
    return model


def _loader() -> DataLoader[Any]:
    data = torch.randn(SAMPLE_COUNT, 3, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(data), batch_size=4)


def _is_finite(model: nn.Module, optimizer: torch.optim.Optimizer) -> bool:
    state = (v for held in optimizer.state.values() for v in held.values())
    tensors = [*model.state_dict().values(), *state]
    return all(bool(torch.isfinite(each).all()) for each in tensors)


@pytest.mark.parametrize("way", WAYS)
def test_a_worker_that_diverges_begins_again_from_the_jobs_values(
    way: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mode, kind, numbers = WAYS[way]

    def is_noticed() -> bool:
        return "goes on from the job's values" in caplog.text

    def work(worker_id: str) -> tuple[bool, set[str], Any]:
        told: set[str] = set()
        with connect(job, worker_id) as ps:
            model = _model()
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            *_, loader = ps.prepare(
                model, optimizer, _loader(), strategy=kind(**numbers)
            )
            for epoch in range(2):
                for number, (inputs,) in enumerate(loader):
                    if worker_id == "w0" and not number and mode is not Mode.BSP:
                        # Else it might leave no data, or no clock, to the other one.
                        wait_until(is_noticed, "a push that is no number")
                    optimizer.zero_grad()
                    loss = model(inputs).square().mean()
                    if worker_id == "w1" and (epoch, number) == (0, 1):
                        loss = loss * float("nan")
                    loss.backward()
                    optimizer.step()
                    if ps.last_push is not None:
                        told.update(ps.last_push.nonfinite_worker_ids)
            return _is_finite(model, optimizer), told, loader.report

    settings: dict[str, Any] = {"staleness_bound": 2} if mode is Mode.SSP else {}
    if mode is Mode.QUORUM:
        settings = {"quorum": 1}
    with (
        Job(tmp_path, workers_min=2, mode=mode, **settings) as job,
        caplog.at_level(logging.WARNING, logger="psworker"),
    ):
        results = run_workers({"w0": work, "w1": work})
        with psworker.SnapshotReader(job.address) as reader:
            values = reader.latest().state_dict()
    assert all(bool(torch.isfinite(each).all()) for each in values.values())
    for is_finite, told, report in results.values():
        assert is_finite
        assert report.seen_once + report.dropped == SAMPLE_COUNT, report
        if mode is Mode.BSP:
            assert told == {"w1"}
    lines = {each.getMessage() for each in caplog.records if each.name == "psworker"}
    skipped = [line for line in lines if "was skipped: the gradient of" in line]
    assert len(skipped) == 1, "and no push after it"
    assert "the gradient of w1 was" in skipped[0]
    assert caplog.text.count("goes on from the job's values") == 1


def test_a_local_step_that_a_scaler_leaves_out_is_no_step_of_the_round(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def work(worker_id: str) -> tuple[bool, int, Any]:
        with connect(job, worker_id) as ps:
            model = _model()
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            *_, loader = ps.prepare(
                model, optimizer, _loader(), strategy=psworker.DiLoCo(3)
            )
            scaler = GradScaler("cpu", init_scale=4.0)
            for number, (inputs,) in enumerate(loader):
                optimizer.zero_grad()
                loss = model(inputs).square().mean()
                if worker_id == "w1" and number in (1, 5):
                    loss = loss * float("inf")
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
            return _is_finite(model, optimizer), ps.clock, loader.report

    with (
        Job(tmp_path, workers_min=2) as job,
        caplog.at_level(logging.WARNING, logger="psworker"),
    ):
        results = run_workers({"w0": work, "w1": work})
    assert "was skipped" not in caplog.text
    for is_finite, clock, report in results.values():
        assert is_finite
        assert (report.seen_once, report.skipped) == (SAMPLE_COUNT - 8, 8)
        assert clock == 4  # 12 steps of one of them, 10 of the other one
