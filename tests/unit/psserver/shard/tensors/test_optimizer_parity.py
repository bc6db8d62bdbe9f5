"""Shards equal one process: every optimizer, its switches, changing hyperparameters."""

from typing import Any, Final

import pytest
import torch

from pswire.optimizer_classes import class_named
from pswire.optimizers import SUPPORTED, slot_count
from tests.doubles.chunk_sizes import cut_into
from tests.doubles.promised_numbers import DEVIATION_MAX
from tests.unit.psserver.shard.tensors.shards import (
    Push,
    Shards,
    step_in_one_process,
)

STEP_COUNT: Final = 50

TYPE_DEVIATION_MAX: Final = {
    torch.float64: 1e-14,
    torch.bfloat16: 2**-8,
    torch.float16: 2**-11,
}
"""In 16 bits half a unit in the last place of the largest value: the last bit of a
float32 decides how a value halfway between two of 16 bits is rounded."""

CASES: Final[list[tuple[str, dict[str, Any]]]] = [
    ("SGD", {"lr": 0.05}),
    ("SGD", {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}),
    ("SGD", {"lr": 0.05, "momentum": 0.9, "dampening": 0.3, "maximize": True}),
    ("SGD", {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    ("Adam", {"lr": 0.01}),
    ("Adam", {"lr": 0.01, "weight_decay": 0.1, "amsgrad": True, "maximize": True}),
    ("AdamW", {"lr": 0.01, "weight_decay": 0.1}),
    ("AdamW", {"lr": 0.01, "betas": (0.5, 0.9), "amsgrad": True}),
    ("Adagrad", {"lr": 0.05, "lr_decay": 0.01, "weight_decay": 0.01}),
    ("Adagrad", {"lr": 0.05, "initial_accumulator_value": 0.5, "maximize": True}),
    ("RMSprop", {"lr": 0.01}),
    ("RMSprop", {"lr": 0.01, "momentum": 0.9, "centered": True, "weight_decay": 0.01}),
    ("Adamax", {"lr": 0.01, "weight_decay": 0.01, "maximize": True}),
    ("NAdam", {"lr": 0.01, "weight_decay": 0.01}),
    ("NAdam", {"lr": 0.01, "weight_decay": 0.1, "decoupled_weight_decay": True}),
    ("RAdam", {"lr": 0.01, "weight_decay": 0.01}),
    ("RAdam", {"lr": 0.01, "weight_decay": 0.1, "decoupled_weight_decay": True}),
    ("Adadelta", {"lr": 0.5, "rho": 0.8, "weight_decay": 0.01}),
    ("DelayedNesterov", {"lr": 0.05, "momentum": 0.9}),
    ("DelayedNesterov", {"lr": 0.05, "momentum": 0.5, "buffer_size": 3}),
    ("DelayedNesterov", {"lr": 0.05, "momentum": 0.0}),
]

ABSENT_CASES: Final[list[tuple[str, dict[str, Any]]]] = [
    ("SGD", {"lr": 0.05, "momentum": 0.9, "dampening": 0.2, "weight_decay": 0.05}),
    ("Adam", {"lr": 0.01, "weight_decay": 0.05}),
    ("AdamW", {"lr": 0.01, "weight_decay": 0.05}),
    ("Adagrad", {"lr": 0.05, "lr_decay": 0.01, "weight_decay": 0.05}),
    ("RMSprop", {"lr": 0.01, "momentum": 0.9}),
    ("NAdam", {"lr": 0.01, "weight_decay": 0.05}),
    ("RAdam", {"lr": 0.01}),
    ("DelayedNesterov", {"lr": 0.05, "buffer_size": 3, "activation": 0.25}),
]

NARROW: Final = (torch.float16, torch.bfloat16)

SHAPES: Final = [(40, 7), (7,), (), (1,), (33, 5), (3,), (5, 2)]

small_chunks = cut_into(64, 512)
"""Cuts a model of two KiB into several chunks."""


def make_parameters(
    generator: torch.Generator, dtype: torch.dtype = torch.float32
) -> list[torch.nn.Parameter]:
    return [
        torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
        for shape in SHAPES
    ]


def make_optimizer(
    class_name: str, settings: dict[str, Any], parameters: list[torch.nn.Parameter]
) -> torch.optim.Optimizer:
    """Three groups: two alike, one of its own."""
    made: torch.optim.Optimizer = class_named(class_name)(
        [
            {"params": parameters[:3]},
            {"params": parameters[3:4]},
            {"params": parameters[4:], "lr": settings["lr"] / 2, "weight_decay": 0.02},
        ],
        **settings,
    )
    return made


def gradients_like(
    parameters: list[torch.nn.Parameter], generator: torch.Generator
) -> list[torch.Tensor]:
    return [
        torch.randn(each.shape, generator=generator).to(each.dtype)
        for each in parameters
    ]


def masters_of(parameters: list[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
    """What one process keeps beside a model of 16 bits; the rest as it is."""
    return [
        torch.nn.Parameter(
            each.detach().float() if each.dtype in NARROW else each.detach().clone()
        )
        for each in parameters
    ]


def cast_like(
    masters: list[torch.nn.Parameter], parameters: list[torch.nn.Parameter]
) -> list[torch.Tensor]:
    return [
        master.detach().to(each.dtype)
        for master, each in zip(masters, parameters, strict=True)
    ]


@pytest.mark.parametrize("shard_count", [1, 2, 3])
@pytest.mark.parametrize(("class_name", "settings"), CASES)
def test_shards_equal_one_process(
    class_name: str, settings: dict[str, Any], shard_count: int
) -> None:
    generator = torch.Generator().manual_seed(7)
    parameters = make_parameters(generator)
    optimizer = make_optimizer(class_name, settings, parameters)
    shards = Shards(parameters, {"optimizer": optimizer}, shard_count=shard_count)
    assert len(shards.placement.chunks) >= 4

    for step in range(STEP_COUNT):
        if step == 20:
            optimizer.param_groups[0]["lr"] *= 0.3
            optimizer.param_groups[1]["weight_decay"] = 0.2
        pushes = [
            Push("w1", 3, gradients_like(parameters, generator)),
            Push("w0", 5, gradients_like(parameters, generator)),
        ]
        shards.step(pushes)
        step_in_one_process(optimizer, parameters, pushes)

    assert shards.deviation(parameters) <= DEVIATION_MAX


@pytest.mark.parametrize(("class_name", "settings"), ABSENT_CASES)
def test_absent_gradients_are_skipped_as_torch_skips_them(
    class_name: str, settings: dict[str, Any]
) -> None:
    generator = torch.Generator().manual_seed(11)
    parameters = make_parameters(generator)
    optimizer = make_optimizer(class_name, settings, parameters)
    shards = Shards(parameters, {"optimizer": optimizer}, shard_count=2)

    for step in range(STEP_COUNT):
        pushes = []
        for worker, weight in (("w0", 2), ("w1", 7)):
            gradients: list[torch.Tensor | None] = list(
                gradients_like(parameters, generator)
            )
            gradients[1] = None  # Never, on any worker.
            if worker == "w1":
                gradients[2] = None  # Never on one worker.
            if step % 3:
                gradients[4] = None  # In some steps only.
            if step < 10 or (worker == "w0" and step % 5 == 0):
                gradients[0] = None  # Late, and then not always on both.
            pushes.append(Push(worker, weight, gradients))
        shards.step(pushes)
        step_in_one_process(optimizer, parameters, pushes)

    assert shards.deviation(parameters) <= DEVIATION_MAX
    for entry_index, parameter in enumerate(parameters):
        expected = {0: 40, 1: 0, 4: 17}.get(entry_index, STEP_COUNT)
        assert shards.step_counts(entry_index) == {expected}
        if "step" in optimizer.state.get(parameter, {}):
            assert int(optimizer.state[parameter]["step"]) == expected


@pytest.mark.parametrize("dtype", TYPE_DEVIATION_MAX)
@pytest.mark.parametrize("class_name", ["SGD", "Adam", "Adagrad"])
def test_other_types_equal_one_process(class_name: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(13)
    parameters = make_parameters(generator, dtype)
    settings = {"lr": 0.01, **({"momentum": 0.9} if class_name == "SGD" else {})}
    optimizer = make_optimizer(class_name, settings, parameters)
    shards = Shards(parameters, {"optimizer": optimizer}, shard_count=2)
    masters = masters_of(parameters)
    in_one_process = make_optimizer(class_name, settings, masters)

    for _ in range(STEP_COUNT):
        pushes = [
            Push("w0", 4, gradients_like(parameters, generator)),
            Push("w1", 3, gradients_like(parameters, generator)),
        ]
        shards.step(pushes)
        step_in_one_process(in_one_process, masters, pushes)

    expected = cast_like(masters, parameters)
    assert shards.deviation(expected) <= TYPE_DEVIATION_MAX[dtype]
    different = sum(
        int((ours != theirs).sum())
        for ours, theirs in zip(shards.values(), expected, strict=True)
    )
    if dtype != torch.float64:
        assert different <= 0.01 * sum(each.numel() for each in parameters)


def test_types_may_be_mixed_with_empty_tensors_between() -> None:
    generator = torch.Generator().manual_seed(17)
    parameters = [
        torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
        for shape, dtype in [
            ((3, 50), torch.float32),
            ((0, 4), torch.float32),
            ((70,), torch.bfloat16),
            ((), torch.float64),
            ((1,), torch.float32),
        ]
    ]
    optimizer = torch.optim.AdamW(parameters, lr=0.01)
    shards = Shards(parameters, {"optimizer": optimizer}, shard_count=3)
    masters = masters_of(parameters)
    in_one_process = torch.optim.AdamW(masters, lr=0.01)

    for _ in range(10):
        pushes = [Push("w0", 1, gradients_like(parameters, generator))]
        shards.step(pushes)
        step_in_one_process(in_one_process, masters, pushes)

    assert shards.deviation(cast_like(masters, parameters)) <= DEVIATION_MAX


def test_two_runs_are_equal_bit_for_bit_however_pushes_arrive() -> None:
    def train(arrival: list[int]) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(19)
        parameters = make_parameters(generator)
        optimizer = torch.optim.Adam(parameters)
        shards = Shards(parameters, {"optimizer": optimizer}, shard_count=2)
        for _ in range(5):
            pushes = [
                Push(f"w{rank}", 1 + rank, gradients_like(parameters, generator))
                for rank in range(3)
            ]
            shards.step([pushes[rank] for rank in arrival])
        return shards.values()

    first = train([0, 1, 2])
    for arrival in ([2, 1, 0], [1, 2, 0]):
        for ours, theirs in zip(train(arrival), first, strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize(("class_name", "switches"), CASES)
def test_the_values_that_an_optimizer_keeps_are_as_many_as_the_table_says(
    class_name: str, switches: dict[str, Any]
) -> None:
    """By it a model that would not fit is refused."""
    parameter = torch.ones(5, requires_grad=True)
    parameter.grad = torch.ones(5)
    optimizer = class_named(class_name)([parameter], **switches)
    optimizer.step()
    kept = optimizer.state[parameter].values()
    names = SUPPORTED[class_name].names
    values = [float(switches.get(name, 0.0)) for name in names]
    assert slot_count(class_name, names, values) == sum(
        isinstance(each, torch.Tensor) and each.ndim > 0 for each in kept
    )
