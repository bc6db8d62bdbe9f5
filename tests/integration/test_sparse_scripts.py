"""What real scripts do around a sparse embedding, in one process and on a job."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import nn

from pswire.membership import Mode, WorkerState
from psworker.errors import UnsupportedError
from psworker.optim.optimizer import PreparedOptimizer
from tests.doubles.chunk_sizes import cut_into
from tests.integration.job import Job, connect, deviation, run_workers
from tests.integration.one_process import (
    SEED,
    Prepare,
    as_given,
    check_same,
    on_job,
)

ROW_COUNT: Final = 30
STEP_COUNT: Final = 6

small_chunks = cut_into(64, 256)
"""Cuts tables of a few hundred elements into chunks, on both sides alike."""


class Model(nn.Module):
    def __init__(self, *, sparse: bool = True) -> None:
        super().__init__()
        self.table = nn.Embedding(ROW_COUNT, 5, sparse=sparse)
        self.layer = nn.Linear(5, 2)
        generator = torch.Generator().manual_seed(SEED)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(torch.tanh(self.table(ids)))
        return out


def ids_of(step: int, rank: int = 0) -> torch.Tensor:
    """Eight rows that meet those of other workers."""
    generator = torch.Generator().manual_seed(SEED + 10 * step + rank)
    return torch.randint(ROW_COUNT, (8,), generator=generator)


def loss_of(model: Model, step: int, rank: int = 0) -> torch.Tensor:
    loss: torch.Tensor = model(ids_of(step, rank)).square().mean()
    return loss


def prepared(
    prepare: Callable[..., Any], model: Model, **options: bool
) -> tuple[Model, torch.optim.Optimizer, torch.optim.Optimizer]:
    sparse = torch.optim.SparseAdam(model.table.parameters(), lr=0.05)
    dense = torch.optim.AdamW(model.layer.parameters(), lr=0.05)
    model, sparse, dense = prepare(model, sparse, dense, **options)
    return model, sparse, dense


def with_two_optimizers(prepare: Prepare) -> list[torch.Tensor]:
    model, sparse, dense = prepared(prepare, Model())
    for step in range(STEP_COUNT):
        for optimizer in (sparse, dense):
            optimizer.zero_grad()
        loss_of(model, step).backward()
        sparse.step()
        dense.step()
    return list(model.parameters())


def accumulating(prepare: Prepare) -> list[torch.Tensor]:
    """Several backward passes for a step; gradients that `zero_grad` sets to zero."""
    model = Model()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    model, optimizer = prepare(model, optimizer)
    for step in range(STEP_COUNT):
        for part in range(3):
            (loss_of(model, step, part) / 3).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
    return list(model.parameters())


def scheduled(prepare: Prepare) -> list[torch.Tensor]:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    model, optimizer, schedule = prepare(model, optimizer, schedule)
    for step in range(STEP_COUNT):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
        schedule.step()
    return list(model.parameters())


def scaled(prepare: Prepare) -> list[torch.Tensor]:
    """`GradScaler`, with one gradient that is infinite in a single row."""
    model = Model()
    optimizer: torch.optim.Optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    model, optimizer = prepare(model, optimizer)
    for step in range(STEP_COUNT):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, step)).backward()
        if step == 2:
            assert model.table.weight.grad is not None
            model.table.weight.grad._values()[1, 2] = torch.inf
        if step == 4:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    return list(model.parameters())


def exchanged(prepare: Prepare) -> list[torch.Tensor]:
    """SGD on the table alone, and then SparseAdam in its place."""
    model: Any = Model()
    table = model.table.parameters
    model, optimizer = prepare(model, torch.optim.SGD(table(), lr=0.2))
    for step in range(STEP_COUNT):
        if step == 3:
            adam = torch.optim.SparseAdam(table(), lr=0.1)
            model, optimizer = prepare(model, adam)
        model.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
    return list(model.parameters())


@pytest.mark.parametrize(
    "script", [with_two_optimizers, accumulating, scheduled, scaled, exchanged]
)
def test_a_script_has_the_numbers_of_one_process(
    script: Callable[[Prepare], list[torch.Tensor]], tmp_path: Path
) -> None:
    check_same(script, tmp_path)


def test_state_comes_and_goes_as_torch_writes_it(tmp_path: Path) -> None:
    def train(
        prepare: Prepare, begin: dict[str, Any] | None = None
    ) -> tuple[list[torch.Tensor], dict[str, Any]]:
        model, sparse, dense = prepared(prepare, Model())
        if begin is not None:
            sparse.load_state_dict(begin)
        for step in range(3):
            sparse.zero_grad()
            dense.zero_grad()
            loss_of(model, step).backward()
            sparse.step()
            dense.step()
        values = [each.detach().clone() for each in model.parameters()]
        return values, sparse.state_dict()

    def job_of(name: str, begin: dict[str, Any] | None = None) -> Any:  # noqa: ANN401
        with Job(tmp_path / name) as job, connect(job, "w0") as ps:
            return train(ps.prepare, begin)

    _, plain = train(as_given)
    _, ours = job_of("a")

    (plain_state,) = plain["state"].values()
    (our_state,) = ours["state"].values()
    assert type(our_state["step"]) is type(plain_state["step"]) is int
    assert our_state["step"] == 3
    for name in ("exp_avg", "exp_avg_sq"):
        torch.testing.assert_close(our_state[name], plain_state[name])
    onward, after = job_of("b", plain)
    expected, _ = train(as_given, ours)
    assert deviation(onward, expected) <= 1e-6
    (our_state,) = after["state"].values()
    assert our_state["step"] == 6


def test_overlap_changes_no_bit(tmp_path: Path) -> None:
    def script(prepare: Callable[..., Any], *, overlap: bool) -> list[torch.Tensor]:
        model, sparse, dense = prepared(prepare, Model(), overlap=overlap)
        for step in range(STEP_COUNT):
            model.zero_grad()
            loss_of(model, step).backward()
            sparse.step()
            dense.step()
        return list(model.parameters())

    apart = on_job(lambda prepare: script(prepare, overlap=False), tmp_path / "a")
    ahead = on_job(lambda prepare: script(prepare, overlap=True), tmp_path / "b")

    assert all(map(torch.equal, apart, ahead))


def test_a_worker_of_weight_0_touches_no_row(tmp_path: Path) -> None:
    def work(worker_id: str) -> list[torch.Tensor]:
        with connect(job, worker_id) as ps:
            model, sparse, dense = prepared(ps.prepare, Model())
            for step in range(STEP_COUNT):
                model.zero_grad()
                loss_of(model, step, int(worker_id[1:])).backward()
                for optimizer in (sparse, dense):
                    assert isinstance(optimizer, PreparedOptimizer)
                    optimizer.step(weight=8 if worker_id == "w0" else 0)
            return [each.detach().clone() for each in model.parameters()]

    with Job(tmp_path, workers_min=2) as job:
        results = run_workers(dict.fromkeys(("w0", "w1"), work))

    assert all(map(torch.equal, results["w0"], results["w1"]))
    plain = [each.detach() for each in with_two_optimizers(as_given)]
    assert deviation(results["w0"], plain) <= 1e-6


def test_the_orders_of_joining_and_arrival_leave_no_trace(tmp_path: Path) -> None:
    def train(folder: Path, joining: list[str]) -> list[torch.Tensor]:
        def work(worker_id: str) -> list[torch.Tensor]:
            place = joining.index(worker_id)
            job.wait_workers(place, WorkerState.JOINING, WorkerState.MEMBER)
            with connect(job, worker_id) as ps:
                model, sparse, dense = prepared(ps.prepare, Model())
                clock = 0
                for step in range(STEP_COUNT):
                    model.zero_grad()
                    loss_of(model, step, int(worker_id[1:])).backward()
                    for optimizer in (sparse, dense):
                        clock += 1
                        if place:
                            job.wait_pushed(joining[place - 1], clock)
                        optimizer.step()
            return [each.detach().clone() for each in model.parameters()]

        with Job(folder, workers_min=3) as job:
            return run_workers(dict.fromkeys(joining, work))["w0"]

    first = train(tmp_path / "a", ["w0", "w1", "w2"])
    second = train(tmp_path / "b", ["w2", "w0", "w1"])

    assert all(map(torch.equal, first, second))


@pytest.mark.parametrize("compensation", [0.0, 0.5])
def test_a_lone_worker_without_a_bound_is_one_process(
    compensation: float, tmp_path: Path
) -> None:
    plain = [each.detach().clone() for each in with_two_optimizers(as_given)]
    found = on_job(
        with_two_optimizers,
        tmp_path,
        mode=Mode.ASP,
        delay_compensation=compensation,
    )
    assert deviation(found, plain) <= 1e-6


def test_a_refused_gradient_is_not_sent_and_the_next_step_goes_on(
    tmp_path: Path,
) -> None:
    with Job(tmp_path) as job, connect(job, "w0") as ps:
        model = Model(sparse=False)
        optimizer = torch.optim.Adam(model.parameters())
        model, optimizer = ps.prepare(model, optimizer)
        rows = nn.functional.embedding(ids_of(0), model.table.weight, sparse=True)
        rows.sum().backward()
        before = job.values_digest()

        with pytest.raises(UnsupportedError, match="Adam does not take sparse"):
            optimizer.step()

        assert job.values_digest() == before
        assert ps.clock == 0
        optimizer.zero_grad()
        loss_of(model, 0).backward()
        optimizer.step()
        assert ps.clock == 1
        assert job.values_digest() != before


def test_a_module_that_its_optimizer_can_not_take_is_refused_at_prepare(
    tmp_path: Path,
) -> None:
    with Job(tmp_path) as job, connect(job, "w0") as ps:
        model = Model()
        with pytest.raises(
            UnsupportedError, match=r"table of model has sparse=True.*Adam"
        ):
            ps.prepare(model, torch.optim.Adam(model.parameters()))
        with_two_optimizers(ps.prepare)
