"""Workers that end early, come late or go in the middle, held against one process.

A worker's gradient of a clock is a pure function of both, so that whoever took part in
which clock can be worked out afterwards, in one process.
"""

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import psworker
from psworker.snapshots.snapshot import Snapshot
from tests.integration.job import (
    WAIT_TIMEOUT_S,
    Crew,
    Job,
    connect,
    deviation,
    run_workers,
)

SEED: Final = 29
LR: Final = 0.1


@dataclass(frozen=True)
class Part:
    """Clocks `(begin, end]` that a worker took part in."""

    begin: int
    end: int


def build() -> nn.Module:
    generator = torch.Generator().manual_seed(SEED)
    return nn.ParameterList(
        [torch.randn(50, 7, generator=generator), torch.randn(9, generator=generator)]
    )


def weight_of(worker_id: str) -> float:
    return 1.0 + sum(worker_id.encode()) % 5


def fill_gradients(model: nn.Module, worker_id: str, clock: int) -> None:
    number = sum(worker_id.encode()) * 10_000 + clock
    generator = torch.Generator().manual_seed(number)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=LR, momentum=0.5)


def in_one_process(parts: Mapping[str, Part]) -> nn.Module:
    """Every clock's weighted mean over those that took part in it."""
    model = build()
    optimizer = optimizer_of(model)
    for clock in range(1, max(part.end for part in parts.values()) + 1):
        present = [w for w, part in parts.items() if part.begin < clock <= part.end]
        total = sum(map(weight_of, present))
        sums = [torch.zeros(p.shape).double() for p in model.parameters()]
        for worker_id in present:
            fill_gradients(model, worker_id, clock)
            for added, parameter in zip(sums, model.parameters(), strict=True):
                assert parameter.grad is not None
                added += parameter.grad.double() * (weight_of(worker_id) / total)
        for added, parameter in zip(sums, model.parameters(), strict=True):
            parameter.grad = added.float()
        optimizer.step()
    return model


def take_part(
    job: Job,
    worker_id: str,
    last_clock: int,
    *,
    joined: threading.Event | None = None,
    held_at: Mapping[int, threading.Event] | None = None,
) -> Part:
    """Joins, pushes up to a clock and leaves."""
    model = build()
    optimizer = optimizer_of(model)
    with connect(job, worker_id) as ps:
        model, optimizer = ps.prepare(model, optimizer)
        begin = ps.clock
        if joined is not None:
            joined.set()
        while ps.clock < last_clock:
            if held_at is not None and ps.clock in held_at:
                assert held_at[ps.clock].wait(WAIT_TIMEOUT_S)
            fill_gradients(model, worker_id, ps.clock + 1)
            optimizer.step(weight=weight_of(worker_id))
        return Part(begin, ps.clock)


def final_snapshot(job: Job) -> Snapshot:
    with psworker.SnapshotReader(job.address) as reader:
        return reader.latest(timeout=WAIT_TIMEOUT_S)


def assert_holds(snapshot: Snapshot, parts: Mapping[str, Part]) -> None:
    expected = in_one_process(parts)
    ours = list(snapshot.state_dict().values())
    theirs = [each.detach() for each in expected.parameters()]
    assert deviation(ours, theirs) <= 1e-6, f"seed {SEED}"
    assert snapshot.clock == max(part.end for part in parts.values())
    assert snapshot.version == sum(part.end - part.begin for part in parts.values())


def test_nobody_waits_for_a_worker_that_is_done(tmp_path: Path) -> None:
    """`--min-workers` counts for the start alone."""
    ends = {"w0": 10, "w1": 17, "w2": 40}
    with Job(tmp_path, shard_count=2, workers_min=3) as job:
        parts = run_workers({w: lambda w: take_part(job, w, ends[w]) for w in ends})
        snapshot = final_snapshot(job)
        phase = job.ask(lambda: job.coordinator.core.phase.name)
    assert parts == {w: Part(0, end) for w, end in ends.items()}
    assert_holds(snapshot, parts)
    assert phase == "FINISHED"


def test_a_worker_may_leave_without_a_step(tmp_path: Path) -> None:
    with Job(tmp_path, shard_count=2, workers_min=2) as job:
        parts = run_workers(
            {"w0": lambda w: take_part(job, w, 5), "w1": lambda w: take_part(job, w, 0)}
        )
        assert_holds(final_snapshot(job), parts)


def test_one_joins_in_the_middle_and_another_leaves(tmp_path: Path) -> None:
    joined = threading.Event()
    with Job(tmp_path, shard_count=3, workers_min=2) as job:
        works = {
            # Goes on with its 16th clock when the late one is in.
            "w0": lambda w: take_part(job, w, 40, held_at={15: joined}),
            "w1": lambda w: take_part(job, w, 25),
        }
        with Crew(works) as crew:
            job.wait_pushed("w1", 5)
            late = run_workers({"late": lambda w: take_part(job, w, 40, joined=joined)})
            parts = {**crew.results(), **late}
        snapshot = final_snapshot(job)
    assert 5 <= parts["late"].begin <= 16
    assert parts["w1"] == Part(0, 25)
    assert_holds(snapshot, parts)


def test_a_job_goes_on_after_everybody_has_left(tmp_path: Path) -> None:
    with Job(tmp_path, shard_count=2) as job:
        first = run_workers({"w0": lambda w: take_part(job, w, 4)})
        second = run_workers({"w1": lambda w: take_part(job, w, 9)})
        third = run_workers({"w0": lambda w: take_part(job, w, 12)})
        snapshot = final_snapshot(job)
    assert first["w0"] == Part(0, 4)
    assert second["w1"] == Part(4, 9)
    assert third["w0"] == Part(9, 12)
    # The second start of w0 pushes as it did: parts are by name and begin.
    model = in_one_process_in_turn([("w0", 4), ("w1", 9), ("w0", 12)])
    ours = list(snapshot.state_dict().values())
    assert deviation(ours, [each.detach() for each in model.parameters()]) <= 1e-6
    assert (snapshot.clock, snapshot.version) == (12, 12)


def in_one_process_in_turn(ends: list[tuple[str, int]]) -> nn.Module:
    model = build()
    optimizer = optimizer_of(model)
    clock = 0
    for worker_id, end in ends:
        while clock < end:
            clock += 1
            fill_gradients(model, worker_id, clock)
            optimizer.step()
    return model


@pytest.mark.parametrize("epoch_count", [1, 3])
def test_leased_batches_are_seen_once_and_all_workers_end(
    epoch_count: int, tmp_path: Path
) -> None:
    """Batches don't divide by workers: the last clocks of an epoch have few of them."""
    data = TensorDataset(torch.arange(103.0).reshape(-1, 1))

    def work(worker_id: str) -> list[float]:
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        seen: list[float] = []
        loader = DataLoader(data, batch_size=8, shuffle=True)
        with connect(job, worker_id) as ps:
            model, optimizer, loader = ps.prepare(model, optimizer, loader)
            for _ in range(epoch_count):
                for (samples,) in loader:
                    optimizer.zero_grad()
                    model(samples).mean().backward()
                    optimizer.step()
                    seen += samples.flatten().tolist()
        return seen

    with Job(tmp_path, shard_count=2, workers_min=3) as job:
        results = run_workers(dict.fromkeys(("w0", "w1", "w2"), work))
        final_snapshot(job)
    seen = [sample for each in results.values() for sample in each]
    assert sorted(seen) == sorted(
        float(i) for i in range(103) for _ in range(epoch_count)
    )
    assert all(results.values()), "everybody had data"
