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
    ("loaded", "taken", "own_count", "expected"),
    [
        # Stepped with each push: none before the first one.
        (0, 5, 0, 5),
        # With each epoch: in the middle of epoch 3, and exactly at its end.
        (0, 3, 3, 3),
        (0, 3, 4, 4),
        (0, 0, 1, 1),
        # Loaded with two steps of before the job: in its epoch 1, and at the end of 0.
        (2, 3, 1, 3),
        (2, 2, 1, 3),
    ],
)
def test_a_scripts_steps_of_epochs_that_are_over_count_once(
    name: str, loaded: int, taken: int, own_count: int, expected: int
) -> None:
    optimizer, scheduler, schedules = made(name)
    for _ in range(loaded):
        scheduler.step()
    before = schedules.steps
    schedules.catch_up(before, (taken,))
    schedules.await_script(before, (taken,))
    for _ in range(own_count):
        scheduler.step()
    schedules.end_wait()
    assert schedules.steps == (expected,)
    assert optimizer.param_groups[0]["lr"] == rate_after(name, expected)
    scheduler.step()
    assert schedules.steps == (expected + 1,)


@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize(
    ("loaded", "taken", "new_epoch", "begins_with", "own_count", "expected"),
    [
        # Stepped with each epoch: the script begins with the new one.
        (0, 2, 3, 3, 0, 3),
        (0, 0, 1, 1, 0, 1),
        (2, 3, 2, 2, 0, 4),
        # It goes through those that are over, and takes the step itself.
        (0, 2, 3, 0, 3, 3),
        # It has set its scheduler to the new epoch by its own steps.
        (0, 2, 3, 3, 3, 3),
        # In the middle of an epoch.
        (0, 3, 0, 3, 0, 3),
        # Stepped with each push, or from the second epoch on.
        (0, 8, 3, 3, 0, 8),
        (0, 1, 3, 3, 0, 1),
        # The rate of a script that has loaded more steps than the job has taken.
        (2, 1, 0, 0, 0, 2),
    ],
)
def test_the_step_at_the_end_of_an_epoch_that_the_job_has_left_is_taken(
    name: str,
    loaded: int,
    taken: int,
    new_epoch: int,
    begins_with: int,
    own_count: int,
    expected: int,
) -> None:
    optimizer, scheduler, schedules = made(name)
    for _ in range(loaded):
        scheduler.step()
    before = schedules.steps
    schedules.catch_up(before, (taken,))
    schedules.await_script(before, (taken,), new_epoch)
    if begins_with != new_epoch:
        schedules.draw(begins_with)
    for _ in range(own_count):
        scheduler.step()
    for _ in range(2):
        schedules.draw(max(new_epoch, begins_with))
    schedules.end_wait()
    assert schedules.steps == (expected,)
    assert optimizer.param_groups[0]["lr"] == rate_after(name, expected)


def test_without_a_loader_no_step_of_an_epoch_is_due() -> None:
    _, _, schedules = made("exponential")
    schedules.catch_up((0,), (1,))
    schedules.await_script((0,), (1,), 2)
    schedules.end_wait()
    schedules.draw(2)
    assert schedules.steps == (1,)


def test_a_scheduler_that_waits_is_what_it_was_to_a_script() -> None:
    _, scheduler, schedules = made("exponential")
    before = set(scheduler.state_dict())
    schedules.await_script((0,), (2,))
    assert isinstance(scheduler, lr_scheduler.ExponentialLR)
    assert type(scheduler).__name__ == "ExponentialLR"
    assert set(scheduler.state_dict()) == before
    pickle.dumps(scheduler.state_dict())
    copy.deepcopy(scheduler.state_dict())
    schedules.end_wait()
    assert type(scheduler) is lr_scheduler.ExponentialLR
    schedules.end_wait()
    assert type(scheduler) is lr_scheduler.ExponentialLR


# A job that returns to a checkpoint in the same processes


