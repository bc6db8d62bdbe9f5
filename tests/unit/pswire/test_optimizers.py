"""The table of optimizers: held against this torch, and what it refuses."""

import math
import subprocess
import sys
from typing import Any

import pytest
import torch

from pswire.optimizer_classes import OWN, class_named
from pswire.optimizers import (
    SUPPORTED,
    check_supported,
    check_values,
    flatten_group,
    unflatten_group,
)
from pswire.reasons import ErrorReason, Refusal
from tests.refusals import refused

IMPLEMENTATION_SWITCHES = {"foreach", "fused", "capturable", "differentiable"}
NOT_A_CHOICE = {"AdamW": {"decoupled_weight_decay"}}


def group_of(class_name: str, **settings: Any) -> dict[str, Any]:  # noqa: ANN401
    made = class_named(class_name)([torch.zeros(1)], **settings)
    group: dict[str, Any] = made.param_groups[0]
    del group["params"]
    return group


@pytest.mark.parametrize("class_name", SUPPORTED)
def test_the_table_names_all_that_torch_reads_from_a_group(class_name: str) -> None:
    keys = {name.partition(".")[0] for name in SUPPORTED[class_name].names}
    expected = set(group_of(class_name)) - IMPLEMENTATION_SWITCHES
    assert keys == expected - NOT_A_CHOICE.get(class_name, set())


@pytest.mark.parametrize("class_name", SUPPORTED)
def test_groups_travel_and_come_back(class_name: str) -> None:
    group = group_of(class_name)
    names = SUPPORTED[class_name].names
    values = flatten_group(class_name, group)
    check_values(class_name, names, values, declared=values)

    returned = unflatten_group(class_name, names, values)
    for key, value in returned.items():
        assert value == group[key]
        assert isinstance(value, bool) == isinstance(group[key], bool)


def test_pairs_have_a_place_each_and_tensors_are_read() -> None:
    group = group_of("AdamW", lr=torch.tensor(0.25), betas=(0.5, 0.75), amsgrad=True)
    values = flatten_group("AdamW", group)
    named = dict(zip(SUPPORTED["AdamW"].names, values, strict=True))
    assert named["lr"] == 0.25
    assert (named["betas.0"], named["betas.1"]) == (0.5, 0.75)
    assert named["amsgrad"] == 1.0


def test_what_torch_reads_from_defaults_is_taken_from_there() -> None:
    names = SUPPORTED["Adagrad"].names
    optimizer = torch.optim.Adagrad(
        [{"params": [torch.zeros(1)], "initial_accumulator_value": 9.0}],
        initial_accumulator_value=0.5,
    )
    values = flatten_group("Adagrad", optimizer.param_groups[0], optimizer.defaults)
    assert values[names.index("initial_accumulator_value")] == 0.5


def test_a_torch_that_lacks_a_switch_sends_what_it_does() -> None:
    group = group_of("RAdam")
    del group["maximize"], group["decoupled_weight_decay"]
    assert flatten_group("RAdam", group)[-2:] == (0.0, 0.0)


@pytest.mark.parametrize("lr", ["fast", None, torch.zeros(2)])
def test_a_value_that_is_no_number_is_refused(lr: object) -> None:
    with refused(ErrorReason.HYPERPARAMETER_INVALID, "SGD's lr is not a number"):
        flatten_group("SGD", {**group_of("SGD"), "lr": lr})


@pytest.mark.parametrize(
    ("class_name", "name", "value", "says"),
    [
        ("SGD", "lr", -0.1, "is less than 0"),
        ("SGD", "lr", math.nan, "is not finite"),
        ("SGD", "weight_decay", math.inf, "is not finite"),
        ("SGD", "nesterov", 2.0, "is neither 0 nor 1"),
        ("Adam", "betas.1", 1.0, "is not less than 1"),
        ("Adadelta", "rho", 1.5, "is more than 1"),
        ("DelayedNesterov", "buffer_size", 0.0, "is less than 1"),
        ("DelayedNesterov", "buffer_size", 2.5, "is not a whole number"),
    ],
)
def test_values_out_of_range_are_refused(
    class_name: str, name: str, value: float, says: str
) -> None:
    names = SUPPORTED[class_name].names
    values = list(flatten_group(class_name, group_of(class_name)))
    values[names.index(name)] = value
    with pytest.raises(Refusal) as caught:
        check_values(class_name, names, values)
    assert caught.value.reason == ErrorReason.HYPERPARAMETER_INVALID
    assert f"{class_name}'s {name} = {value!r} {says}" in caught.value.message


def test_dampening_may_be_negative_as_in_torch() -> None:
    values = flatten_group("SGD", group_of("SGD", momentum=0.5, dampening=-1.0))
    check_values("SGD", SUPPORTED["SGD"].names, values)


@pytest.mark.parametrize(
    ("class_name", "settings"),
    [
        ("Adam", {"amsgrad": True}),
        ("RMSprop", {"centered": True}),
        ("RMSprop", {"momentum": 0.9}),
    ],
)
def test_what_needs_state_from_the_first_step_may_not_change_later(
    class_name: str, settings: dict[str, Any]
) -> None:
    names = SUPPORTED[class_name].names
    declared = flatten_group(class_name, group_of(class_name))
    values = flatten_group(class_name, group_of(class_name, **settings))
    with pytest.raises(Refusal, match="at prepare"):
        check_values(class_name, names, values, declared=declared)
    check_values(class_name, names, values, declared=values)


def test_other_names_or_too_few_values_are_refused() -> None:
    names = SUPPORTED["SGD"].names
    for given, values in ((names[:-1], (0.1,) * 5), (names, (0.1,) * 5)):
        with pytest.raises(Refusal, match="SGD takes lr, momentum"):
            check_values("SGD", given, values)


@pytest.mark.parametrize(
    ("class_name", "module", "why"),
    [
        ("Muon", "torch.optim._muon", "whole matrices"),
        ("LBFGS", "torch.optim.lbfgs", "all parameters at once"),
        ("Adan", "torch.optim", "no such optimizer is known"),
        ("Adam", "apex.optimizers", "torch.optim only"),
    ],
)
def test_optimizers_off_the_list_are_refused_with_the_list(
    class_name: str, module: str, why: str
) -> None:
    with pytest.raises(Refusal) as caught:
        check_supported(class_name, module)
    assert caught.value.reason == ErrorReason.OPTIMIZER_UNSUPPORTED
    assert class_name in caught.value.message
    assert why in caught.value.message
    assert ", ".join(SUPPORTED) in caught.value.message


@pytest.mark.parametrize("class_name", sorted(SUPPORTED.keys() - OWN.keys()))
def test_classes_of_torch_are_supported_where_they_are_defined(class_name: str) -> None:
    check_supported(class_name, getattr(torch.optim, class_name).__module__)


def test_every_class_of_this_torch_is_listed_or_refused_with_a_reason() -> None:
    for name, found in vars(torch.optim).items():
        is_optimizer = isinstance(found, type) and issubclass(
            found, torch.optim.Optimizer
        )
        if not is_optimizer or name == "Optimizer" or name in SUPPORTED:
            continue
        with pytest.raises(Refusal) as caught:
            check_supported(name)
        assert "no such optimizer" not in caught.value.message


def test_the_table_costs_no_torch() -> None:
    code = "import sys, pswire.optimizers; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
