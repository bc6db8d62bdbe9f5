"""Leased data in a whole job: nobody hangs, nothing is seen twice, runs repeat."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Sampler, TensorDataset

import psworker
from psserver.coordinator.core.coordinator_effects import Persist
from psserver.coordinator.storage.job_store import JobStore
from pswire.membership import WorkerState
from tests.integration.job import WAIT_TIMEOUT_S, Crew, Job, connect, run_workers

SAMPLE_COUNT = 60


def _dataset() -> TensorDataset:
    inputs = torch.linspace(-1, 1, SAMPLE_COUNT * 3).reshape(SAMPLE_COUNT, 3)
    return TensorDataset(inputs, torch.arange(SAMPLE_COUNT))


def _loader(**options: object) -> DataLoader[Any]:
    options.setdefault("batch_size", 4)
    options.setdefault("shuffle", "sampler" not in options)
    return DataLoader(_dataset(), **options)  # type: ignore[arg-type]


def _prepared(
    ps: psworker.Connection, loader: DataLoader[Any]
) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    prepared: tuple[nn.Module, torch.optim.Optimizer, Any] = ps.prepare(
        model, optimizer, loader
    )
    return prepared


def _step(
    model: nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor
) -> None:
    model(inputs).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def _training(
    job: Job, epoch_count: int, **options: object
) -> Callable[[str], tuple[list[list[list[int]]], list[torch.Tensor]]]:
    """A worker's work; what it saw in each epoch, and its parameters at the end."""

    def work(worker_id: str) -> tuple[list[list[list[int]]], list[torch.Tensor]]:
        seen: list[list[list[int]]] = []
        with connect(job, worker_id) as ps:
            model, optimizer, loader = _prepared(ps, _loader(**options))
            for _ in range(epoch_count):
                seen.append([])
                for inputs, indices in loader:
                    seen[-1].append(indices.tolist())
                    _step(model, optimizer, inputs)
            return seen, [each.detach().clone() for each in model.parameters()]

    return work


@pytest.mark.parametrize("process_count", [0, 2])
def test_together_the_workers_see_each_sample_once_an_epoch(
    tmp_path: Path, process_count: int
) -> None:
    with Job(tmp_path, workers_min=3) as job:
        work = _training(job, 3, num_workers=process_count)
        results = run_workers(dict.fromkeys(("w0", "w1", "w2"), work))
    for epoch in range(3):
        seen = [
            index
            for batches, _ in results.values()
            for batch in batches[epoch]
            for index in batch
        ]
        assert sorted(seen) == list(range(SAMPLE_COUNT))


def test_a_run_repeats_bit_by_bit_whoever_comes_first(tmp_path: Path) -> None:
    runs = []
    for folder, names in (("first", ("w0", "w1")), ("second", ("w1", "w0"))):
        with Job(tmp_path / folder, workers_min=2) as job:
            # 15 batches for two: each epoch ends with one worker idle.
            work = _training(job, 4)
            with Crew({names[0]: work}) as earlier:
                job.wait_workers(1, WorkerState.JOINING)
                later = run_workers({names[1]: work})
                runs.append({**earlier.results(), **later})
    first, second = runs
    for name in ("w0", "w1"):
        assert first[name][0] == second[name][0]
        for one, other in zip(first[name][1], second[name][1], strict=True):
            assert torch.equal(one, other)


