"""The examples of the integrations, alone and as two workers of a job.

In processes of their own: their frameworks take seconds to import, and warn as they
do. Two workers with batches of 32 in order make the steps of one with 64.
"""

import re
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from safetensors.torch import load_file

from psserver.edge.checkpoint_interval import CheckpointInterval
from tests.integration.job import Job, deviation
from tests.integration.processes import Processes

ROOT: Final = Path(__file__).resolve().parents[2]
EXAMPLES: Final = ROOT / "examples"
DEVIATION_MAX: Final = {"lightning": 5e-6, "transformers": 2e-4}
"""Relative to the largest value of a tensor, after some 100 steps. Adam divides a
gradient by its own size, so that rounding shows more."""


IMPORT_TIMEOUT_S: Final = 90.0
"""The frameworks take 5 s to import, and several times that on a busy machine."""


def needs(module: str, extra: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(
        find_spec(module) is None,
        reason=f"{module} is not installed: pip install 'paramserver[{extra}]'",
    )


def run_alone(script: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / script), *arguments],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "this process trains alone" in done.stderr
    return done.stdout.splitlines()[-1]


def run_two_workers(folder: Path, script: str, *arguments: str) -> list[str]:
    """The last lines of both."""
    with (
        Job(folder / "job", shard_count=2, workers_min=2, sockets=True) as job,
        Processes(folder) as processes,
    ):
        for index in range(2):
            processes.start(
                f"w{index}",
                *(str(EXAMPLES / script), *arguments),
                *("--out", str(folder / f"w{index}")),
                PS_COORDINATOR=job.address,
                PS_WORKER_ID=f"w{index}",
            )
        for index in range(2):
            assert processes.code(f"w{index}", timeout_s=100) == 0
        return [processes.last_line(f"w{index}") for index in range(2)]


@needs("lightning", "lightning")
def test_lightning_trains_as_two_workers_as_it_does_alone(tmp_path: Path) -> None:
    options = ("--in-order", "--epochs", "4")
    alone = run_alone(
        "lightning_digits.py", *options, "--batch-size", "64", "--out", str(tmp_path)
    )
    lines = run_two_workers(tmp_path, "lightning_digits.py", *options)
    assert lines == [alone, alone], "as many steps, and as good"
    assert re.fullmatch(r"96 steps, test accuracy 0\.9\d+", alone)
    ours, theirs = (
        torch.load(folder / "digits.ckpt", weights_only=False)
        for folder in (tmp_path / "w0", tmp_path)
    )
    assert not (tmp_path / "w1").exists(), "the worker of rank 0 alone writes"
    assert (
        difference(ours["state_dict"], theirs["state_dict"])
        <= DEVIATION_MAX["lightning"]
    )
    (state,) = ours["optimizer_states"]
    assert state["param_groups"][0]["lr"] == pytest.approx(0.1)


@needs("transformers", "transformers")
def test_transformers_train_as_two_workers_as_they_do_alone(tmp_path: Path) -> None:
    options = ("--in-order", "--epochs", "10")
    alone = run_alone(
        "transformers_majority.py",
        *(*options, "--batch-size", "64", "--out", str(tmp_path)),
    )
    lines = run_two_workers(tmp_path, "transformers_majority.py", *options)
    assert lines == [alone, alone], "as many steps, and as good"
    assert re.fullmatch(r"80 steps, accuracy 1.000", alone)
    ours, theirs = (
        load_file(found / "model.safetensors") for found in (tmp_path / "w0", tmp_path)
    )
    assert difference(ours, theirs) <= DEVIATION_MAX["transformers"]
    assert not (tmp_path / "w1" / "model.safetensors").exists()


@needs("lightning", "lightning")
def test_lightning_accumulates_and_refuses_what_a_worker_can_not_do(
    tmp_path: Path,
) -> None:
    with Job(tmp_path / "job", sockets=True) as job, Processes(tmp_path) as processes:
        start(processes, "w", job, "lightning_worker", "rest")
        assert processes.line("w", IMPORT_TIMEOUT_S) == (
            "refused: there is a connection once fit() was called"
        )
        early = processes.line("w", IMPORT_TIMEOUT_S)
        assert "as trainer.estimated_stepping_batches in configure_opt" in early
        assert processes.line("w", IMPORT_TIMEOUT_S) == "Regression 6 6 True"
        assert "give PSStrategy(sample_count=lambda batch: ...)" in processes.line(
            "w", IMPORT_TIMEOUT_S
        )
        assert processes.code("w") == 0


