"""Training goes on from a job in a plain script, and from one in a job."""

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict import (
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as load_distributed
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed
from torch.optim import lr_scheduler
from typer.testing import CliRunner

from psctl.__main__ import app
from psserver.edge.checkpoint_interval import CheckpointInterval
from tests.integration.job import Job, connect

STEP_COUNT = 6
NEVER = CheckpointInterval(duration_ms=3_600_000)

pytestmark = pytest.mark.filterwarnings(
    # Of torch, that a distributed checkpoint is written or read by one process.
    "ignore:torch.distributed is:UserWarning",
)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    first, *rest = model.parameters()
    groups = [{"params": rest, "lr": 0.02}, {"params": [first], "weight_decay": 0.01}]
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9)


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": sgd,
    "adam": lambda model: torch.optim.Adam(model.parameters(), lr=0.01),
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, amsgrad=True),
    "nadam": lambda model: torch.optim.NAdam(model.parameters(), lr=0.01),
    "adagrad": lambda model: torch.optim.Adagrad(model.parameters(), lr=0.01),
}
ROUNDED = ("adam", "adamw", "adagrad")
"""Shards update these by torch's fused kernels, which round in other places."""


class Training(NamedTuple):
    """What a script makes at its start."""

    model: Any
    optimizer: Any
    scheduler: Any

    @classmethod
    def made(cls, name: str, seed: int = 0) -> "Training":
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(8, 700), nn.BatchNorm1d(700), nn.Linear(700, 2))
        optimizer = OPTIMIZERS[name](model)
        return cls(model, optimizer, lr_scheduler.StepLR(optimizer, 2, 0.5))

    def losses(self, first: int, count: int = STEP_COUNT) -> list[float]:
        """Makes steps, whose batches follow from their numbers."""
        found = []
        for step in range(first, first + count):
            inputs = torch.randn(16, 8, generator=torch.Generator().manual_seed(step))
            loss = self.model(inputs).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            found.append(loss.item())
        return found


def job_of(tmp_path: Path, state: str = "state") -> Job:
    url = str(tmp_path / "checkpoints")
    return Job(tmp_path / state, checkpoint_url=url, checkpoint_interval=NEVER)


def assert_same(name: str, losses: list[float], expected: list[float]) -> None:
    """To the bit, but where torch itself has two ways to compute an update."""
    tolerance = 1e-5 if name in ROUNDED else 0.0
    assert losses == pytest.approx(expected, rel=tolerance, abs=0.0)


# From a job


def trained(tmp_path: Path, name: str) -> list[float]:
    """Trains in a job, which saves a checkpoint halfway; the losses after it."""
    with job_of(tmp_path) as job, connect(job, "a") as ps:
        training = Training(*ps.prepare(*Training.made(name)))
        training.losses(0)
        job.run(job.coordinator.checkpoints.save(30))
        return training.losses(STEP_COUNT)


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


def resumed(saved: dict[str, Any], name: str) -> list[float]:
    """Goes on without a job: nothing but torch."""
    training = Training.made(name, seed=7)
    model, optimizer, scheduler = training
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
    return training.losses(STEP_COUNT)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_plain_script_goes_on_with_the_losses_of_a_job(
    tmp_path: Path, name: str
) -> None:
    in_job = trained(tmp_path, name)
    out = tmp_path / "checkpoint.pt"
    export(tmp_path, "state_dict", out)

    saved = torch.load(out, weights_only=True)

    assert saved["version"] == 6
    assert_same(name, resumed(saved, name), in_job)


def test_torch_reads_it_as_a_distributed_checkpoint(tmp_path: Path) -> None:
    in_job = trained(tmp_path, "nadam")
    export(tmp_path, "dcp", tmp_path / "dcp")

    dcp_to_torch_save(tmp_path / "dcp", tmp_path / "plain.pt")
    saved = torch.load(tmp_path / "plain.pt", weights_only=False)

    assert_same("nadam", resumed(saved, "nadam"), in_job)


# From a plain script


