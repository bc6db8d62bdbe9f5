"""What counts as an edit of a parameter, and what is said of it."""

import logging
from collections.abc import Callable

import pytest
import torch
from torch import nn

from psworker.optim.model_schema import bind_models
from psworker.optim.write_guard import Samples, WriteGuard

Edit = Callable[[nn.Linear], object]


def module(dtype: torch.dtype = torch.float32) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(40, 30).to(dtype)


def watched(model: nn.Module, held: tuple[int, ...] = (0, 1)) -> WriteGuard:
    bound = bind_models({"model": model})
    return WriteGuard(bound.schema, bound.tensors, held=held)


def assigned(model: nn.Linear) -> None:
    model.weight.data = model.weight.data * 0.5


def vector(model: nn.Linear) -> None:
    flat = nn.utils.parameters_to_vector(model.parameters())
    nn.utils.vector_to_parameters(flat * 0.5, model.parameters())


@torch.no_grad()
def scaled(model: nn.Linear) -> None:
    model.weight.mul_(0.5)


EDITS: dict[str, Edit] = {
    "assigned": assigned,
    "vector_to_parameters": vector,
    "no_grad": scaled,
    "clamp": lambda model: model.weight.data.clamp_(-0.05, 0.05),
    "init": lambda model: nn.init.xavier_uniform_(model.weight),
    "detach": lambda model: model.weight.detach().zero_(),
    "numpy": lambda model: model.weight.detach().numpy().fill(3),
    "load": lambda model: model.load_state_dict(nn.Linear(40, 30).state_dict()),
    "prune": lambda model: model.weight.data.mul_(model.weight.data.abs() > 0.1),
    "nan": lambda model: model.weight.data.fill_(float("nan")),
}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_an_edit_is_named_once_with_its_step(
    edit: Edit, caplog: pytest.LogCaptureFixture
) -> None:
    model = module()
    values = watched(model)
    with caplog.at_level(logging.WARNING, "psworker"):
        values.check(6)
        edit(model)
        assert values.has_writes
        values.check(7)
        values.note()
        edit(model)
        values.check(8)

    (record,) = caplog.records
    text = record.getMessage()
    assert text.startswith("step 7: the script has changed the values of 'weight'")
    assert "ps.publish(model)" in text


def perturbed(model: nn.Linear) -> None:
    with torch.no_grad():
        changes = [torch.randn_like(each) * 0.1 for each in model.parameters()]
        for parameter, change in zip(model.parameters(), changes, strict=True):
            parameter.add_(change)
        for parameter, change in zip(model.parameters(), changes, strict=True):
            parameter.sub_(change)


def swapped(model: nn.Linear) -> None:
    kept = [each.data for each in model.parameters()]
    for parameter in model.parameters():
        parameter.data = torch.zeros_like(parameter)
    for parameter, value in zip(model.parameters(), kept, strict=True):
        parameter.data = value


def swapped_by_copies(model: nn.Linear) -> None:
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    scaled(model)
    model.load_state_dict(kept)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("taken_back", [perturbed, swapped, swapped_by_copies])
def test_what_is_taken_back_is_no_edit(
    taken_back: Edit, dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    model = module(dtype)
    values = watched(model)
    with caplog.at_level(logging.WARNING, "psworker"):
        for step in range(20):
            taken_back(model)
            values.check(step)
            values.note()
    assert not caplog.records


def test_values_of_no_optimizer_are_not_said_to_be_lost(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = module()
    values = watched(model, held=(1,))
    with caplog.at_level(logging.WARNING, "psworker"):
        scaled(model)
        values.check(3)
    (record,) = caplog.records
    assert "which no optimizer has" in record.getMessage()
    assert "lost" not in record.getMessage()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(3, 4, 5, 6).to(memory_format=torch.channels_last),
        torch.ones(6, 4).T,
        torch.ones(1),
        torch.ones(100_000),
    ],
    ids=["channels last", "transposed", "one", "large"],
)
def test_a_sample_is_seen_to_change_in_any_layout(tensor: torch.Tensor) -> None:
    samples = Samples([tensor])
    before = samples.looks()
    assert samples.looks() == before
    tensor.data.mul_(2)
    ((_, _, bits),) = samples.looks()
    assert bits != before[0][2]


def test_what_has_no_elements_or_gaps_between_them_has_no_sample() -> None:
    samples = Samples([torch.ones(0), torch.ones(4)[::2], torch.ones(1).expand(3)])
    assert [bits for _, _, bits in samples.looks()] == [b"", b"", b""]
