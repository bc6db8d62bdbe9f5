"""What a model tells: each tensor before it is read, each gradient once it is there."""

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from psworker.steps.model_hooks import ModelHooks


class Told:
    """A model with hooks, and what they have told.

    Attributes:
        read: Names of tensors, in the order in which they were announced.
        gradients: The same of gradients.
    """

    def __init__(self, model: nn.Module) -> None:
        named = dict(model.named_parameters()) | dict(model.named_buffers())
        self.model = model
        self.names = [name.removeprefix("_orig_mod.") for name in named]
        self.read: list[str] = []
        self.gradients: list[str] = []
        self.hooks = ModelHooks(
            [model],
            list(named.values()),
            gradient_is_there=lambda index: self.gradients.append(self.names[index]),
            about_to_read=lambda indexes: self.read.extend(
                self.names[index] for index in indexes
            ),
        )


class LooksInside(nn.Module):
    """Reads a weight of a module that it does not call."""

    def __init__(self) -> None:
        super().__init__()
        self.called = nn.Linear(4, 4)
        self.silent = nn.Linear(4, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(self.called(inputs), self.silent.weight)


def attention(inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return inputs, inputs, inputs


@pytest.mark.parametrize(
    ("model", "inputs", "unread"),
    [
        (nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), (torch.ones(3, 4),), set()),
        (LooksInside(), (torch.ones(3, 4),), {"silent.bias"}),
        (nn.MultiheadAttention(4, 2), attention(torch.ones(3, 1, 4)), set()),
        (nn.LSTM(4, 4), (torch.ones(3, 1, 4),), set()),
        (nn.BatchNorm1d(4), (torch.ones(3, 4),), set()),
        (
            nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
            (torch.ones(3, 4),),
            set(),
        ),
    ],
    ids=["layers", "looked up", "attention", "recurrent", "buffers", "parametrized"],
)
def test_all_that_a_forward_pass_reads_is_announced(
    model: nn.Module, inputs: tuple[torch.Tensor, ...], unread: set[str]
) -> None:
    told = Told(model)

    model(*inputs)

    assert set(told.read) == set(told.names) - unread


def test_layers_are_announced_one_after_the_other() -> None:
    told = Told(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)))

    told.model(torch.ones(3, 4)).sum().backward()

    assert told.read[:2] == ["0.weight", "0.bias"]
    assert told.read.index("1.weight") > told.read.index("0.bias")
    assert set(told.gradients[:2]) == {"1.weight", "1.bias"}
    assert len(told.gradients) == 4


@pytest.mark.parametrize(
    "look",
    [
        lambda model: model.state_dict(),
        lambda model: list(model.parameters()),
        copy.deepcopy,
        lambda model: torch.save(model, io.BytesIO()),
        lambda model: torch.func.functional_call(
            model, dict(model.named_parameters()), (torch.ones(1, 4),)
        ),
    ],
    ids=["state_dict", "parameters", "deepcopy", "save", "functional_call"],
)
def test_values_are_waited_for_however_they_are_looked_at(
    look: Callable[[nn.Module], object],
) -> None:
    told = Told(nn.Linear(4, 2))

    look(told.model)

    assert set(told.read) == {"weight", "bias"}


def test_a_copy_announces_nothing_and_pickles_as_a_plain_model() -> None:
    told = Told(nn.Linear(4, 2))
    buffer = io.BytesIO()
    torch.save(told.model, buffer)
    buffer.seek(0)
    twins = [copy.deepcopy(told.model), torch.load(buffer, weights_only=False)]
    told.read.clear()

    for twin in twins:
        twin(torch.ones(1, 4)).sum().backward()
        assert type(twin._parameters) is dict

    assert not told.read
    assert not told.gradients


def test_hooks_are_taken_down() -> None:
    told = Told(nn.Linear(4, 2))

    told.hooks.remove()
    told.model(torch.ones(1, 4)).sum().backward()

    assert not told.read
    assert not told.gradients
    assert type(told.model._parameters) is dict
    assert not told.model._forward_pre_hooks


def test_a_tensor_that_is_unfrozen_later_tells_of_its_gradient() -> None:
    model = nn.Linear(4, 2)
    model.weight.requires_grad_(False)
    told = Told(model)
    model.weight.requires_grad_(True)

    told.hooks.watch_gradients()
    model(torch.ones(1, 4)).sum().backward()

    assert set(told.gradients) == {"weight", "bias"}


def test_what_is_compiled_is_announced_as_a_whole() -> None:
    compiled: Any = torch.compile(nn.Sequential(nn.Linear(4, 4)), backend="eager")
    told = Told(compiled)
    assert told.hooks.sees_reads

    told.model(torch.ones(1, 4))

    assert set(told.read) == {"0.weight", "0.bias"}
