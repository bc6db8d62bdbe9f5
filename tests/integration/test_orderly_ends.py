"""No call of a worker or a reader is cancelled in the ordinary course of things.

What gRPC awaits of a call when it is cancelled is never freed, on either side
(grpc/grpc#43360): 100 bytes and more, for whoever comes and goes all day.
"""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import psworker
from pswire.membership import Mode, StepAtomicity, WorkerState
from tests.doubles.children import wait_until
from tests.integration.job import Job, connect

CANCELLED = "RPC cancelled"
"""How gRPC's server says that a handler was ended by its client."""


@pytest.fixture
def cancelled(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> pytest.LogCaptureFixture:
    # A machine that is busy with other tests is no reason to cancel.
    monkeypatch.setattr("psworker.member.session.WATCH_END_TIMEOUT_S", 20.0)
    monkeypatch.setattr("psworker.transport.shard_client.CLOSE_TIMEOUT_S", 20.0)
    caplog.set_level(logging.DEBUG, "grpc._cython.cygrpc")
    return caplog


def texts_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [record.getMessage() for record in caplog.records]
    return [text for text in found if CANCELLED in text]


def train(ps: psworker.Connection, width: int, *, overlap: bool = False) -> None:
    """Three steps with leased data."""
    model = nn.Linear(width, width)
    loader = DataLoader(TensorDataset(torch.ones(6, width)), 2)
    optimizer = torch.optim.Adam(model.parameters())
    model, optimizer, loader = ps.prepare(model, optimizer, loader, overlap=overlap)
    for (batch,) in loader:
        optimizer.zero_grad()
        model(batch).mean().backward()
        optimizer.step()
    ps.wait()


@pytest.mark.parametrize("width", [3, 600])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"shares_memory": False},
        {"mode": Mode.ASP},
        {"step_atomicity": StepAtomicity.CLOCK},
    ],
    ids=["shared", "tcp", "asp", "two-phase"],
)
def test_a_worker_comes_trains_and_leaves(
    tmp_path: Path,
    cancelled: pytest.LogCaptureFixture,
    width: int,
    settings: dict[str, Any],
) -> None:
    with Job(tmp_path, **settings, sockets=True) as job:
        for worker_id in ("a", "b"):
            with connect(job, worker_id) as ps:
                train(ps, width)
        assert texts_of(cancelled) == []


def test_with_overlap_too(tmp_path: Path, cancelled: pytest.LogCaptureFixture) -> None:
    with Job(tmp_path, sockets=True) as job:
        with connect(job, "a") as ps:
            train(ps, 600, overlap=True)
        assert texts_of(cancelled) == []


def test_a_reader_takes_a_snapshot_and_goes(
    tmp_path: Path, cancelled: pytest.LogCaptureFixture
) -> None:
    with Job(tmp_path, sockets=True) as job:
        with connect(job, "a") as ps:
            train(ps, 3)
            with psworker.SnapshotReader(job.address) as reader:
                reader.latest()
        assert texts_of(cancelled) == []


def test_who_does_not_leave_is_heard_to_go(
    tmp_path: Path, cancelled: pytest.LogCaptureFixture
) -> None:
    """The log does tell: a worker that fails has nobody to end its watch for it."""
    with Job(tmp_path, sockets=True) as job:
        ps = connect(job, "a")
        train(ps, 3)
        ps.__exit__(RuntimeError, RuntimeError("as the test wants it"), None)
        job.wait_workers(1, WorkerState.SUSPECT, WorkerState.LOST)
        wait_until(
            lambda: any("WatchWorker" in text for text in texts_of(cancelled)),
            "word of the watch",
        )
