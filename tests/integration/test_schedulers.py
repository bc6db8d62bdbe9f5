"""Every scheduler of torch moves an optimizer on shards as it moves a plain one."""

import inspect
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch.optim import Optimizer, lr_scheduler, swa_utils
from torch.optim.lr_scheduler import LRScheduler

from tests.integration.one_process import Prepare, check_same, loss_of, small_model

STEP_COUNT: Final = 9

Build = Callable[[Optimizer], LRScheduler]

SCHEDULERS: Final[dict[str, Build]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(
        o, [lambda n: 0.9**n, lambda n: 1 / (n + 1)]
    ),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda n: 0.8),
    "StepLR": lambda o: lr_scheduler.StepLR(o, step_size=3),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 5]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, total_iters=4),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, total_iters=6),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.7),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o,
        [lr_scheduler.LinearLR(o, total_iters=3), lr_scheduler.ExponentialLR(o, 0.5)],
        milestones=[3],
    ),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, total_iters=4), lr_scheduler.StepLR(o, 2)]
    ),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.001, 0.1, step_size_up=3),
    "CosineAnnealingWarmRestarts": (
        lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3)
    ),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(
        o, [0.1, 0.2], total_steps=STEP_COUNT
    ),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 5),
    "SWALR": lambda o: swa_utils.SWALR(o, 0.01, anneal_epochs=4),
}
CYCLES_MOMENTUM: Final = {"CyclicLR", "OneCycleLR"}
"""They move the momentum against the learning rate, or the first of Adam's betas."""


def test_no_scheduler_is_forgotten() -> None:
    known = {
        name
        for name, each in inspect.getmembers(lr_scheduler, inspect.isclass)
        if issubclass(each, LRScheduler)
        and each.__module__ == lr_scheduler.__name__
        and not name.startswith("_")
    }
    assert known - {"LRScheduler"} <= SCHEDULERS.keys()


def optimizer_of(kind: str, model: torch.nn.Module) -> Optimizer:
    first, second = model[0], model[2]  # type: ignore[index]
    groups = [
        {"params": first.parameters()},
        {"params": second.parameters(), "lr": 0.02},
    ]
    if kind == "Adam":
        return torch.optim.Adam(groups, lr=0.05)
    return torch.optim.SGD(groups, lr=0.05, momentum=0.9)


@pytest.mark.parametrize(
    ("name", "kind", "is_given"),
    [(name, "SGD", True) for name in SCHEDULERS]
    + [(name, "Adam", False) for name in sorted(CYCLES_MOMENTUM)]
    + [("SequentialLR", "SGD", False), ("ReduceLROnPlateau", "SGD", False)],
)
def test_a_scheduler_gives_the_numbers_of_one_process(
    name: str, kind: str, is_given: bool, tmp_path: Path
) -> None:
    def script(prepare: Prepare) -> list[torch.Tensor]:
        model = small_model()
        optimizer = optimizer_of(kind, model)
        with warnings.catch_warnings():
            # torch's own, of SequentialLR.
            warnings.filterwarnings("ignore", "The epoch parameter")
            if is_given:
                scheduler = SCHEDULERS[name](optimizer)
                model, optimizer, scheduler = prepare(model, optimizer, scheduler)
            else:
                model, optimizer = prepare(model, optimizer)
                scheduler = SCHEDULERS[name](optimizer)
            told = train(model, optimizer, scheduler)
        return [*model.parameters(), *told]

    check_same(script, tmp_path)


def train(
    model: torch.nn.Module,
    optimizer: Optimizer,
    scheduler: Any,  # noqa: ANN401, they differ in what `step` takes
) -> list[torch.Tensor]:
    """Trains; what every step was made with."""
    told = []
    for step in range(STEP_COUNT):
        optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
            scheduler.step(1.0)  # nothing gets better
        else:
            scheduler.step()
        told.append(
            torch.tensor(
                [
                    [group["lr"], group.get("momentum", group.get("betas", (0,))[0])]
                    for group in optimizer.param_groups
                ],
                dtype=torch.float64,
            )
        )
        assert scheduler.get_last_lr() == [g["lr"] for g in optimizer.param_groups]
    return told