def save_state_dict(folder: Path, training: Training) -> None:
    model, optimizer, _ = training
    torch.save([model.state_dict(), optimizer.state_dict()], folder / "plain.pt")


def load_state_dict(folder: Path, training: Training) -> None:
    values, state = torch.load(folder / "plain.pt", weights_only=True)
    training.model.load_state_dict(values)
    training.optimizer.load_state_dict(state)


def save_huggingface(folder: Path, training: Training) -> None:
    values = training.model.state_dict()
    weights = {
        name: f"model-{number % 2 + 1:05d}-of-00002.safetensors"
        for number, name in enumerate(values)
    }
    for file in set(weights.values()):
        own = {name: values[name] for name in values if weights[name] == file}
        save_file(own, folder / file, {"format": "pt"})
    size = sum(tensor.nbytes for tensor in values.values())
    index = {"metadata": {"total_size": size}, "weight_map": weights}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    torch.save(training.optimizer.state_dict(), folder / "optimizer.pt")


def load_huggingface(folder: Path, training: Training) -> None:
    reader = HuggingFaceStorageReader(str(folder))
    load_distributed(training.model.state_dict(), storage_reader=reader)
    state = torch.load(folder / "optimizer.pt", weights_only=True)
    training.optimizer.load_state_dict(state)


def save_dcp(folder: Path, training: Training) -> None:
    values, state = get_state_dict(training.model, training.optimizer)
    save_distributed(
        {"model": values, "optimizer": state}, checkpoint_id=folder / "dcp"
    )


def load_dcp(folder: Path, training: Training) -> None:
    model, optimizer, _ = training
    values, state = get_state_dict(model, optimizer)
    saved: dict[str, Any] = {"model": values, "optimizer": state}
    load_distributed(saved, checkpoint_id=folder / "dcp")
    set_state_dict(
        model, optimizer, model_state_dict=values, optim_state_dict=saved["optimizer"]
    )


FORMS = {
    "state_dict": (save_state_dict, load_state_dict),
    "huggingface": (save_huggingface, load_huggingface),
    "dcp": (save_dcp, load_dcp),
}


def trained_plainly(tmp_path: Path, name: str, form: str, count: int) -> list[float]:
    """Trains without a job and saves halfway; the losses after it."""
    training = Training.made(name)
    training.losses(0)
    save, _ = FORMS[form]
    save(tmp_path, training)
    torch.save(training.scheduler.state_dict(), tmp_path / "scheduler.pt")
    return training.losses(STEP_COUNT, count)


def loaded(tmp_path: Path, name: str, form: str) -> Training:
    training = Training.made(name, seed=7)
    _, load = FORMS[form]
    load(tmp_path, training)
    training.scheduler.load_state_dict(torch.load(tmp_path / "scheduler.pt"))
    return training


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("sgd", "state_dict"),
        ("sgd", "dcp"),
        ("adam", "state_dict"),
        ("adamw", "huggingface"),
        ("nadam", "huggingface"),
        ("adagrad", "dcp"),
    ],
)
def test_a_job_goes_on_with_the_losses_of_a_plain_script(
    tmp_path: Path, name: str, form: str
) -> None:
    expected = trained_plainly(tmp_path, name, form, STEP_COUNT)

    with job_of(tmp_path) as job, connect(job, "a") as ps:
        training = Training(*ps.prepare(*loaded(tmp_path, name, form)))
        losses = training.losses(STEP_COUNT)

    assert_same(name, losses, expected)


def test_it_goes_on_from_a_checkpoint_of_the_job_and_not_from_the_file(
    tmp_path: Path,
) -> None:
    expected = trained_plainly(tmp_path, "nadam", "state_dict", 2 * STEP_COUNT)
    losses = []
    for first, state in ((0, "first"), (STEP_COUNT, "second")):
        with job_of(tmp_path, state) as job, connect(job, "a") as ps:
            training = Training(*ps.prepare(*loaded(tmp_path, "nadam", "state_dict")))
            assert ps.clock == first
            losses += training.losses(STEP_COUNT + first)
            job.run(job.coordinator.checkpoints.save(30))

    assert_same("nadam", losses, expected)
