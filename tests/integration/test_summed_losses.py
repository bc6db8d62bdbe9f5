"""A loss that is a sum over its batch: of all workers' batches, as in one process."""

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import nn

from pswire.membership import Mode
from psworker.errors import ConfigurationError, OptimizerMismatchError
from psworker.optim.step_contents import OptimizerStep
from tests.doubles.chunk_sizes import cut_into
from tests.doubles.promised_numbers import DEVIATION_MAX
from tests.integration.job import Job, connect, deviation, run_workers
from tests.integration.one_process import batch, small_model

STEP_COUNT: Final = 8
ROWS: Final = {"w0": slice(0, 3), "w1": slice(3, 8)}
ALL: Final = slice(0, 8)

small_chunks = cut_into(24, 64)
"""Cuts tensors of a few elements into chunks, on both sides alike."""


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.02)


Build = Callable[[nn.Module], torch.optim.Optimizer]


def train(
    build: Build,
    rows: slice,
    ps: Any = None,  # noqa: ANN401, a connection or none
    *,
    parts: int = 1,
    clip_grad_norm: float | None = None,
    **options: Any,  # noqa: ANN401, as `prepare`
) -> list[torch.Tensor]:
    """Trains on some rows of each batch, whose gradient comes in parts."""
    model = small_model()
    optimizer: Any = build(model)
    if ps is not None:
        options |= {"loss": "sum", "clip_grad_norm": clip_grad_norm}
        model, optimizer = ps.prepare(model, optimizer, **options)
    for step in range(STEP_COUNT):
        optimizer.zero_grad()
        inputs, targets = batch(step, rows)
        for x, y in zip(inputs.chunk(parts), targets.chunk(parts), strict=True):
            nn.functional.mse_loss(model(x), y, reduction="sum").backward()
        if ps is not None:
            optimizer.step(weight=float(len(inputs)))
            continue
        if clip_grad_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip_grad_norm)
        optimizer.step()
    return [each.detach().clone() for each in model.parameters()]


@pytest.mark.parametrize(
    ("build", "options"),
    [
        (sgd, {}),
        (adam, {}),
        (sgd, {"parts": 2}),
        (adam, {"overlap": True, "parts": 2}),
        (sgd, {"clip_grad_norm": 40.0}),
    ],
    ids=["sgd", "adam", "accumulated", "overlap", "clipped"],
)
def test_two_workers_with_unequal_batches_are_one_process(
    tmp_path: Path, build: Build, options: dict[str, Any]
) -> None:
    def work(worker_id: str) -> list[torch.Tensor]:
        with connect(job, worker_id) as ps:
            return train(build, ROWS[worker_id], ps, **options)

    with Job(tmp_path, workers_min=2) as job:
        results = run_workers({"w0": work, "w1": work})
    plain = train(build, ALL, clip_grad_norm=options.get("clip_grad_norm"))
    for ours in results.values():
        assert deviation(ours, plain) <= DEVIATION_MAX


@pytest.mark.parametrize("mode", [Mode.SSP, Mode.ASP], ids=["ssp", "asp"])
def test_without_a_barrier_each_push_is_an_update_by_its_own_sum(
    tmp_path: Path, mode: Mode
) -> None:
    with Job(tmp_path, mode=mode) as job, connect(job, "w0") as ps:
        ours = train(sgd, ROWS["w1"], ps)
    assert deviation(ours, train(sgd, ROWS["w1"])) <= DEVIATION_MAX


@pytest.mark.parametrize("mode", [Mode.SSP, Mode.ASP], ids=["ssp", "asp"])
def test_without_a_barrier_sums_of_all_workers_are_subtracted_whatever_their_weight(
    tmp_path: Path, mode: Mode
) -> None:
    # The gradient does not depend on the values, so neither does the order count.
    inputs = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0]])
    rows = {"w0": slice(0, 1), "w1": slice(1, 4)}

    def work(worker_id: str) -> torch.Tensor:
        with connect(job, worker_id) as ps:
            model = nn.Linear(2, 1, bias=False)
            nn.init.zeros_(model.weight)
            optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.5)
            model, optimizer = ps.prepare(model, optimizer, loss="sum")
            for _ in range(3):
                optimizer.zero_grad()
                model(inputs[rows[worker_id]]).sum().backward()
                optimizer.step(weight=float(len(inputs[rows[worker_id]])))
            both_are_done.wait(timeout=30)
            model(inputs).sum().backward()
            optimizer.step(weight=0.0)
            weight: torch.Tensor = model.weight
            return weight.detach().clone()

    both_are_done = threading.Barrier(2)
    with Job(tmp_path, workers_min=2, mode=mode) as job:
        results = run_workers({"w0": work, "w1": work})
    for ours in results.values():
        assert ours.tolist() == [[-24.0, -30.0]]


