"""What a script does to its models after `prepare`: followed, or refused by name."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize, prune
from torch.nn.utils.parametrizations import weight_norm

from psworker.errors import ConfigurationError
from psworker.optim.buffer_policies import BufferChoice, choose_policies
from psworker.optim.declared_tensors import (
    DeclaredTensors,
    refuse_shared_memory,
    warn_of_extra_state,
)
from psworker.optim.model_schema import bind_models


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.conv = nn.Conv2d(2, 4, 3)
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("low", torch.tensor([]))
        self.register_buffer("later", None)
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
        self.register_buffer("step", torch.tensor(0))
        self.low: torch.Tensor
        self.step: torch.Tensor
        self.later: torch.Tensor | None


def declared(model: nn.Module, choice: BufferChoice = None) -> DeclaredTensors:
    bound = bind_models({"model": model})
    return DeclaredTensors(bound, choose_policies(bound, choice))


def names(model: nn.Module, indexes: list[int]) -> list[str]:
    entries = bind_models({"model": model}).schema.entries
    return [entries[index].name for index in indexes]


class Doubled(nn.Module):
    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return values * 2


def set_data(model: Model, made: Callable[[torch.Tensor], torch.Tensor]) -> None:
    model.first.weight.data = made(model.first.weight.data)


def give_buffer(model: Model, value: torch.Tensor) -> None:
    model.step = value


def to_channels_last(model: Model) -> None:
    for each in model.parameters():
        if each.dim() == 4:
            each.data = each.data.to(memory_format=torch.channels_last)


FOLLOWED: list[tuple[Callable[[Model], Any], list[str]]] = [
    (lambda model: None, []),
    (lambda model: set_data(model, torch.clone), ["first.weight"]),
    (lambda model: set_data(model, torch.t), ["first.weight"]),
    (lambda model: to_channels_last(model), ["conv.weight"]),
    (lambda model: give_buffer(model, model.step + 1), ["step"]),
    (lambda model: model.first.requires_grad_(False), []),
    (lambda model: model.half().float(), []),
    (lambda model: model.add_module("act", nn.ReLU()), []),
    (lambda model: model.register_buffer("more", torch.ones(1), persistent=False), []),
    (lambda model: setattr(model, "scratch", torch.zeros(7)), []),
    (lambda model: model.load_state_dict(model.state_dict()), []),
]


@pytest.mark.parametrize(("change", "moved"), FOLLOWED)
def test_what_can_be_followed_is(
    change: Callable[[Model], Any], moved: list[str]
) -> None:
    model = Model()
    tensors = declared(model)
    assert tensors.look() == []
    change(model)

    found = names(model, tensors.look())

    assert set(moved) <= set(found)
    assert tensors.look() == []
    now = model.state_dict(keep_vars=True)
    entries = bind_models({"model": model}).schema.entries
    for entry, tensor in zip(entries, tensors.tensors, strict=True):
        assert now[entry.name] is tensor


def test_memory_that_is_shared_with_other_processes_is_another() -> None:
    model = Model()
    tensors = declared(model)
    model.share_memory()
    assert "first.weight" in names(model, tensors.look())
    assert tensors.look() == []


REFUSED: list[tuple[Callable[[Model], Any], str]] = [
    (lambda model: model.double(), r"parameter 'first.weight' of model has become "
     r"float64 since prepare\(\), but the job trains it as parameter \[3, 3\] float32"),
    (lambda model: model.half(), "has become float16"),
    (lambda model: model.norm.double(), "parameter 'norm.weight' of model has become"),
    (lambda model: set_data(model, lambda data: data[:2]), r"has become \[2, 3\]"),
    (lambda model: setattr(model.first, "weight", nn.Parameter(torch.zeros(3, 3))),
     "'first.weight' of model is another nn.Parameter than at prepare"),
    (lambda model: model.load_state_dict(model.state_dict(), assign=True),
     "is another nn.Parameter"),
    (lambda model: setattr(model, "first", nn.Linear(3, 3)), "is another nn.Parameter"),
    (lambda model: delattr(model, "first"), "'first.weight' of model is gone since"),
    (lambda model: setattr(model.first, "bias", None), "'first.bias' of model is gone"),
    (lambda model: model.add_module("head", nn.Linear(3, 1)),
     "parameter 'head.weight' of model and 1 more came after prepare"),
    (lambda model: weight_norm(model.first), "'first.weight' of model is gone"),
    (lambda model: parametrize.register_parametrization(
        model.first, "weight", Doubled(), unsafe=True),
     "become 'first.parametrizations.weight.original' of model"),
    (lambda model: prune.random_unstructured(model.first, "weight", 0.5),
     "has become 'first.weight_orig' of model since prepare"),
    (lambda model: setattr(model, "later", torch.ones(2)),
     "buffer 'later' of model came after prepare"),
    (lambda model: model.register_buffer("more", torch.ones(1)), "buffer 'more' of"),
    (lambda model: model.register_buffer("scratch", torch.ones(1)), "buffer 'scratch'"),
    (lambda model: setattr(model, "step", None), "buffer 'step' of model is gone"),
    (lambda model: delattr(model, "step"), "buffer 'step' of model is gone"),
    (lambda model: setattr(model, "low", torch.zeros(3)),
     r"buffer 'low' of model is of shape \[3\] and type float32.*'low': 'local'"),
    (lambda model: model.low.resize_(2), r"buffer 'low' of model is of shape \[2\]"),
    (lambda model: give_buffer(model, torch.tensor(1.0)), "'step'.* type float32"),
    (lambda model: setattr(model.norm, "running_mean", torch.zeros(1).expand(3)),
     "'norm.running_mean' of model has several elements in one place of memory"),
    (lambda model: setattr(model.norm.bias, "data", model.norm.weight.data),
     "'norm.weight' of model and parameter 'norm.bias' of model lie over the same"),
    (lambda model: setattr(model.norm, "running_var", model.norm.weight.data),
     "'norm.weight' of model and buffer 'norm.running_var' of model lie over the same"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "text"), REFUSED)
def test_what_can_not_is_refused_by_name_as_long_as_it_is_so(
    change: Callable[[Model], Any], text: str
) -> None:
    model = Model()
    tensors = declared(model)
    change(model)
    for _ in range(2):
        with pytest.raises(ConfigurationError, match=text):
            tensors.look()


def test_what_is_put_back_is_not_refused_any_more() -> None:
    model = Model()
    tensors = declared(model)
    model.double()
    with pytest.raises(ConfigurationError):
        tensors.look()
    model.float()
    tensors.look()

    layer, model.first = model.first, nn.Linear(3, 3)
    with pytest.raises(ConfigurationError):
        tensors.look()
    model.first = layer
    assert tensors.look() == []


def test_a_local_buffer_is_each_workers_own_affair() -> None:
    model = Model()
    tensors = declared(model, {"low": "local", "step": "local"})
    model.low = torch.zeros(5)
    model.step = model.first.weight.data
    assert tensors.look() == []
    del model.step
    assert tensors.look() == []


def test_a_tie_that_is_undone_is_refused() -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    model["b"].weight = model["a"].weight
    tensors = declared(model)
    model["b"].weight = nn.Parameter(torch.zeros(2, 2))
    with pytest.raises(ConfigurationError, match=r"'b.weight' of model is another"):
        tensors.look()


def test_names_of_one_buffer_keep_one_tensor() -> None:
    model = nn.Module()
    mask = torch.ones(2)
    model.register_buffer("one", mask)
    model.register_buffer("two", mask)
    tensors = declared(model)
    model.one = mask + 1
    with pytest.raises(ConfigurationError, match="'one' and 'two' of model were one"):
        tensors.look()
    model.two = model.one
    assert tensors.look() == [0]


class Pair(nn.Module):
    """Two tensors, as a test makes them."""

    def __init__(self, one: torch.Tensor, two: torch.Tensor) -> None:
        super().__init__()
        for name, tensor in (("one", one), ("two", two)):
            if isinstance(tensor, nn.Parameter):
                self.register_parameter(name, tensor)
            else:
                self.register_buffer(name, tensor)


def check(model: nn.Module, choice: BufferChoice = None) -> None:
    bound = bind_models({"model": model})
    policies = choose_policies(bound, choice)
    refuse_shared_memory(bound.schema.entries, bound.tensors, policies)


def test_parameters_over_one_memory_are_refused_with_the_way() -> None:
    whole = torch.zeros(8)
    with pytest.raises(ConfigurationError) as caught:
        check(Pair(nn.Parameter(whole[:5]), nn.Parameter(whole[4:])))
    assert "parameter 'one' of model and parameter 'two' of model" in str(caught.value)
    assert "second.weight = first.weight" in str(caught.value)

    check(Pair(nn.Parameter(whole[:4]), nn.Parameter(whole[4:])))
    check(Pair(nn.Parameter(whole[::2]), nn.Parameter(whole[1::2])))


def test_a_buffer_over_a_parameter_is_refused_unless_it_is_local() -> None:
    weight = nn.Parameter(torch.zeros(4))
    model = Pair(weight, weight.data[2:])
    with pytest.raises(ConfigurationError, match="register the buffer with a copy"):
        check(model)
    check(model, {"two": "local"})


def test_buffers_over_one_memory_need_one_policy() -> None:
    table = torch.zeros(4)
    model = Pair(table, table[:2])
    check(model)
    check(model, {"two": "local"})
    with pytest.raises(ConfigurationError, match="treats them differently"):
        check(model, {"two": "mean"})


def test_expanded_tensors_are_refused() -> None:
    for made in (lambda t: t, nn.Parameter):
        model = Pair(made(torch.zeros(1).expand(4)), torch.zeros(1))
        with pytest.raises(ConfigurationError, match="'one' of model has several elem"):
            check(model)
    buffer = Pair(torch.zeros(1).expand(4), torch.zeros(1))
    check(buffer, {"one": "local"})


def test_extra_state_is_named(caplog: pytest.LogCaptureFixture) -> None:
    class Observed(nn.Linear):
        def get_extra_state(self) -> dict[str, float]:
            return {"peak": 1.0}

        def set_extra_state(self, state: dict[str, float]) -> None:
            pass

    model = nn.Sequential(nn.Linear(1, 1), Observed(1, 1))
    with caplog.at_level(logging.WARNING, logger="psworker"):
        warn_of_extra_state({"model": nn.Linear(1, 1)})
        assert not caplog.records
        warn_of_extra_state({"model": model})
    (record,) = caplog.records
    assert "'1._extra_state'" in record.getMessage()
    assert "1._extra_state" in model.state_dict()