@needs("lightning", "lightning")
def test_lightning_steps_by_hand_with_several_optimizers(tmp_path: Path) -> None:
    with Job(tmp_path / "job", sockets=True) as job, Processes(tmp_path) as processes:
        start(processes, "w", job, "lightning_worker", "manual")
        assert processes.line("w", IMPORT_TIMEOUT_S) == "Manual 24 24 True"
        assert processes.code("w") == 0


@needs("transformers", "transformers")
def test_transformers_refuse_what_a_worker_can_not_do(tmp_path: Path) -> None:
    with (
        Job(tmp_path / "job", workers_min=2, sockets=True) as job,
        Processes(tmp_path) as processes,
    ):
        for index in range(2):
            start(
                processes,
                f"w{index}",
                job,
                "transformers_worker",
                "refuse",
                str(tmp_path / "out"),
            )
        for index in range(2):
            fp16, devices, data = (
                processes.line(f"w{index}", IMPORT_TIMEOUT_S) for _ in range(3)
            )
            assert "fp16=True scales the loss" in fp16
            assert fp16.endswith("use bf16=True")
            assert "start one for each with `psworker run --nproc N`" in devices
            assert data == (
                "refused: the training data can't be split between the workers with "
                "train_sampling_strategy='group_by_length': it must be 'random' or "
                "'sequential'"
            )


@needs("lightning", "lightning")
def test_lightning_trains_in_bf16(tmp_path: Path) -> None:
    with Job(tmp_path / "job", sockets=True) as job, Processes(tmp_path) as processes:
        start(processes, "w", job, "lightning_worker", "bf16")
        assert processes.line("w", IMPORT_TIMEOUT_S).startswith("bf16 True")
        assert processes.code("w") == 0


@needs("transformers", "transformers")
def test_transformers_train_in_bf16_and_log_the_clock(tmp_path: Path) -> None:
    with Job(tmp_path / "job", sockets=True) as job, Processes(tmp_path) as processes:
        start(processes, "w", job, "transformers_worker", "log", str(tmp_path / "out"))
        while not (line := processes.line("w", IMPORT_TIMEOUT_S)).startswith("bf16"):
            assert line.startswith("{"), "a log of the trainer"
        assert line.startswith("bf16 True"), line
        assert (
            processes.line("w") == "logs [[1, 1, 0], [2, 2, 0], [3, 3, 0], [4, 4, 0]]"
        )
        assert processes.code("w") == 0


@needs("transformers", "transformers")
def test_a_step_of_transformers_weighs_its_tokens_until_the_job_is_over(
    tmp_path: Path,
) -> None:
    with Job(tmp_path / "job", sockets=True) as job, Processes(tmp_path) as processes:
        folder = str(tmp_path / "out")
        start(processes, "w", job, "transformers_worker", "tokens", folder)
        while not (line := processes.line("w", IMPORT_TIMEOUT_S)).startswith("weig"):
            assert line.startswith("{"), "a log of the trainer"
        assert re.fullmatch(r"weights True \[\d+\.0, \d+\.0, \d+\.0\]", line), line
        assert "[4.0, 4.0, 4.0]" not in line, "which is how many samples a step has"
        while not (line := processes.line("w", IMPORT_TIMEOUT_S)).startswith("stop"):
            assert line.startswith("{"), "a log of the trainer"
        assert line == "stopped 5 4"
        assert processes.code("w") == 0
        assert "training stops: the job is over" in processes.log("w")


