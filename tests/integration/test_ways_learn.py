"""Strategies learn what training in step does, on real data."""

import importlib.util
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
from torch import nn

import psworker
from psctl.demo.tasks import Task, load_task
from tests.integration.job import Job, connect, run_workers

WORKER_COUNT: Final = 4
POINT: Final = 0.01


def accuracy(
    task: Task,
    folder: Path,
    make: Callable[[], psworker.Strategy] | None,
    *,
    rate_factor: float = 1.0,
) -> float:
    """Of what the job has after the task's epochs, shared by four workers."""
    building = threading.Lock()  # the seed of first values is of the process

    def work(worker_id: str) -> None:
        with building:
            model = task.new_model()
        optimizer = task.new_optimizer(model)
        optimizer.param_groups[0]["lr"] *= rate_factor
        criterion = nn.CrossEntropyLoss()
        with connect(job, worker_id, step_timeout_s=60.0) as ps:
            strategy = None if make is None else make()
            objects = (model, optimizer, task.new_loader())
            prepared = (
                ps.prepare(*objects)
                if strategy is None
                else ps.prepare(*objects, strategy=strategy)
            )
            model, optimizer, loader = prepared
            for _ in range(task.epoch_count):
                for images, labels, _ in loader:
                    criterion(model(images), labels).backward()
                    optimizer.step()
                    optimizer.zero_grad()

    with Job(folder, workers_min=WORKER_COUNT) as job:
        run_workers({f"w{each}": work for each in range(WORKER_COUNT)}, 300.0)
        with psworker.SnapshotReader(job.address) as reader:
            return task.accuracy(task.model_of(reader.latest()))


WAYS: Final[dict[str, Callable[[], psworker.Strategy]]] = {
    "model averaging": lambda: psworker.ModelAveraging(8),
    "elastic averaging": lambda: psworker.EASGD(4),
}


@pytest.mark.repeat
@pytest.mark.parametrize("way", WAYS)
def test_averages_of_models_are_as_good_as_steps_in_step(
    way: str, tmp_path: Path
) -> None:
    task = load_task("mnist5k")
    in_step = accuracy(task, tmp_path / "in step", None)
    found = accuracy(task, tmp_path / "way", WAYS[way])
    print(f"{way}: {found:.3f}, in step {in_step:.3f}")
    assert found > in_step - POINT


EXAMPLE: Final = Path(__file__).parents[2] / "examples" / "federated_digits.py"
CLIENT_COUNT: Final = 10


def federated(folder: Path, *arguments: str) -> float:
    """Accuracy after five rounds of the example, with its workers in this process."""
    spec = importlib.util.spec_from_file_location("federated_digits", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    example: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    options = example.options_of(["--rounds=5", *arguments])
    building = threading.Lock()  # the seed of first values is of the process
    found: dict[int, float] = {}

    def work(worker_id: str) -> None:
        with building:
            model = example.make_model()
        client = int(worker_id[1:])
        with connect(job, worker_id, step_timeout_s=60.0) as ps:
            example.train(ps, client, CLIENT_COUNT, options, model, found.setdefault)

    with Job(folder, workers_min=CLIENT_COUNT) as job:
        run_workers({f"w{each}": work for each in range(CLIENT_COUNT)}, 200.0)
    return found[5]


@pytest.mark.repeat
def test_federated_averaging_learns_as_its_paper_has_it(tmp_path: Path) -> None:
    """More local epochs need fewer rounds, and data that differs more of them."""
    alike = federated(tmp_path / "alike", "--concentration=0")
    unlike = federated(tmp_path / "unlike", "--concentration=0.1")
    short = federated(tmp_path / "short", "--concentration=0", "--epochs=1")
    print(f"alike {alike:.3f}, unlike {unlike:.3f}, one epoch {short:.3f}")
    assert alike > 0.85
    assert alike > unlike + 0.05
    assert alike > short + 0.1
