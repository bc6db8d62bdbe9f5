"""The schedulers of a worker that joins late are set to the job's step."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch.optim import Optimizer, lr_scheduler

from tests.integration.job import Job, connect, run_workers
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


@pytest.mark.filterwarnings("ignore:The epoch parameter")  # torch's own, of sequences
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_late_workers_schedule_is_that_of_the_job(name: str, tmp_path: Path) -> None:
    interval, build = SCHEDULES[name]
    joined = threading.Event()

    def train(model: Any, optimizer: Any, schedule: Any, steps: range) -> list[float]:  # noqa: ANN401
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

    def prepared(ps: Any) -> tuple[Any, Any, Any]:  # noqa: ANN401
        model = small_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.08, momentum=0.5)
        found: tuple[Any, Any, Any] = ps.prepare(model, optimizer, build(optimizer))
        return found

    common = range(EARLY_STEPS, EARLY_STEPS + COMMON_STEPS)
    with Job(tmp_path) as job, connect(job, "w0") as first:
        mine = prepared(first)
        train(*mine, range(EARLY_STEPS))

        def go_on(worker_id: str) -> list[float]:
            assert joined.wait(20)
            return train(*mine, common)

        def late(worker_id: str) -> list[float]:
            with connect(job, worker_id) as ps:
                own = prepared(ps)
                joined.set()
                return train(*own, common)

        rates = run_workers({"w0": go_on, "w1": late})

    # The first rate of the late worker may be one step old, and does not count.
    assert rates["w1"][1:] == pytest.approx(rates["w0"][1:], rel=1e-12)
    assert len(set(rates["w0"])) > 1 or name == "by a metric"
    assert rates["w0"][0] != 0.08
