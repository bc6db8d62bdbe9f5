"""Gradients clipped sample by sample, beside one sample at a time by autograd."""

import copy
import math
import secrets
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import pytest
import torch
from torch import nn

from pswire.privacy import Privacy
from psworker.errors import ConfigurationError, UnsupportedError
from psworker.optim.privacy import RandomBytes
from psworker.optim.private_gradients import PrivateGradients
from tests.doubles.promised_numbers import DEVIATION_MAX

ROWS: Final = 7
CLASSES: Final = 5
HUGE: Final = 1e9

LossOf = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
cross_entropy: LossOf = nn.CrossEntropyLoss()


class Shared(nn.Module):
    """A layer that is called twice, with an activation in place, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.dropout = nn.Linear(6, 6), nn.Dropout(0.5)
        self.last = nn.Linear(6, CLASSES)

    def forward(self, inputs: torch.Tensor) -> Any:  # noqa: ANN401
        again = self.twice(torch.relu_(self.twice(inputs)))
        return self.last(again)


class Tied(nn.Module):
    """An embedding whose weight is that of the last layer, and a parameter beside."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.last = nn.Embedding(CLASSES, 6), nn.Linear(6, CLASSES)
        self.last.weight = self.words.weight

    def forward(self, inputs: torch.Tensor) -> Any:  # noqa: ANN401
        return self.last(self.words(inputs).mean(1))


class Attention(nn.Module):
    """A module with a parameter of its own is called again as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Parameter(torch.randn(3, 6))
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.last = nn.Linear(6, CLASSES)

    def forward(self, inputs: torch.Tensor) -> Any:  # noqa: ANN401
        placed = inputs + self.places
        # With weights, since torch has no rule for several samples of its fast way.
        found, _ = self.attention(placed, placed, placed)
        return self.last(found.mean(1))


class Cells(nn.Module):
    """A recurrent cell, which is called for each step of a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.last = nn.GRUCell(6, 6), nn.Linear(6, CLASSES)

    def forward(self, inputs: torch.Tensor) -> Any:  # noqa: ANN401
        state = torch.zeros(len(inputs), 6)
        for each in inputs.unbind(1):
            state = self.cell(each, state)
        return self.last(state)


def convolution() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.GroupNorm(2, 4),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Linear(16, CLASSES, bias=False),
    )


MODELS: Final[dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor]]]] = {
    "shared": (Shared, lambda: torch.randn(ROWS, 6)),
    "tied": (Tied, lambda: torch.randint(0, CLASSES, (ROWS, 3))),
    "attention": (Attention, lambda: torch.randn(ROWS, 3, 6)),
    "cells": (Cells, lambda: torch.randn(ROWS, 3, 6)),
    "convolution": (convolution, lambda: torch.randn(ROWS, 1, 4, 4)),
}


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(11)


def private(
    model: nn.Module,
    norm: float,
    noise: float = 0.0,
    random_bytes: RandomBytes = secrets.token_bytes,
    *,
    loss_is_sum: bool = False,
) -> PrivateGradients:
    return PrivateGradients(
        Privacy(noise, norm, 1e-5, (1.0,)),
        {"model": model},
        random_bytes,
        loss_is_sum=loss_is_sum,
    )


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [e.grad for e in model.parameters() if e.grad is not None]


def one_by_one(
    model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor, norm: float
) -> list[torch.Tensor]:
    """The sum of clipped gradients by as many backward passes."""
    sums = [torch.zeros_like(each) for each in model.parameters()]
    for index in range(len(inputs)):
        model.zero_grad()
        rows = slice(index, index + 1)
        cross_entropy(model(inputs[rows]), targets[rows]).backward()
        found = [e.grad if e.grad is not None else None for e in model.parameters()]
        present = [each for each in found if each is not None]
        length = math.sqrt(sum(float(each.square().sum()) for each in present))
        for total, each in zip(sums, found, strict=True):
            if each is not None:
                total += each * min(1.0, norm / length)
    model.zero_grad()
    return sums


def assert_close(found: Sequence[torch.Tensor], want: Sequence[torch.Tensor]) -> None:
    for mine, theirs in zip(found, want, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=10 * DEVIATION_MAX)


