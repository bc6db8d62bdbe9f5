"""A worker whose process is told to end leaves, and what it held goes to the others."""

import contextlib
import logging
import threading
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import psworker
from pswire.membership import Mode
from tests.integration.job import Crew, Job, connect, key, worker_behind


def _prepared(ps: psworker.Connection, *, overlap: bool = False) -> Any:  # noqa: ANN401
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(torch.ones(12, 3)), 2)
    return ps.prepare(model, optimizer, loader, overlap=overlap)


@pytest.mark.parametrize(
    ("mode", "overlap"), [(Mode.BSP, False), (Mode.BSP, True), (Mode.ASP, False)]
)
def test_it_leaves_in_the_middle_of_a_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: Mode, overlap: bool
) -> None:
    caplog.set_level(logging.INFO)
    is_gone = threading.Event()

    def ended(worker_id: str) -> None:
        ps = connect(job, worker_id)
        model, optimizer, loader = _prepared(ps, overlap=overlap)
        (batch,) = next(iter(loader))
        model(batch).sum().backward()
        stepping = threading.Thread(target=_step, args=(optimizer,))
        stepping.start()
        job.wait_pushed(worker_id, 1)  # in BSP the other one has not
        worker_behind(ps).leave_at_once("SIGTERM")
        is_gone.set()
        error = RuntimeError("as a process ends")
        ps.__exit__(RuntimeError, error, None)
        stepping.join()

    def left_alone(worker_id: str) -> psworker.data.EpochReport:
        with connect(job, worker_id) as ps:
            model, optimizer, loader = _prepared(ps, overlap=overlap)
            assert is_gone.wait(20)
            for (batch,) in loader:
                optimizer.zero_grad()
                model(batch).sum().backward()
                optimizer.step()
            report = loader.report
            assert isinstance(report, psworker.data.EpochReport)
            return report

    with Job(tmp_path, workers_min=2, mode=mode) as job:
        with Crew({"a": ended, "b": left_alone}) as crew:
            report = crew.results()["b"]
        record = job.wait_record(lambda record: not record.members)
        assert all(not end.evicted for end in record.departures)
        assert job.coordinator.core.progress.evicted_count == 0
    assert (report.seen_once, report.count) == (12, 12), report
    text = caplog.text
    assert f"{key('a')} leaves, ended by SIGTERM" in text
    assert "worker a was lost" not in text


def _step(optimizer: Any) -> None:  # noqa: ANN401
    with contextlib.suppress(psworker.PsError, CancelledError):  # nobody is there
        optimizer.step()