def test_rows_of_a_sparse_embedding_are_added_up(tmp_path: Path) -> None:
    indexes = torch.tensor([0, 2, 2, 5, 0, 1, 2, 5])

    def steps(rows: slice, ps: Any = None) -> torch.Tensor:  # noqa: ANN401
        model = nn.Embedding(6, 3, sparse=True)
        nn.init.ones_(model.weight)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.25)
        if ps is not None:
            model, optimizer = ps.prepare(model, optimizer, loss="sum")
        for _ in range(3):
            optimizer.zero_grad()
            model(indexes[rows]).sum().backward()
            optimizer.step(**({} if ps is None else {"weight": 7.0}))
        return model.weight.detach().clone()

    def work(worker_id: str) -> torch.Tensor:
        with connect(job, worker_id) as ps:
            return steps(ROWS[worker_id], ps)

    with Job(tmp_path, workers_min=2) as job:
        results = run_workers({"w0": work, "w1": work})
    for ours in results.values():
        assert torch.equal(ours, steps(ALL))


def test_what_a_group_has_averaged_becomes_the_sum_of_its_processes(
    tmp_path: Path,
) -> None:
    class Averaged:
        """What `DistributedDataParallel` does, for processes that have the same."""

        def __init__(self, inner: Any) -> None:  # noqa: ANN401, `Steps`
            self._inner = inner

        def __getattr__(self, name: str) -> Any:  # noqa: ANN401
            return getattr(self._inner, name)

        def step(self, wanted: OptimizerStep) -> Any:  # noqa: ANN401
            return self._inner.step(replace(wanted, averaged_over=3))

    with Job(tmp_path) as job, connect(job, "w0") as ps:
        model = nn.Linear(2, 1, bias=False)
        nn.init.ones_(model.weight)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=1.0)
        model, optimizer = ps.prepare(model, optimizer, loss="sum", clip_grad_norm=99)
        optimizer.step_through(Averaged)
        model(torch.tensor([[2.0, 0.5]])).sum().backward()
        optimizer.step(weight=3.0)

        assert model.weight.tolist() == [[-5.0, -0.5]]
        assert ps.last_push is not None
        assert ps.last_push.grad_norm == pytest.approx((6.0**2 + 1.5**2) ** 0.5)


def test_another_word_than_the_jobs_is_refused_also_by_one_that_began_anew(
    tmp_path: Path,
) -> None:
    def prepare(ps: Any, **options: Any) -> Any:  # noqa: ANN401
        model = small_model()
        return ps.prepare(model, sgd(model), **options)

    with Job(tmp_path) as job, connect(job, "w0") as ps:
        prepare(ps, loss="sum")
        job.stop_coordinator()
        job.start_coordinator()
        with (
            connect(job, "w1") as other,
            pytest.raises(
                OptimizerMismatchError,
                match='the job has loss="sum", this worker has loss="mean"; give all',
            ),
        ):
            prepare(other)
        with connect(job, "w2") as third:
            prepare(third, loss="sum")


def test_another_optimizer_goes_on_with_the_word_of_the_first(tmp_path: Path) -> None:
    with Job(tmp_path) as job, connect(job, "w0") as ps:
        model = nn.Linear(2, 1, bias=False)
        nn.init.ones_(model.weight)
        model, first = ps.prepare(model, sgd(model), loss="sum")
        with pytest.raises(ConfigurationError, match='loss="sum"; leave it out'):
            ps.prepare(model, adam(model), loss="mean")
        again: Any = torch.optim.SGD(model.parameters(), lr=1.0)
        model, again = ps.prepare(model, again)
        again.add_param_group({"params": [], "lr": 0.5})
        model(torch.tensor([[2.0, 0.5]])).sum().backward()
        again.step(weight=8.0)
        assert model.weight.tolist() == [[-1.0, 0.5]]
        assert first is not again