@pytest.mark.parametrize("kind", MODELS)
def test_each_sample_is_clipped_by_itself(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one go and a few samples at a time, with norms on both sides of the limit."""
    build, draw = MODELS[kind]
    model, inputs = build(), draw()
    targets = torch.randint(0, CLASSES, (ROWS,))
    plain = one_by_one(model, inputs, targets, HUGE)
    norm = math.sqrt(sum(float(e.square().sum()) for e in plain)) / ROWS
    sums = one_by_one(model, inputs, targets, norm)
    assert any(not torch.allclose(a, b) for a, b in zip(sums, plain, strict=True))
    sample_bytes = 4 * sum(each.numel() for each in model.parameters())
    for limit in (1 << 30, 3 * sample_bytes):
        monkeypatch.setattr("psworker.optim.private_gradients._CHUNK_BYTES", limit)
        made = private(model, norm)
        cross_entropy(model(inputs), targets).backward()
        made.replace(model.parameters(), [ROWS])
        assert_close(gradients(model), [each / ROWS for each in sums])
        made.remove()
        model.zero_grad()


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_without_noise_and_limit_it_is_what_backward_makes(reduction: str) -> None:
    """Also of two batches of unequal size before one step."""
    model = Shared()
    loss_of = nn.CrossEntropyLoss(reduction=reduction)
    made = private(model, HUGE, loss_is_sum=reduction == "sum")
    for rows in (4, 3):
        targets = torch.randint(0, CLASSES, (rows,))
        loss_of(model(torch.randn(rows, 6)), targets).backward()
    plain = [each.clone() for each in gradients(model)]
    made.replace(model.parameters(), [3, 4])
    assert_close(gradients(model), plain)


def test_the_noise_is_normal_of_the_stated_deviation() -> None:
    """Where a parameter is not used too: who has a gradient may tell of the samples."""
    used, unused = nn.Linear(4, 1), nn.Linear(200, 100)
    model = nn.ModuleList([used, unused])
    norm, noise = 0.3, 1.5
    made = private(model, norm, noise)
    for rows in (10, 5):  # the smaller batch, where a sample weighs the most, decides
        used(torch.zeros(rows, 4)).sum().div(rows).backward()
    made.replace(model.parameters(), [10, 5])
    assert unused.weight.grad is not None
    numbers = (unused.weight.grad / (noise * norm / 5)).flatten().double()
    count = len(numbers)
    assert abs(float(numbers.mean())) < 5 / math.sqrt(count)
    assert abs(float(numbers.var()) - 1) < 5 * math.sqrt(2 / count)
    # Kolmogorov and Smirnov's distance: beyond 1.95 / sqrt(n) by one chance in 1,000.
    ranks = torch.arange(1, count + 1, dtype=torch.float64) / count
    at = torch.special.ndtr(numbers.sort().values)
    assert float((at - ranks).abs().max()) < 2.5 / math.sqrt(count)
    assert len(numbers.unique()) > 0.99 * count


def test_noise_is_drawn_anew_for_each_step_and_worker() -> None:
    seen = set()
    for _ in range(2):
        model = nn.Linear(3, 1)
        made = private(model, 1.0, 1.0)
        for _ in range(2):
            model.zero_grad()
            model(torch.zeros(2, 3)).mean().backward()
            made.replace(model.parameters(), [2])
            assert model.weight.grad is not None
            seen.add(float(model.weight.grad[0, 0]))
    assert len(seen) == 4


def test_a_sample_without_a_finite_gradient_gives_nothing() -> None:
    model = nn.Linear(3, CLASSES)
    inputs, targets = torch.randn(ROWS, 3), torch.randint(0, CLASSES, (ROWS,))
    rest = one_by_one(model, inputs[1:], targets[1:], 0.1)
    inputs[0] = math.nan
    made = private(model, 0.1)
    cross_entropy(model(inputs), targets).backward()
    made.replace(model.parameters(), [ROWS])
    assert_close(gradients(model), [each / ROWS for each in rest])


def test_a_step_that_is_made_again_keeps_its_gradient() -> None:
    """No noise on noise: the first try may have been sent."""
    model = nn.Linear(3, 1)
    made = private(model, 1.0, 1.0)
    model(torch.randn(2, 3)).mean().backward()
    made.replace(model.parameters(), [2])
    before = [each.clone() for each in gradients(model)]
    made.replace(model.parameters(), [], is_new=False)
    for mine, theirs in zip(gradients(model), before, strict=True):
        assert torch.equal(mine, theirs)


def test_what_was_zeroed_counts_no_more() -> None:
    model = nn.Linear(3, CLASSES)
    inputs, targets = torch.randn(ROWS, 3), torch.randint(0, CLASSES, (ROWS,))
    made = private(model, 0.1)

    def step() -> None:
        cross_entropy(model(inputs), targets).backward()

    step()
    made.replace(model.parameters(), [ROWS])
    expected = [each.clone() for each in gradients(model)]
    model.zero_grad()
    step()
    model.zero_grad()  # not by its optimizer
    step()
    made.replace(model.parameters(), [ROWS])
    assert_close(gradients(model), expected)


def test_a_copy_of_the_model_and_an_evaluation_count_nothing() -> None:
    model = nn.Linear(3, 1)
    made = private(model, 1.0)
    copy.deepcopy(model)(torch.randn(2, 3)).mean().backward()
    with torch.no_grad():
        model(torch.randn(2, 3))
    model(torch.randn(5, 3))  # no backward pass
    model(torch.randn(2, 3)).mean().backward()
    made.replace(model.parameters(), [2])


def test_gradients_of_low_precision_keep_their_type() -> None:
    model = nn.Linear(3, 2).to(torch.bfloat16)
    made = private(model, HUGE)
    model(torch.randn(4, 3, dtype=torch.bfloat16)).mean().backward()
    made.replace(model.parameters(), [4])
    assert {each.dtype for each in gradients(model)} == {torch.bfloat16}
    mixed = nn.Linear(3, 2)
    made = private(mixed, HUGE)
    with torch.autocast("cpu", torch.bfloat16):
        mixed(torch.randn(4, 3)).mean().backward()
    made.replace(mixed.parameters(), [4])
    assert {each.dtype for each in gradients(mixed)} == {torch.float32}


def penalty(model: nn.Module) -> torch.Tensor:
    return sum((e.square().sum() for e in model.parameters()), torch.zeros(()))


def problems() -> Iterator[tuple[nn.Module, Callable[[Any], torch.Tensor], str]]:
    """Models, what a script does, and what it is told."""
    rows = torch.randn(4, 3)
    yield (
        nn.Linear(3, 1),
        lambda model: model(rows).mean() + penalty(model),
        "add no penalty on weights",
    )
    yield (
        nn.ModuleList([nn.Linear(3, 1)]),
        lambda model: nn.functional.linear(rows, model[0].weight).mean(),
        "come from no call",
    )
    yield (
        nn.Linear(3, 1),
        lambda model: model(rows).mean() + model(torch.randn(3, 3)).mean(),
        "3 and 4 rows",
    )
    yield (
        nn.Sequential(
            nn.Linear(3, 3), nn.Flatten(0), nn.Unflatten(0, (6, 2)), nn.Linear(2, 1)
        ),
        lambda model: model(rows).mean(),
        "4 and 6 rows",
    )
    yield (
        nn.MultiheadAttention(4, 2, dropout=0.5, batch_first=True),
        lambda model: model(*[torch.randn(4, 2, 4)] * 3)[0].mean(),
        "build it without them",
    )


@pytest.mark.parametrize("index", range(5))
def test_what_is_of_no_single_samples_is_refused(index: int) -> None:
    model, loss_of, text = list(problems())[index]
    made = private(model, 1.0)
    loss_of(model).backward()
    before = [each.clone() for each in gradients(model)]
    with pytest.raises((ConfigurationError, UnsupportedError), match=text):
        made.replace(model.parameters(), [4])
    for mine, theirs in zip(gradients(model), before, strict=True):
        assert torch.equal(mine, theirs)


def test_each_backward_pass_is_of_one_batch() -> None:
    """Else a sample could be in two of them, be it that the sum is right."""
    model = nn.Linear(3, 1)
    made = private(model, 1.0)
    for rows in (2, 2):
        model(torch.randn(rows, 3)).mean().backward()
    with pytest.raises(ConfigurationError, match="passes of 2 and 2 samples, and for"):
        made.replace(model.parameters(), [4])


def test_what_was_frozen_since_has_noise_too() -> None:
    """An optimizer steps with the gradient that is there."""
    model = nn.Linear(3, 1)
    made = private(model, 1e-3, 1.0)
    model(torch.full((2, 3), 1e3)).mean().backward()
    model.weight.requires_grad_(False)
    made.replace(model.parameters(), [2])
    assert model.weight.grad is not None
    assert float(model.weight.grad.abs().max()) < 1.0
