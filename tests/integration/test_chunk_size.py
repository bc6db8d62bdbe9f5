"""A job whose chunks have the size that its coordinator was told."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import nn

import psworker
from pswire.limits import (
    CHUNK_BYTES_ASKED_MIN,
    CHUNK_BYTES_MAX,
    MESSAGE_BYTES_MAX,
    VALUES_PART_BYTES,
)
from tests.integration.host_processes import run_group
from tests.integration.job import Job, connect, deviation, run_workers

SEED: Final = 20261128
SMALL_KIB: Final = CHUNK_BYTES_ASKED_MIN >> 10
LARGE_KIB: Final = CHUNK_BYTES_MAX >> 10
SMALL: Final = (150, 500)
"""Widths of a model of about 600 KiB: without the option one chunk for each shard."""

LARGE: Final = (1_000, 1_600)
"""Widths of a model of 12 MiB: two chunks for each shard, and values in parts."""

STEP_COUNT: Final = 3
BATCHES: Final = (slice(0, 11), slice(11, 16))
"""Samples of each worker in every step: 16 together."""


def new_model(widths: tuple[int, int] = SMALL) -> nn.Module:
    generator = torch.Generator().manual_seed(SEED)
    outer, inner = widths
    model = nn.Sequential(nn.Linear(outer, inner), nn.Tanh(), nn.Linear(inner, outer))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 12)
    return model


def new_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)


def train(
    model: nn.Module,
    optimizer: Any,  # noqa: ANN401, torch's or a prepared one, whose steps have weights
    rows: slice,
    **weight: float,
) -> list[torch.Tensor]:
    width = next(model.parameters()).shape[1]
    for step in range(STEP_COUNT):
        generator = torch.Generator().manual_seed(SEED + step)
        inputs, targets = torch.randn(2, 16, width, generator=generator)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs[rows]), targets[rows]).backward()
        optimizer.step(**weight)
    return [each.detach().clone() for each in model.parameters()]


def part(
    ps: psworker.Connection,
    index: int,
    widths: tuple[int, int] = SMALL,
    *,
    overlap: bool = False,
) -> list[torch.Tensor]:
    """Trains with one of the batches; the parameters then."""
    rows = BATCHES[index]
    model = new_model(widths)
    model, optimizer = ps.prepare(model, new_optimizer(model), overlap=overlap)
    return train(model, optimizer, rows, weight=rows.stop - rows.start)


def as_workers(
    job: Job, widths: tuple[int, int] = SMALL, *, overlap: bool = False
) -> list[list[torch.Tensor]]:
    def work(worker_id: str) -> list[torch.Tensor]:
        with connect(job, worker_id) as ps:
            return part(ps, int(worker_id), widths, overlap=overlap)

    return list(run_workers({"0": work, "1": work}).values())


def as_host_group(job: Job) -> list[list[torch.Tensor]]:
    return run_group(job, 2, part)


@pytest.mark.parametrize(
    ("run", "settings"),
    [
        (as_workers, {"workers_min": 2}),
        (as_workers, {"workers_min": 2, "shares_memory": False}),
        (as_host_group, {}),
    ],
)
def test_a_job_has_the_numbers_of_one_process(
    run: Callable[[Job], list[list[torch.Tensor]]],
    settings: dict[str, Any],
    tmp_path: Path,
) -> None:
    alone = new_model()
    exact = train(alone, new_optimizer(alone), slice(None))
    with Job(tmp_path, chunk_kib=SMALL_KIB, **settings) as job:
        trained = run(job)
        trained.append(snapshot_of(job))
        sizes = sizes_of(job)

    check(trained, exact)
    *full, last = sorted(sizes[0] + sizes[1], reverse=True)
    assert set(full) == {SMALL_KIB << 10}
    assert 0 < last < SMALL_KIB << 10
    assert [len(held) for held in sizes] == [5, 5]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("shares_memory", [False, True])
def test_values_of_large_chunks_come_in_parts(
    shares_memory: bool, overlap: bool, tmp_path: Path
) -> None:
    """To workers in messages, and to readers always."""
    alone = new_model(LARGE)
    exact = train(alone, new_optimizer(alone), slice(None))
    with Job(
        tmp_path, chunk_kib=LARGE_KIB, workers_min=2, shares_memory=shares_memory
    ) as job:
        trained = as_workers(job, LARGE, overlap=overlap)
        trained.append(snapshot_of(job))
        sizes = sizes_of(job)

    check(trained, exact)
    assert max(sizes[0]) == LARGE_KIB << 10 > VALUES_PART_BYTES


@pytest.mark.parametrize("sent", [(), ("2.bias",)])
def test_a_small_push_may_have_more_values_than_fit_a_message(
    sent: tuple[str, ...], tmp_path: Path
) -> None:
    """Those of a clock to which others bring the rest, as while one has no data."""

    def work(worker_id: str) -> list[torch.Tensor]:
        model = new_model(LARGE)
        with connect(job, worker_id) as ps:
            model, optimizer = ps.prepare(model, new_optimizer(model))
            for _ in range(STEP_COUNT):
                for name, parameter in model.named_parameters():
                    is_sent = worker_id == "0" or name in sent
                    parameter.grad = torch.ones_like(parameter) if is_sent else None
                optimizer.step(weight=1)
            return [each.detach().clone() for each in model.parameters()]

    exact = new_model(LARGE)
    optimizer = new_optimizer(exact)
    for _ in range(STEP_COUNT):
        for name, parameter in exact.named_parameters():
            parameter.grad = torch.full_like(parameter, 1.0 if name in sent else 0.5)
        optimizer.step()
    with Job(tmp_path, shard_count=1, workers_min=2, shares_memory=False) as job:
        trained = list(run_workers({"0": work, "1": work}).values())
        sizes = sizes_of(job)

    check(trained, [each.detach() for each in exact.parameters()])
    assert sum(sizes[0]) > MESSAGE_BYTES_MAX


@pytest.mark.parametrize("chunk_kib", [None, LARGE_KIB])
def test_values_of_a_job_that_compresses_come_whole(
    chunk_kib: int | None, tmp_path: Path
) -> None:
    with Job(tmp_path, chunk_kib=chunk_kib) as job:
        with connect(job, "0") as ps:
            model = new_model(LARGE)
            compression = psworker.Compression(push="int8", pull="int8")
            model, optimizer = ps.prepare(
                model, new_optimizer(model), compression=compression
            )
            train(model, optimizer, slice(None))
        assert len(snapshot_of(job)) == 4
        sizes = sizes_of(job)

    assert max(sizes[0]) == VALUES_PART_BYTES


def snapshot_of(job: Job) -> list[torch.Tensor]:
    with psworker.SnapshotReader(job.address) as reader:
        snapshot = reader.latest()
    assert snapshot.clock == STEP_COUNT
    return list(snapshot.state_dict().values())


def sizes_of(job: Job) -> list[list[int]]:
    return job.ask(
        lambda: [
            [chunk.byte_count for chunk in host.model.chunks] for host in job.shards
        ]
    )


def check(found: list[list[torch.Tensor]], exact: list[torch.Tensor]) -> None:
    for each in found:
        measured = deviation(each, exact)
        print(f"seed {SEED}: deviation {measured:.2e}")
        assert measured <= 1e-6
