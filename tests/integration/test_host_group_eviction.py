"""A host group that the coordinator took for lost: it joins again as a whole."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import psworker
from psworker.connection import Connection
from tests.doubles.fault_proxy import FaultProxy
from tests.integration.host_processes import run_group
from tests.integration.job import WAIT_TIMEOUT_S, Job, evict

COUNT: Final = 3
SAMPLE_COUNT: Final = 60


def zeros() -> nn.Linear:
    model = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(model.weight)
    return model


@contextmanager
def bystander(job: Job, model: nn.Module) -> Iterator[None]:
    """Another worker, without which the job would wait for the group."""
    is_here, is_over = threading.Event(), threading.Event()

    def step() -> None:
        with psworker.connect(job.address, "w1", step_timeout_s=WAIT_TIMEOUT_S) as ps:
            prepared, optimizer = ps.prepare(
                model, torch.optim.SGD(model.parameters(), lr=1.0)
            )
            assert prepared is model
            is_here.set()
            while not is_over.is_set():
                optimizer.step(weight=0.0)

    with ThreadPoolExecutor(1) as pool:
        stepping = pool.submit(step)
        try:
            assert is_here.wait(WAIT_TIMEOUT_S)
            yield
        finally:
            is_over.set()
            stepping.result()


def test_a_gradient_of_before_an_eviction_is_thrown_away_once(tmp_path: Path) -> None:
    meeting = threading.Barrier(COUNT, timeout=WAIT_TIMEOUT_S)

    with (
        Job(tmp_path, shard_count=2, sockets=True) as job,
        FaultProxy(job.address) as proxy,
    ):

        def script(ps: Connection, index: int) -> tuple[list[str], list[float]]:
            model = zeros()
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            model, optimizer = ps.prepare(model, optimizer)
            outcomes, values = [], []
            for step in range(4):
                if step == 2:
                    if meeting.wait() == 0:
                        evict(job, proxy, "host")
                    meeting.wait()
                model.weight.grad = torch.full((1, 2), -1.0)
                optimizer.step()
                assert ps.last_push is not None
                outcomes.append(ps.last_push.outcome)
                values.append(float(model.weight.detach().sum()))
            return outcomes, values

        with bystander(job, zeros()):
            runs = run_group(job, COUNT, script, address=proxy.address)
    for found in runs:
        assert found == (
            ["applied", "applied", "dropped", "applied"],
            [2.0, 4.0, 4.0, 6.0],
        )


def test_an_epoch_goes_on_after_an_eviction(tmp_path: Path) -> None:
    is_evicted = threading.Event()

    with (
        Job(tmp_path, shard_count=2, sockets=True) as job,
        FaultProxy(job.address) as proxy,
    ):

        def script(ps: Connection, index: int) -> tuple[list[int], int]:
            model = nn.Embedding(SAMPLE_COUNT, 2)
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            data = TensorDataset(torch.arange(SAMPLE_COUNT))
            loader = DataLoader(data, batch_size=2)
            model, optimizer, loader = ps.prepare(model, optimizer, loader)
            seen: list[int] = []
            for step, (rows,) in enumerate(loader):
                if index == 1 and step == 3:
                    evict(job, proxy, "host")
                    is_evicted.set()
                optimizer.zero_grad()
                model(rows).sum().backward()
                optimizer.step()
                assert ps.last_push is not None
                if ps.last_push.outcome == "applied":
                    seen += rows.tolist()
            assert loader.report is not None
            return seen, loader.report.seen_once

        with bystander(job, nn.Embedding(SAMPLE_COUNT, 2)):
            found = run_group(job, COUNT, script, address=proxy.address)
    assert is_evicted.is_set()
    assert sorted(e for seen, _ in found for e in seen) == list(range(SAMPLE_COUNT))
    assert {once for _, once in found} == {SAMPLE_COUNT}
