"""Schedulers of a worker that begins where others, or the job before it, are."""

import copy
import pickle
from collections.abc import Callable
from typing import Final

import pytest
import torch
from torch.optim import SGD, Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from psworker.optim.adjusters import Schedules

MAKE: Final[dict[str, Callable[[Optimizer], LRScheduler]]] = {
    "exponential": lambda o: lr_scheduler.ExponentialLR(o, 0.5),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=9),
    "chained": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
}


def made(name: str) -> tuple[SGD, LRScheduler, Schedules]:
    optimizer = SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = MAKE[name](optimizer)
    optimizer.step()  # or torch warns of steps of the scheduler
    return optimizer, scheduler, Schedules([scheduler], optimizer)


def rate_after(name: str, count: int) -> float:
    optimizer, scheduler, _ = made(name)
    for _ in range(count):
        scheduler.step()
    rate: float = optimizer.param_groups[0]["lr"]
    return rate


@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize(
    ("taken", "own_count", "expected"),
    [
        # Stepped with each push: none before the first one.
        (5, 0, 5),
        # With each epoch: in the middle of epoch 3, and exactly at its end.
        (3, 3, 3),
        (3, 4, 4),
        (0, 1, 1),
    ],
)
def test_a_scripts_steps_of_epochs_that_are_over_count_once(
    name: str, taken: int, own_count: int, expected: int
) -> None:
    optimizer, scheduler, schedules = made(name)
    schedules.catch_up(schedules.steps, (taken,))
    schedules.await_script((taken,))
    for _ in range(own_count):
        scheduler.step()
    schedules.end_wait()
    assert schedules.steps == (expected,)
    assert optimizer.param_groups[0]["lr"] == rate_after(name, expected)
    scheduler.step()
    assert schedules.steps == (expected + 1,)


def test_a_scheduler_that_waits_is_what_it_was_to_a_script() -> None:
    _, scheduler, schedules = made("exponential")
    before = set(scheduler.state_dict())
    schedules.await_script((2,))
    assert isinstance(scheduler, lr_scheduler.ExponentialLR)
    assert type(scheduler).__name__ == "ExponentialLR"
    assert set(scheduler.state_dict()) == before
    pickle.dumps(scheduler.state_dict())
    copy.deepcopy(scheduler.state_dict())
    schedules.end_wait()
    assert type(scheduler) is lr_scheduler.ExponentialLR
    schedules.end_wait()
    assert type(scheduler) is lr_scheduler.ExponentialLR