@pytest.mark.parametrize("name", MAKE)
def test_schedulers_that_begin_again_take_the_same_way(name: str) -> None:
    optimizer, scheduler, schedules = made(name)
    for _ in range(6):
        scheduler.step()
    schedules.begin_again()
    assert schedules.steps == (0,)
    assert optimizer.param_groups[0]["lr"] == rate_after(name, 0)
    schedules.catch_up(schedules.steps, (4,))
    assert schedules.steps == (4,)
    assert optimizer.param_groups[0]["lr"] == rate_after(name, 4)


def test_momentum_that_a_scheduler_sets_begins_again_too() -> None:
    optimizer = SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0, momentum=0.5)
    scheduler = lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9)
    first = dict(optimizer.param_groups[0])
    schedules = Schedules([scheduler], optimizer)
    optimizer.step()
    for _ in range(5):
        scheduler.step()
    assert optimizer.param_groups[0]["momentum"] != first["momentum"]
    schedules.begin_again()
    for name in ("lr", "momentum"):
        assert optimizer.param_groups[0][name] == first[name]


def test_a_rate_in_a_tensor_begins_again_in_the_same_tensor() -> None:
    rate = torch.tensor(1.0)
    optimizer = SGD([torch.nn.Parameter(torch.zeros(1))], lr=rate)
    schedules = Schedules([], optimizer)
    rate.fill_(0.25)
    schedules.begin_again()
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate.item() == 1.0


def test_what_follows_a_metric_stays() -> None:
    optimizer = SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer)
    schedules = Schedules([scheduler], optimizer)
    scheduler.step(0.5)
    schedules.begin_again()
    assert (scheduler.best, schedules.steps) == (0.5, (1,))


@pytest.mark.parametrize("is_by_epoch", [False, True])
def test_steps_between_epochs_are_taken_where_the_script_takes_none(
    is_by_epoch: bool,
) -> None:
    """It goes through three epochs, and then from the middle of the first again."""
    _, scheduler, schedules = made("exponential")

    def train(epoch: int, count: int) -> None:
        for _ in range(count):
            schedules.draw(epoch)
            if not is_by_epoch:
                scheduler.step()

    def end(epoch: int) -> None:
        schedules.draw(epoch)
        if is_by_epoch:
            scheduler.step()

    begins = []
    for epoch in range(3):
        schedules.draw(epoch)
        begins.append(schedules.steps)
        train(epoch, 4)
        end(epoch)
    schedules.begin_again()
    schedules.catch_up(schedules.steps, (0 if is_by_epoch else 2,))
    schedules.enter_again(0)
    train(2, 2)
    again = []
    for epoch in (1, 2):
        schedules.enter_again(epoch)
        again.append(schedules.steps)
        train(2, 4)
    assert again == begins[1:]


@pytest.mark.parametrize("is_by_epoch", [False, True])
def test_a_process_that_joined_in_the_middle_of_an_epoch_goes_through_its_beginning(
    is_by_epoch: bool,
) -> None:
    """It joined in the second of three batches of epoch 1, and returns to epoch 0."""
    _, scheduler, schedules = made("exponential")
    schedules.catch_up(schedules.steps, (1 if is_by_epoch else 4,))

    def train(epoch: int, count: int) -> None:
        for _ in range(count):
            schedules.draw(epoch)
            if not is_by_epoch:
                scheduler.step()

    train(1, 2)
    schedules.begin_again()
    schedules.catch_up(schedules.steps, (0 if is_by_epoch else 1,))
    schedules.enter_again(0)
    train(0, 2)
    schedules.enter_again(1)
    assert schedules.steps == ((1,) if is_by_epoch else (3,))


def test_a_checkpoint_at_the_end_of_an_epoch_lacks_what_comes_after_it() -> None:
    _, scheduler, schedules = made("exponential")
    for epoch in range(3):
        schedules.draw(epoch)
        schedules.draw(epoch)
        scheduler.step()
    schedules.begin_again()
    schedules.catch_up(schedules.steps, (0,))  # of the last push of epoch 0
    schedules.enter_again(1)
    assert schedules.steps == (1,)
