"""Fewer bytes: a job trains to the numbers of one process that encodes as it does."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import psworker
from pswire.compression import Compression, Method
from tests.doubles.chunk_sizes import cut_into
from tests.integration.compressed_training import (
    STEP_COUNT,
    OneProcess,
    OnJob,
    backward,
    model_of,
    on_job,
    optimizer_of,
    values_of,
)
from tests.integration.job import Job, connect

PUSHES = [Compression(push=method, ratio=0.1) for method in Method]
PULLS = [Compression(pull=method, ratio=0.1) for method in Method]
BOTH = [Compression("topk", "topk", 0.1), Compression("onebit", "int8")]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cuts a model of a few KiB into a few chunks, on both sides alike."""
    cut_into(monkeypatch, 64, 1024)


def check_parity(plain: OneProcess, trained: OnJob) -> None:
    """Bit by bit: the workers' values, and the shards' own, which snapshots have."""
    for values in trained.workers.values():
        for mine, theirs in zip(values, plain.seen.parameters(), strict=True):
            assert torch.equal(mine, theirs)
    for mine, theirs in zip(trained.shards, plain.exact.parameters(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("compression", [*PUSHES, *PULLS, *BOTH], ids=str)
def test_a_job_has_the_numbers_of_one_process_that_encodes_alike(
    tmp_path: Path, compression: Compression
) -> None:
    plain = OneProcess(compression)
    plain.train()

    trained = on_job(tmp_path, compression)

    check_parity(plain, trained)
    uncompressed = OneProcess(Compression())
    uncompressed.train()
    pairs = zip(plain.seen.parameters(), uncompressed.seen.parameters(), strict=True)
    assert any(not torch.equal(mine, theirs) for mine, theirs in pairs)


def test_workers_that_differ_are_refused_with_both_values(tmp_path: Path) -> None:
    with Job(tmp_path) as job, connect(job, "w0") as ps, connect(job, "w1") as late:
        model = model_of(0)
        ps.prepare(model, optimizer_of(model), compression="bf16")
        other = model_of(0)
        text = (
            r"the job has compression \(push=bf16 pull=bf16 ratio=0.01\), this worker "
            r"has compression \(push=topk pull=raw ratio=0.02\): give all workers' "
            r"prepare\(\) the same"
        )
        with pytest.raises(psworker.OptimizerMismatchError, match=text):
            late.prepare(
                other,
                optimizer_of(other),
                compression=psworker.Compression("topk", ratio=0.02),
            )


@pytest.mark.parametrize("compression", ["int8", "topk"])
def test_overlapped_steps_have_the_same_bits(tmp_path: Path, compression: str) -> None:
    choice = Compression(compression, compression, 0.1)
    plain = OneProcess(choice)
    plain.train()

    trained = on_job(tmp_path, choice, overlap=True)

    check_parity(plain, trained)


def test_residuals_are_saved_and_a_worker_that_loads_them_goes_on_as_if_nothing(
    tmp_path: Path,
) -> None:
    """The second half is a job of one shard more, with state of the first one's."""
    compression = psworker.Compression("topk", ratio=0.05)

    def trained(folder: Path, stops_at: int | None) -> list[torch.Tensor]:
        saved: dict[str, Any] = {}
        model = model_of(0)
        start = 0
        for stop in (STEP_COUNT,) if stops_at is None else (stops_at, STEP_COUNT):
            shard_count = 2 if start == 0 else 3
            job = Job(folder / str(start), shard_count=shard_count)
            with job, connect(job, "w0") as ps:
                given = copy.deepcopy(model)
                # With sequences of its own; topk has no noise that would follow.
                given, optimizer = ps.prepare(
                    given, optimizer_of(given), compression=compression
                )
                if saved:
                    optimizer.load_state_dict(saved)
                for step in range(start, stop):
                    backward(given, "w0", step)
                    optimizer.step()
                saved = optimizer.state_dict()
                model = given
            start = stop
        (first, *_) = saved["residuals"].values()
        assert first.shape == next(model.parameters()).shape
        assert first.count_nonzero() > first.numel() / 2
        plain = torch.optim.SGD(model.parameters())
        plain.load_state_dict(saved)
        return [*values_of(model), *saved["residuals"].values()]

    whole = trained(tmp_path / "whole", None)
    halves = trained(tmp_path / "halves", 5)

    # Another number of shards would cut other chunks, but not of these sizes.
    for mine, theirs in zip(whole, halves, strict=True):
        assert torch.equal(mine, theirs)


def test_a_residual_of_another_shape_is_refused(tmp_path: Path) -> None:
    with Job(tmp_path) as job, connect(job, "w0") as ps:
        model = model_of(0)
        model, optimizer = ps.prepare(model, optimizer_of(model), compression="topk")
        state = optimizer.state_dict()
        state["residuals"] = {1: torch.zeros(3)}
        text = (
            r"the loaded state has a residual of shape \[3\] for parameter 1, which "
            r"has the shape \[32\]: load the state of the same optimizer"
        )
        with pytest.raises(ValueError, match=text):
            optimizer.load_state_dict(state)
