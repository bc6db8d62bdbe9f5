"""The schedulers of a worker that joins late are set to the job's step."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch.optim import Optimizer, lr_scheduler

from tests.integration.job import WAIT_TIMEOUT_S, Job, connect, run_workers
from tests.integration.one_process import loss_of, small_model

EARLY_STEPS: Final = 5
COMMON_STEPS: Final = 6

SCHEDULES: Final[dict[str, tuple[int, Callable[[Optimizer], Any]]]] = {
    "each step": (1, lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=40)),
    "each epoch": (3, lambda o: lr_scheduler.StepLR(o, step_size=1, gamma=0.5)),
    "a sequence": (
        1,
        lambda o: lr_scheduler.SequentialLR(
            o,
            [
                lr_scheduler.LinearLR(o, total_iters=3),
                lr_scheduler.CosineAnnealingLR(o, 9),
            ],
            milestones=[3],
        ),
    ),
    "a chain": (
        2,
        lambda o: lr_scheduler.ChainedScheduler(
            [
                lr_scheduler.ConstantLR(o, total_iters=2),
                lr_scheduler.ExponentialLR(o, 0.9),
            ]
        ),
    ),
    "by a metric": (
        1,
        lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0, factor=0.5),
    ),
}


def train(
    name: str,
    model: Any,  # noqa: ANN401
    optimizer: Any,  # noqa: ANN401
    schedule: Any,  # noqa: ANN401
    steps: range,
) -> list[float]:
    """Trains, and returns the rates of the steps."""
    interval, _ = SCHEDULES[name]
    rates = []
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
        rates.append(optimizer.param_groups[0]["lr"])
        if (step + 1) % interval == 0:
            # Nothing gets better at first, and then everything does.
            metric = [min(1.0, EARLY_STEPS / (step + 1))]
            schedule.step(*(metric if name == "by a metric" else []))
    return rates


def prepared(name: str, ps: Any) -> tuple[Any, Any, Any]:  # noqa: ANN401
    _, build = SCHEDULES[name]
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.08, momentum=0.5)
    found: tuple[Any, Any, Any] = ps.prepare(model, optimizer, build(optimizer))
    return found


@pytest.mark.filterwarnings("ignore:The epoch parameter")  # torch's own, of sequences
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_late_workers_schedule_is_that_of_the_job(name: str, tmp_path: Path) -> None:
    joined = threading.Event()

    common = range(EARLY_STEPS, EARLY_STEPS + COMMON_STEPS)
    with Job(tmp_path) as job, connect(job, "w0") as first:
        mine = prepared(name, first)
        train(name, *mine, range(EARLY_STEPS))

        def go_on(worker_id: str) -> list[float]:
            assert joined.wait(WAIT_TIMEOUT_S)
            return train(name, *mine, common)

        def late(worker_id: str) -> list[float]:
            with connect(job, worker_id) as ps:
                own = prepared(name, ps)
                joined.set()
                return train(name, *own, common)

        rates = run_workers({"w0": go_on, "w1": late})

    # The first rate may be one step old where the last pushes don't show what is next.
    first_rate = 0 if SCHEDULES[name][0] == 1 else 1
    assert rates["w1"][first_rate:] == pytest.approx(
        rates["w0"][first_rate:], rel=1e-12
    )
    assert len(set(rates["w0"])) > 1 or name == "by a metric"
    assert rates["w0"][0] != 0.08


@pytest.mark.filterwarnings("ignore:The epoch parameter")
@pytest.mark.parametrize("name", ["each step", "a sequence"])
def test_a_worker_that_is_alone_at_its_first_step_goes_on_with_the_schedule(
    name: str, tmp_path: Path
) -> None:
    common = range(EARLY_STEPS, EARLY_STEPS + COMMON_STEPS)
    model = small_model()
    alone = torch.optim.SGD(model.parameters(), lr=0.08, momentum=0.5)
    schedule = SCHEDULES[name][1](alone)
    expected = train(name, model, alone, schedule, range(common.stop))
    with Job(tmp_path) as job, connect(job, "w1") as late:
        with connect(job, "w0") as first:
            train(name, *prepared(name, first), range(EARLY_STEPS))
            mine = prepared(name, late)
        assert train(name, *mine, common) == pytest.approx(
            expected[EARLY_STEPS:], rel=1e-12
        )