@pytest.mark.parametrize("library", ["lightning", "transformers"])
def test_a_trainer_goes_on_where_the_job_does_after_all_were_killed(
    tmp_path: Path, library: str
) -> None:
    pytest.importorskip(library, reason=f"pip install 'paramserver[{library}]'")
    url, saved = str(tmp_path / "checkpoints"), str(tmp_path / "saved")
    settings: dict[str, Any] = {
        "sockets": True,
        "checkpoint_url": url,
        "checkpoint_interval": CheckpointInterval(step_count=5),
    }
    script = f"{library}_worker"
    with Processes(tmp_path) as processes:
        with Job(tmp_path / "first", **settings) as job:
            start(processes, "first", job, script, "killed", url, saved)
            assert processes.code("first", IMPORT_TIMEOUT_S) == -signal.SIGKILL
        with Job(tmp_path / "second", **settings) as job:
            start(processes, "second", job, script, "goes on", saved)
            assert processes.code("second", IMPORT_TIMEOUT_S) == 0
        lines = [
            each
            for each in processes.rest("second")
            if each.startswith(("went on", "ended"))
        ]
        assert "is not used: the job goes on from its own" in processes.log("second")
    expected = {
        "lightning": ["went on True True", "ended 18 3 18"],
        "transformers": ["went on 18 18", "ended 18 True"],
    }
    assert lines == expected[library]


@pytest.mark.parametrize("library", ["lightning", "transformers"])
def test_what_a_trainer_saves_goes_on_with_a_job_and_without(
    tmp_path: Path, library: str
) -> None:
    pytest.importorskip(library, reason=f"pip install 'paramserver[{library}]'")
    with Job(tmp_path / "job", sockets=True) as job, Processes(tmp_path) as processes:
        folder = tmp_path / "saved"
        start(processes, "w", job, f"{library}_worker", "exchange", str(folder))
        assert processes.code("w", IMPORT_TIMEOUT_S) == 0
        lines = [
            each
            for each in processes.rest("w")
            if each.startswith(("from plain", "to plain"))
        ]
    expected = {
        "lightning": ["from plain 6 11 True", "to plain 12 17 True"],
        "transformers": ["from plain 6 True", "to plain 18 True"],
    }
    assert lines == expected[library]


def start(processes: Processes, name: str, job: Job, script: str, *given: str) -> None:
    """Starts a script of this folder as a worker."""
    processes.start(
        name,
        *("-m", f"tests.integration.{script}", *given),
        PS_COORDINATOR=job.address,
        PYTHONPATH=f"{ROOT}:{ROOT / 'protos'}",
    )


def difference(ours: dict[str, Any], theirs: dict[str, Any]) -> float:
    assert ours.keys() == theirs.keys()
    # Softmax does not see a key's bias: its gradient is rounding alone, which Adam
    # blows up to steps of the full size.
    names = [name for name in ours if not name.endswith("key.bias")]
    measured = deviation(
        [ours[each] for each in names], [theirs[each] for each in names]
    )
    print(f"deviation {measured:.2e}")
    return measured


@needs("tensorboard", "tensorboard")
def test_tensorboard_has_a_point_of_each_figure_for_each_step(
    tmp_path: Path,
) -> None:
    program = """
import sys, torch
from torch import nn
import psworker
from psworker.integrations.tensorboard import StepWriter
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

model = nn.Linear(2, 1)
with psworker.connect() as ps:
    _, optimizer = ps.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with StepWriter(ps, sys.argv[1]) as writer:
        writer.watch(optimizer)
        for step in range(3):
            loss = model(torch.ones(4, 2)).sum()
            loss.backward()
            writer.note_loss(loss)
            optimizer.step()
seen = EventAccumulator(sys.argv[1])
seen.Reload()
for name in sorted(seen.Tags()["scalars"]):
    points = seen.Scalars(name)
    print(name, [point.step for point in points], all(p.value > 0 for p in points))
print(seen.Scalars("paramserver/loss")[2].value == loss.item())
"""
    with Job(tmp_path / "job", sockets=True) as job, Processes(tmp_path) as processes:
        processes.start(
            "w0", "-c", program, str(tmp_path / "runs"), PS_COORDINATOR=job.address
        )
        assert processes.code("w0", timeout_s=100) == 0
        lines = [processes.line("w0") for _ in range(8)]
    steps, later = [1, 2, 3], [2, 3]
    assert lines[0] == f"paramserver/clock {steps} True"
    assert lines[1].startswith(f"paramserver/loss {steps}")
    assert lines[2] == f"paramserver/received_bytes {steps} True"
    assert lines[3] == f"paramserver/sent_bytes {steps} True"
    assert lines[4] == f"paramserver/staleness {steps} False"
    assert lines[5] == f"paramserver/step_seconds {later} True"
    assert lines[6] == f"paramserver/version {steps} True"
    assert lines[7] == "True"
