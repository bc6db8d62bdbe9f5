"""A model trained in a job goes on in a plain script, as if nothing had happened."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict
from torch.optim import lr_scheduler
from typer.testing import CliRunner

from psctl.__main__ import app
from psserver.edge.checkpoint_interval import CheckpointInterval
from tests.integration.job import Job, connect

STEP_COUNT = 6
NEVER = CheckpointInterval(duration_ms=3_600_000)


def made_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 700), nn.BatchNorm1d(700), nn.Linear(700, 2))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    first, *rest = model.parameters()
    groups = [{"params": rest, "lr": 0.02}, {"params": [first], "weight_decay": 0.01}]
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9)


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": sgd,
    "adam": lambda model: torch.optim.Adam(model.parameters(), lr=0.01),
    "nadam": lambda model: torch.optim.NAdam(model.parameters(), lr=0.01),
    "adagrad": lambda model: torch.optim.Adagrad(model.parameters(), lr=0.01),
}


def losses_of(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: lr_scheduler.LRScheduler,
    first: int,
) -> list[float]:
    found = []
    for step in range(first, first + STEP_COUNT):
        inputs = torch.randn(16, 8, generator=torch.Generator().manual_seed(step))
        loss = model(inputs).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        found.append(loss.item())
    return found


def trained(
    tmp_path: Path, make: Callable[[nn.Module], torch.optim.Optimizer]
) -> list[float]:
    """Trains in a job, which saves a checkpoint halfway; the losses after it."""
    url = str(tmp_path / "checkpoints")
    with (
        Job(tmp_path / "state", checkpoint_url=url, checkpoint_interval=NEVER) as job,
        connect(job, "a") as ps,
    ):
        model = made_model()
        optimizer = make(model)
        scheduler: lr_scheduler.LRScheduler = lr_scheduler.StepLR(optimizer, 2, 0.5)
        model, optimizer, scheduler = ps.prepare(model, optimizer, scheduler)
        losses_of(model, optimizer, scheduler, 0)
        job.run(job.coordinator.checkpoints.save(30))
        return losses_of(model, optimizer, scheduler, STEP_COUNT)


def export(tmp_path: Path, to: str, out: Path) -> None:
    ended = CliRunner().invoke(
        app,
        ["checkpoint", "export", "--to", to, "--out", str(out), "--checkpoint-dir",
         str(tmp_path / "checkpoints"), "step-000000000006"],
    )  # fmt: skip
    assert ended.exception is None, ended.exception
    assert "version 6 (clock 6) of checkpoint step-000000000006 is in" in ended.output


def load_optimizer(
    model: nn.Module, optimizer: torch.optim.Optimizer, saved: dict[str, Any]
) -> None:
    """As torch has it: by number in a state dict, by name in a distributed one."""
    if all(isinstance(number, int) for number in saved["state"]):
        optimizer.load_state_dict(saved)
    else:
        set_optimizer_state_dict(model, optimizer, saved)


def resumed(
    saved: dict[str, Any], make: Callable[[nn.Module], torch.optim.Optimizer]
) -> list[float]:
    """Goes on without a job: nothing but torch."""
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(8, 700), nn.BatchNorm1d(700), nn.Linear(700, 2))
    optimizer = make(model)
    scheduler = lr_scheduler.StepLR(optimizer, 2, 0.5)
    model.load_state_dict(saved["models"]["model"], strict=True)
    (steps,) = saved["scheduler_steps"]["optimizer"]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Detected call of", UserWarning)
        for _ in range(steps):
            scheduler.step()
    rates = [group["lr"] for group in optimizer.param_groups]
    load_optimizer(model, optimizer, saved["optimizers"]["optimizer"])
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    return losses_of(model, optimizer, scheduler, STEP_COUNT)


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_plain_script_goes_on_with_the_same_losses(
    tmp_path: Path, make: Callable[[nn.Module], torch.optim.Optimizer]
) -> None:
    in_job = trained(tmp_path, make)
    out = tmp_path / "checkpoint.pt"
    export(tmp_path, "state_dict", out)

    saved = torch.load(out, weights_only=True)

    assert saved["version"] == 6
    assert resumed(saved, make) == pytest.approx(in_job, rel=1e-5)


def test_torch_reads_it_as_a_distributed_checkpoint(tmp_path: Path) -> None:
    in_job = trained(tmp_path, OPTIMIZERS["adam"])
    export(tmp_path, "dcp", tmp_path / "dcp")

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, that there is one process
        dcp_to_torch_save(tmp_path / "dcp", tmp_path / "plain.pt")
    saved = torch.load(tmp_path / "plain.pt", weights_only=False)

    assert resumed(saved, OPTIMIZERS["adam"]) == pytest.approx(in_job, rel=1e-5)
