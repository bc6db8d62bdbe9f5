"""Whose arithmetic an optimizer has: torch's alone, under whatever name."""

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from pswire.optimizer_classes import class_named
from pswire.optimizers import SUPPORTED
from pswire.reasons import Refusal
from psworker.backends.local import StepCount, attach
from psworker.errors import (
    ConfigurationError,
    OptimizerUnsupportedError,
    PsError,
    error_of_refusal,
)
from psworker.optim.optimizer_class import class_of


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(2))]


def named(optimizer: torch.optim.Optimizer) -> str:
    try:
        return class_of(optimizer, "optimizer")
    except Refusal as refusal:
        raise error_of_refusal(refusal) from None


@pytest.mark.parametrize("name", SUPPORTED)
def test_torchs_own_classes_are_those(name: str) -> None:
    assert named(class_named(name)(parameters())) == name


class Quick(torch.optim.AdamW):
    """Other defaults and a method more."""

    def __init__(self, held: list[nn.Parameter]) -> None:
        super().__init__(held, lr=0.5)

    def rates(self) -> list[float]:
        return [group["lr"] for group in self.param_groups]


def test_a_class_that_computes_nothing_by_itself_is_its_base() -> None:
    Adam = type("Adam", (torch.optim.RMSprop,), {})

    assert named(Quick(parameters())) == "AdamW"
    assert named(Adam(parameters())) == "RMSprop"


def scheduled(optimizer: torch.optim.Optimizer) -> None:
    lr_scheduler.StepLR(optimizer, 1)


def compiled(optimizer: Any) -> None:  # noqa: ANN401
    optimizer.step = torch.compile(optimizer.step, backend="eager")


def profiled(optimizer: Any) -> None:  # noqa: ANN401
    optimizer.step = MethodType(
        torch.optim.Optimizer.profile_hook_step(type(optimizer).step), optimizer
    )


def prepared_alone(optimizer: torch.optim.Optimizer) -> None:
    attach(optimizer, StepCount("local"))


@pytest.mark.parametrize("wrap", [scheduled, compiled, profiled, prepared_alone])
def test_what_torch_puts_around_a_step_changes_nothing(
    wrap: Callable[[Any], None],
) -> None:
    optimizer = torch.optim.SGD(parameters(), lr=0.1)
    wrap(optimizer)

    assert named(optimizer) == "SGD"


def own_function(optimizer: Any, name: str) -> None:  # noqa: ANN401
    setattr(optimizer, name, lambda *_: None)


def own_method(optimizer: Any, name: str) -> None:  # noqa: ANN401
    setattr(optimizer, name, MethodType(lambda *_: None, optimizer))


def around(optimizer: Any, name: str) -> None:  # noqa: ANN401
    inner = getattr(optimizer, name)

    @functools.wraps(inner)
    def call(*arguments: object) -> object:
        return inner(*arguments)

    setattr(optimizer, name, call)


def partial(optimizer: Any, name: str) -> None:  # noqa: ANN401
    setattr(optimizer, name, functools.partial(getattr(optimizer, name)))


@pytest.mark.parametrize("make", [own_function, own_method, around, partial])
@pytest.mark.parametrize(
    "name", ["step", "zero_grad", "add_param_group", "state_dict", "load_state_dict"]
)
def test_what_the_script_has_set_is_refused_with_the_way(
    make: Callable[[Any, str], None], name: str
) -> None:
    optimizer = torch.optim.SGD(parameters(), lr=0.1)
    make(optimizer, name)

    text = f"has set {name} on optimizer, a torch.optim.SGD.*set it after prepare"
    with pytest.raises(ConfigurationError, match=text):
        named(optimizer)


@pytest.mark.parametrize("cover", [scheduled, prepared_alone])
def test_a_step_of_the_script_is_seen_below_others(
    cover: Callable[[Any], None],
) -> None:
    optimizer = torch.optim.SGD(parameters(), lr=0.1)
    own_method(optimizer, "step")
    cover(optimizer)

    with pytest.raises(ConfigurationError, match="has set step"):
        named(optimizer)


def no_update(*_: object) -> None:
    """Stands in for what a class of a script does."""


@pytest.mark.parametrize("name", ["step", "_init_group", "zero_grad", "state_dict"])
def test_a_class_that_does_something_by_itself_is_refused(name: str) -> None:
    Adam = type("Adam", (torch.optim.Adam,), {name: no_update})
    Adam.__module__ = "torch.optim.adam"
    derived = type("Derived", (Adam,), {})

    for kind in (Adam, derived):
        text = f"has {name} of its own, and shards run torch.optim.Adam alone"
        with pytest.raises(OptimizerUnsupportedError, match=text):
            named(kind(parameters()))


def test_a_property_in_place_of_groups_is_refused() -> None:
    kind = type("Own", (torch.optim.SGD,), {"state": {}})
    optimizer = kind(parameters(), lr=0.1)

    with pytest.raises(OptimizerUnsupportedError, match="has state of its own"):
        named(optimizer)


def test_a_class_of_no_base_is_refused_also_if_it_feigns_one() -> None:
    kind = type("Adam", (torch.optim.Optimizer,), {"step": no_update})
    for module in ("torch.optim.adam", "mine"):
        kind.__module__ = module
        with pytest.raises(OptimizerUnsupportedError, match=r"torch\.optim only"):
            named(kind(parameters(), {}))
    with pytest.raises(PsError, match="calls the loss again"):
        named(torch.optim.LBFGS(parameters()))


def test_a_patch_of_torchs_class_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = torch.optim.SGD(parameters(), lr=0.1)
    inner = torch.optim.SGD.step
    patched: Any = functools.wraps(inner)(lambda *arguments: inner(*arguments))
    monkeypatch.setattr(torch.optim.SGD, "step", patched)

    with pytest.raises(OptimizerUnsupportedError, match=r"step of torch.optim.SGD was"):
        named(optimizer)
    assert named(torch.optim.Adam(parameters())) == "Adam"
