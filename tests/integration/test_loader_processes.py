"""Loaders with worker processes, beside the open channels of a running job."""

import os
import re
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from pswire.leased_data import EpochReport
from pswire.membership import Mode, WorkerState
from tests.doubles.children import Nursery
from tests.integration.job import WAIT_TIMEOUT_S, Job, connect, run_workers
from tests.integration.processes import Processes
from tests.integration.streams import Numbers

SAMPLE_COUNT = 24


class Owned(Dataset[tuple[torch.Tensor, int]]):
    """Tells which process has loaded a sample."""

    def __len__(self) -> int:
        return SAMPLE_COUNT

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.tensor([float(index)]), os.getpid()


def _model() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(1, 1)
    return model, torch.optim.SGD(model.parameters(), lr=1e-4)


def _step(
    model: nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor
) -> None:
    model(inputs).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def _reports(job: Job) -> list[EpochReport]:
    ledger = job.coordinator.core.ledger
    return job.ask(lambda: [each.report for each in ledger.epochs()])


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_worker_processes_of_every_kind_load_beside_open_channels(
    tmp_path: Path, method: str
) -> None:
    with Job(tmp_path, sockets=True) as job, connect(job, "w0") as ps:
        plain: DataLoader[Any] = DataLoader(
            TensorDataset(torch.arange(float(SAMPLE_COUNT)).reshape(-1, 1)),
            batch_size=4,
            shuffle=True,
            num_workers=1,
            persistent_workers=True,
            multiprocessing_context=method,
        )
        model, optimizer, loader = ps.prepare(*_model(), plain)
        for _ in range(2):
            seen: list[int] = []
            for (inputs,) in loader:
                _step(model, optimizer, inputs)
                seen += inputs.flatten().int().tolist()
            assert sorted(seen) == list(range(SAMPLE_COUNT))
            assert loader.report.is_complete
        assert ps.clock == 12


def test_a_killed_loading_process_is_an_error_and_the_next_epoch_has_a_new_one(
    tmp_path: Path,
) -> None:
    with Job(tmp_path, sockets=True) as job, connect(job, "w0") as ps:
        plain = DataLoader(
            Owned(), batch_size=2, num_workers=1, persistent_workers=True
        )
        model, optimizer, loader = ps.prepare(*_model(), plain)

        def run_into_it() -> None:
            for inputs, owners in loader:
                _step(model, optimizer, inputs)
                if ps.clock == 2:
                    os.kill(int(owners[0]), signal.SIGKILL)

        # Torch says who was killed, unless it was just reading from that process.
        with pytest.raises((RuntimeError, OSError, EOFError)) as told:
            run_into_it()
        assert isinstance(told.value, EOFError) or re.search(
            "killed|unexpected|reset", str(told.value)
        )
        before = ps.clock
        for inputs, _ in loader:
            _step(model, optimizer, inputs)
        assert ps.clock == before + SAMPLE_COUNT // 2


DOOMED = """
import os, signal, sys
import torch
from torch.utils.data import DataLoader, TensorDataset
import psworker

torch.manual_seed(0)
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
samples = TensorDataset(torch.arange(24.0).reshape(-1, 1))
print("imported")
ps = psworker.connect()
model, optimizer, loader = ps.prepare(
    model, optimizer, DataLoader(samples, batch_size=2, shuffle=True)
)
for (inputs,) in loader:
    model(inputs).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    print(*inputs.flatten().int().tolist())
    if ps.clock == 3:
        os.kill(os.getpid(), signal.SIGKILL)
"""


def test_ranges_of_a_killed_worker_finish_elsewhere(
    nursery: Nursery, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    script = tmp_path / "doomed.py"
    script.write_text(DOOMED)
    samples = TensorDataset(torch.arange(float(SAMPLE_COUNT)).reshape(-1, 1))

    def work(worker_id: str) -> tuple[list[int], Any]:
        seen: list[int] = []
        with connect(job, worker_id) as ps:
            plain: DataLoader[Any] = DataLoader(samples, batch_size=2, shuffle=True)
            model, optimizer, loader = ps.prepare(*_model(), plain)
            for (inputs,) in loader:
                _step(model, optimizer, inputs)
                seen += inputs.flatten().int().tolist()
            return seen, loader.report

    with (
        Job(tmp_path, workers_min=2, sockets=True) as job,
        Processes(tmp_path, nursery) as processes,
    ):
        processes.start(
            "doomed", str(script), PS_COORDINATOR=job.address, PS_WORKER_ID="doomed"
        )
        assert processes.line("doomed") == "imported"
        job.wait_workers(1, WorkerState.JOINING)
        # Two, since as many as the start waits for must be left when one is lost.
        results = run_workers({"w0": work, "w1": work})
        lines = [processes.line("doomed") for _ in range(3)]
        assert processes.code("doomed") == -signal.SIGKILL
    seen = [int(each) for line in lines for each in line.split()]
    assert len(seen) == 6
    for ours, report in results.values():
        seen += ours
        assert report.is_complete
        assert report.seen_once == SAMPLE_COUNT
    assert sorted(seen) == list(range(SAMPLE_COUNT))
    assert "epoch 0 of 'loader' is over: of 24 positions 24 seen once" in caplog.text


def test_a_fast_worker_takes_more_than_its_equal_part(tmp_path: Path) -> None:
    most_are_taken = threading.Event()
    has_begun = threading.Event()

    def work(worker_id: str) -> int:
        samples = TensorDataset(torch.arange(48.0).reshape(-1, 1))
        count = 0
        with connect(job, worker_id) as ps:
            plain: DataLoader[Any] = DataLoader(samples, batch_size=2)
            model, optimizer, loader = ps.prepare(*_model(), plain)
            assert len(loader) == 12
            assert loader.batch_count == 24
            for (inputs,) in loader:
                _step(model, optimizer, inputs)
                count += 1
                if worker_id == "slow":
                    has_begun.set()
                    assert most_are_taken.wait(WAIT_TIMEOUT_S)
                elif count == 1:
                    assert has_begun.wait(WAIT_TIMEOUT_S)
                elif count == 16:
                    most_are_taken.set()
        return count

    with Job(tmp_path, workers_min=2, mode=Mode.ASP, sockets=True) as job:
        counts = run_workers({"slow": work, "fast": work})
        (report,) = _reports(job)
    assert counts["fast"] >= 16
    assert sum(counts.values()) == 24
    assert report.is_complete


def test_a_worker_whose_stream_ends_early_stops_nobody(tmp_path: Path) -> None:
    def work(count: int) -> Callable[[str], int]:
        def run(worker_id: str) -> int:
            with connect(job, worker_id) as ps:
                plain = DataLoader(Numbers(count), batch_size=2)
                model, optimizer, loader = ps.prepare(*_model(), plain)
                assert ps.worker_count == 2
                for inputs in loader:
                    _step(model, optimizer, inputs)
                return ps.clock

        return run

    with Job(tmp_path, workers_min=2, sockets=True) as job:
        clocks = run_workers({"short": work(4), "long": work(20)})
    assert clocks["short"] == 2
    assert clocks["long"] == 10
