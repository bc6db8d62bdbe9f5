"""Models of 16 bits train as one process with float32 master values trains them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import nn

import psworker
from tests.integration.job import Job, connect, run_workers

SEED: Final = 31
STEP_COUNT: Final = 20
ROWS: Final = {"w0": slice(0, 12), "w1": slice(12, 16)}
"""Each worker's rows of every batch; their numbers are the weights."""

SCALE: Final = 2.0**12


class Mixed(nn.Module):
    """A body of 16 bits, a norm of float32 and a last layer of float64."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(SEED)
        self.body = nn.Linear(10, 24).to(dtype)
        self.norm = nn.LayerNorm(24)
        self.last = nn.Linear(24, 3).double()
        with torch.no_grad():
            for each in self.parameters():
                each.copy_(torch.randn(each.shape, generator=generator) / 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.body(inputs.to(self.body.weight.dtype)).float().tanh()
        outputs: torch.Tensor = self.last(self.norm(hidden).double())
        return outputs


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(SEED + step)
    inputs = torch.randn(16, 10, generator=generator)
    return inputs, torch.randint(0, 3, (16,), generator=generator)


def loss_of(model: nn.Module, step: int, rows: slice) -> torch.Tensor:
    inputs, labels = batch(step)
    return nn.functional.cross_entropy(model(inputs[rows]), labels[rows])


def optimizer_of(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=4e-3, weight_decay=0.05)


def in_one_process(dtype: torch.dtype, scale: float) -> nn.Module:
    """The loop that people write: masters beside the model, gradients cast to them."""
    model = Mixed(dtype)
    masters = [
        nn.Parameter(each.detach().float() if each.dtype is dtype else each.detach())
        for each in model.parameters()
    ]
    optimizer = optimizer_of(masters)
    for step in range(STEP_COUNT):
        for master in masters:
            master.grad = torch.zeros_like(master)
        for rows in ROWS.values():
            model.zero_grad()
            (loss_of(model, step, rows) * scale).backward()
            share = (rows.stop - rows.start) / 16 / scale
            for master, each in zip(masters, model.parameters(), strict=True):
                assert master.grad is not None
                assert each.grad is not None
                master.grad += each.grad.to(master.dtype) * share
        optimizer.step()
        with torch.no_grad():
            for master, each in zip(masters, model.parameters(), strict=True):
                each.copy_(master)
    return model


def on_workers(
    job: Job, dtype: torch.dtype, step: Callable[[Any, int], None]
) -> nn.Module:
    def work(worker_id: str) -> nn.Module:
        rows = ROWS[worker_id]
        model = Mixed(dtype)
        with connect(job, worker_id) as ps:
            _, optimizer = ps.prepare(model, optimizer_of([*model.parameters()]))
            for number in range(STEP_COUNT):
                optimizer.zero_grad()
                loss = loss_of(model, number, rows)
                (loss * SCALE if dtype is torch.float16 else loss).backward()
                step(optimizer, rows.stop - rows.start)
        return model

    models = run_workers(dict.fromkeys(ROWS, work))
    for mine, theirs in zip(
        models["w0"].parameters(), models["w1"].parameters(), strict=True
    ):
        assert torch.equal(mine, theirs)
    trained: nn.Module = models["w0"]
    return trained


def assert_same(ours: nn.Module, theirs: nn.Module) -> None:
    for (name, mine), exact in zip(
        ours.named_parameters(), theirs.parameters(), strict=True
    ):
        assert mine.dtype == exact.dtype, name
        difference = (mine.detach().double() - exact.detach().double()).abs().max()
        # One place of 16 bits, where a value lay halfway between two.
        unit = torch.finfo(exact.dtype).eps if mine.dtype.itemsize == 2 else 1e-5
        assert difference <= unit * exact.detach().abs().max(), f"{name}, seed {SEED}"
        if mine.dtype.itemsize == 2:
            same = float((mine == exact).double().mean())
            assert same >= 0.97, f"{same:.1%} of {name} are equal, seed {SEED}"


def test_bfloat16_equals_one_process_with_masters(tmp_path: Path) -> None:
    with Job(tmp_path, shard_count=2, workers_min=2) as job:
        model = on_workers(
            job, torch.bfloat16, lambda optimizer, weight: optimizer.step(weight=weight)
        )
        with psworker.SnapshotReader(job.address) as reader:
            snapshot = reader.latest(timeout=20)
    assert_same(model, in_one_process(torch.bfloat16, 1.0))

    loaded = Mixed(torch.bfloat16)
    loaded.load_state_dict(snapshot.state_dict(), strict=True)
    assert all(
        torch.equal(mine, theirs) and mine.dtype == theirs.dtype
        for mine, theirs in zip(loaded.parameters(), model.parameters(), strict=True)
    )


def test_float16_with_a_loss_scale_equals_one_process_with_masters(
    tmp_path: Path,
) -> None:
    def step(optimizer: torch.optim.Optimizer, weight: int) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
        # What it does before a backward pass: the script has scaled by itself.
        scaler.scale(torch.ones(()))
        scaler.step(optimizer, weight=weight)

    with Job(tmp_path, shard_count=2, workers_min=2) as job:
        model = on_workers(job, torch.float16, step)
    assert_same(model, in_one_process(torch.float16, SCALE))


def test_a_loss_scale_of_float16_is_divided_by_on_the_shards(tmp_path: Path) -> None:
    """As small as this a gradient is zero in float16, unless it carries the scale."""
    small = 2.0**-26
    with Job(tmp_path) as job, connect(job, "w0") as ps:
        model = nn.Linear(1, 1, bias=False).half()
        nn.init.ones_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=2.0**20)
        model, optimizer = ps.prepare(model, optimizer)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
        loss = scaler.scale((model.weight * 1).sum())
        loss.backward()
        model.weight.grad.fill_(small * 2.0**16)
        scaler.step(optimizer)
        assert ps.last_push is not None
        assert not ps.last_push.skipped
    assert model.weight.tolist() == [[1 - 2.0**-6]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_shard_tells_what_masters_take(dtype: torch.dtype, tmp_path: Path) -> None:
    with Job(tmp_path, shard_count=1) as job, connect(job, "w0") as ps:
        model = nn.Linear(8, 8, bias=False).to(dtype)
        ps.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
        engine = job.shards[0].model.engine
        held = job.ask(lambda: (engine.vectors.byte_count, engine.state_byte_count))
    assert held == ((128, 256) if dtype is torch.bfloat16 else (256, 0))


def test_an_unfrozen_parameter_of_16_bits_gets_master_values(tmp_path: Path) -> None:
    with Job(tmp_path, shard_count=1) as job, connect(job, "w0") as ps:
        model = nn.Linear(1, 1).bfloat16()
        with torch.no_grad():
            model.weight.fill_(256)
            model.bias.fill_(256)
        sgd = torch.optim.SGD([model.weight], lr=1.0)
        model, optimizer = ps.prepare(model, sgd)
        quarter = torch.tensor(0.25).bfloat16()

        def step() -> None:
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, quarter.item())
            optimizer.step()

        step()
        optimizer.add_param_group({"params": [model.bias]})
        for _ in range(4):
            step()
    # 0.25 is less than a place of bfloat16 at 256: it takes a master to add up.
    assert model.weight.item() == 256 - 1.0  # 1.25, to the even one
    assert model.bias.item() == 256 - 1.0