def test_values_come_to_an_idle_worker_that_keeps_its_last_gradient(
    tmp_path: Path,
) -> None:
    """Many scripts zero gradients right before `backward()`, not after `step()`."""

    def work(worker_id: str) -> list[torch.Tensor]:
        with connect(job, worker_id) as ps:
            model, optimizer, loader = _prepared(ps, _loader(batch_size=20))
            for _ in range(2):
                values = [each.detach().clone() for each in model.parameters()]
                for inputs, _ in loader:
                    optimizer.zero_grad()
                    model(inputs).square().sum().backward()
                    optimizer.step()
            return values

    with Job(tmp_path, workers_min=2) as job:
        # Three batches an epoch: one worker is idle at its end.
        results = run_workers({"w0": work, "w1": work})
    for one, other in zip(results["w0"], results["w1"], strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("overlap", [False, True])
def test_an_epoch_closes_after_all_steps_on_its_last_batch(
    tmp_path: Path, overlap: bool
) -> None:
    """Else the idle worker begins the next one in the midst of the two steps."""

    def work(worker_id: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        with connect(job, worker_id) as ps:
            g, d = nn.Linear(3, 3), nn.Linear(3, 1)
            optimizers = [torch.optim.Adam(each.parameters()) for each in (g, d)]
            given = (g, d, *optimizers, _loader(batch_size=20))
            g, d, g_opt, d_opt, loader = ps.prepare(*given, overlap=overlap)
            for _ in range(4):
                for inputs, _ in loader:
                    for optimizer in (d_opt, g_opt):
                        optimizer.zero_grad()
                        d(g(inputs)).square().mean().backward()
                        optimizer.step()
            ps.wait()
            return [each.detach().clone() for each in g.parameters()]

    with Job(tmp_path, workers_min=2) as job:
        # Three batches an epoch: one worker is idle at its end.
        results = run_workers({"w0": work, "w1": work})
    for one, other in zip(results["w0"], results["w1"], strict=True):
        assert torch.equal(one, other)


def test_a_worker_with_more_data_waits_for_nobody_who_has_left(tmp_path: Path) -> None:
    def work(worker_id: str) -> int:
        epoch_count = {"w0": 1, "w1": 3}[worker_id]
        with connect(job, worker_id) as ps:
            model, optimizer, loader = _prepared(ps, _loader())
            for _ in range(epoch_count):
                for inputs, _ in loader:
                    _step(model, optimizer, inputs)
            return ps.clock

    with Job(tmp_path, workers_min=2) as job:
        clocks = run_workers({"w0": work, "w1": work})
        with psworker.SnapshotReader(job.address) as reader:
            final = reader.latest(timeout=WAIT_TIMEOUT_S)
    assert final.clock == max(clocks.values())


def test_an_accumulation_that_never_ends_strands_nobody(tmp_path: Path) -> None:
    def work(worker_id: str) -> int:
        with connect(job, worker_id) as ps:
            model, optimizer, loader = _prepared(ps, _loader())
            for _ in range(2):
                for count, (inputs, _) in enumerate(loader, start=1):
                    model(inputs).square().sum().backward()
                    if count % 2 == 0:
                        optimizer.step()
                        optimizer.zero_grad()
            return ps.clock

    with Job(tmp_path, workers_min=2) as job:
        clocks = run_workers({"w0": work, "w1": work})
    assert all(clock > 0 for clock in clocks.values())


def test_leaving_an_epoch_early_strands_nobody(tmp_path: Path) -> None:
    left = threading.Event()

    def quitter(worker_id: str) -> None:
        with connect(job, worker_id) as ps:
            model, optimizer, loader = _prepared(ps, _loader())
            for inputs, _ in loader:
                _step(model, optimizer, inputs)
                break
        left.set()

    def stayer(worker_id: str) -> list[int]:
        seen: list[int] = []
        with connect(job, worker_id) as ps:
            model, optimizer, loader = _prepared(ps, _loader())
            for inputs, indices in loader:
                seen += indices.tolist()
                _step(model, optimizer, inputs)
        return seen

    with Job(tmp_path, workers_min=2) as job:
        works: dict[str, Callable[[str], Any]] = {"w0": quitter, "w1": stayer}
        results = run_workers(works)
    assert left.is_set()
    # All but the one batch of the quitter, each once.
    assert len(results["w1"]) == len(set(results["w1"])) == SAMPLE_COUNT - 4


def test_opening_an_epoch_writes_down_no_more_after_many_epochs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each write waits for the disk, and the coordinator with it."""
    written: set[int] = set()
    write = JobStore.write

    def counted(store: JobStore, change: Persist) -> None:
        written.update(ledger.epoch for ledger in change.epochs)
        write(store, change)

    monkeypatch.setattr(JobStore, "write", counted)
    counts = []
    with Job(tmp_path) as job, connect(job, "w0") as ps:
        model, optimizer, loader = _prepared(ps, _loader(batch_size=SAMPLE_COUNT))
        for _ in range(6):
            written.clear()
            for inputs, _ in loader:
                _step(model, optimizer, inputs)
            counts.append(len(written))
    assert max(counts) <= 2, "the one before, and its own"


class Reversed(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(SAMPLE_COUNT - 1, -1, -1))

    def __len__(self) -> int:
        return SAMPLE_COUNT


def test_another_order_of_data_is_refused_with_the_cure(tmp_path: Path) -> None:
    registered = threading.Event()

    def first(worker_id: str) -> None:
        with connect(job, worker_id) as ps:
            _, _, loader = _prepared(ps, _loader(shuffle=False))
            batches = iter(loader)
            next(batches)
            registered.set()
            batches.close()

    def second(worker_id: str) -> str:
        with connect(job, worker_id) as ps:
            _, _, loader = _prepared(ps, _loader(sampler=Reversed()))
            assert registered.wait(WAIT_TIMEOUT_S)
            with pytest.raises(psworker.DataOrderError) as caught:
                next(iter(loader))
            return str(caught.value)

    with Job(tmp_path, workers_min=2) as job:
        works: dict[str, Callable[[str], Any]] = {"w0": first, "w1": second}
        text = run_workers(works)["w1"]
    assert "same data set and a sampler" in text


def test_a_run_on_a_finished_job_is_told_that_its_epochs_are_trained(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Job(tmp_path, shard_count=1) as job:
        first, _ = run_workers({"w0": _training(job, 1)})["w0"]
        assert sum(map(len, first)) == SAMPLE_COUNT // 4
        assert "got no batch" not in caplog.text
        assert "this job is finished" not in caplog.text

        second, _ = run_workers({"w0": _training(job, 1)})["w0"]

    assert second == [[]]
    before, _, _ = caplog.text.partition("got no batch of epoch 0 of 'loader'")
    assert before != caplog.text
    assert "this job is finished: all of its workers have left" in before
