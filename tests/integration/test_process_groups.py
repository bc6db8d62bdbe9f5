"""Groups of `torch.distributed` as one worker of a job, with real processes.

A `DistributedSampler` without shuffling deals rows in turn, so that each step of the
group is of the same rows as one of a single process.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

from tests.doubles.children import Nursery
from tests.doubles.job_tokens import JobTokens
from tests.integration.group_pair import start_pair
from tests.integration.group_training import (
    CLIP_NORM,
    OTHER_COUNT,
    STEP_COUNT,
    new_model,
    new_optimizer,
    rows_of_other,
    samples,
)
from tests.integration.job import Crew, Job, connect, deviation
from tests.integration.processes import Processes


@pytest.fixture
def processes(tmp_path: Path, nursery: Nursery) -> Iterator[Processes]:
    with Processes(tmp_path, nursery) as started:
        yield started


def values_of(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def in_one_process() -> list[torch.Tensor]:
    model = new_model(seed=0)
    optimizer = new_optimizer(model)
    scheduler = StepLR(optimizer, 4)
    inputs, targets, rows = samples()
    clipped = 0
    for step in range(STEP_COUNT):
        x = torch.cat([inputs[rows[step]], inputs[rows_of_other(step)]])
        y = torch.cat([targets[rows[step]], targets[rows_of_other(step)]])
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        clipped += (
            float(nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)) > CLIP_NORM
        )
        optimizer.step()
        scheduler.step()
    assert clipped
    return values_of(model)


def on_plain_worker(job: Job, worker_id: str) -> list[torch.Tensor]:
    model = new_model(seed=0)
    optimizer = new_optimizer(model)
    inputs, targets, _ = samples()
    with connect(job, worker_id, step_timeout_s=40, start_timeout_s=50) as ps:
        given = (model, optimizer, StepLR(optimizer, 4))
        _, optimizer, scheduler = ps.prepare(*given, clip_grad_norm=CLIP_NORM)
        for step in range(STEP_COUNT):
            rows = rows_of_other(step)
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs[rows]), targets[rows]).backward()
            optimizer.step(weight=OTHER_COUNT // STEP_COUNT)
            scheduler.step()
    return values_of(model)


def test_a_data_parallel_group_and_a_worker_have_the_numbers_of_one_process(
    tmp_path: Path, processes: Processes
) -> None:
    with Job(tmp_path / "job", shard_count=2, workers_min=2, sockets=True) as job:
        start_pair(processes, "train", tmp_path, job)
        with Crew({"z0": lambda worker_id: on_plain_worker(job, worker_id)}) as crew:
            beside = crew.results()["z0"]
        for rank in range(2):
            line = processes.line(f"rank-{rank}")
            assert line.startswith(f"split {rank} "), line
            assert "split 'rows' differs from the one that worker 'r0'" in line
        seen = sorted(processes.line(f"rank-{rank}") for rank in range(2))
        assert seen == [f"end {rank} r0 {STEP_COUNT} bsp applied" for rank in range(2)]
        assert processes.line("rank-0") == "bytes 0 True"
        assert processes.line("rank-1") == "bytes 1 False"
        for rank in range(2):
            for what in ("closed", "waits"):
                line = processes.line(f"rank-{rank}")
                assert line.startswith(f"{what} {rank} the connection is closed"), line
            assert processes.code(f"rank-{rank}") == 0
        roster = job.coordinator.core.roster
        assert sorted(job.ask(lambda: roster.incarnations)) == ["r0", "z0"]
    ranks = [torch.load(tmp_path / f"rank-{rank}.pt") for rank in range(2)]
    for ours in (*ranks, beside):
        assert all(torch.equal(a, b) for a, b in zip(ours, beside, strict=True))
    measured = deviation(beside, in_one_process())
    print(f"deviation {measured:.2e}")
    assert measured <= 1e-6


def test_what_ends_the_leader_is_an_error_in_all_processes(
    tmp_path: Path, processes: Processes
) -> None:
    with Job(tmp_path / "job", shard_count=2, sockets=True) as job:
        start_pair(processes, "fail", tmp_path, job)
        for rank in range(2):
            assert processes.line(f"rank-{rank}") == "ready"
        job.end_shard(1)
        first, second = (processes.line(f"rank-{rank}") for rank in range(2))
        # Whether the leader hears it from the coordinator or by a call is a race.
        _, _, kind, says = first.split(" ", 3)
        assert kind in ("JobFailedError", "ShardLostError")
        assert "shard 1 at" in says
        assert second == (
            f"failed 1 {kind} rank 0 of this process group, which speaks to the "
            f"job for all of it, failed: {says}"
        )
        for rank in range(2):
            assert processes.code(f"rank-{rank}") == 0


def test_without_a_wrapped_model_each_process_is_a_worker(
    tmp_path: Path, processes: Processes
) -> None:
    """In a job that asks for tokens, of which each process has the file."""
    tokens = JobTokens(tmp_path)
    token = {"PS_TOKEN_FILE": str(tokens.path("worker"))}
    with Job(tmp_path / "job", workers_min=2, sockets=True, tokens=tokens) as job:
        start_pair(processes, "plain", tmp_path, job, **token)
        for rank in range(2):
            early, late = (processes.line(f"rank-{rank}") for _ in range(2))
            assert early.startswith(f"early {rank} the processes of a group record spl")
            assert late.startswith(f"split {rank} split 'rows' differs")
        seen = sorted(processes.line(f"rank-{rank}") for rank in range(2))
        assert [line.split()[:3] for line in seen] == [
            ["worker", str(rank), f"r{rank}"] for rank in range(2)
        ]
        assert sorted(line.split()[3] for line in seen) == ["0", "1"]
        for rank in range(2):
            assert processes.code(f"rank-{rank}") == 0


def test_what_a_group_can_not_do_is_refused_in_every_process(
    tmp_path: Path, processes: Processes
) -> None:
    with Job(tmp_path / "job", sockets=True) as job:
        start_pair(processes, "refuse", tmp_path, job)
        for rank in range(2):
            early, loader, model, nothing = (
                processes.line(f"rank-{rank}") for _ in range(4)
            )
            assert "call init_process_group() before connect()" in early
            assert loader.startswith(f"refused {rank} in a group of Distributed")
            assert "sampler=DistributedSampler(dataset)" in loader
            assert "model1 is not wrapped in DistributedDataParallel" in model
            assert "at least one model and one optimizer" in nothing
        assert "model has 1 of the 2 processes of the default group" in (
            processes.line("rank-0")
        )
        for rank in range(2):
            assert processes.code(f"rank-{rank}") == 0
