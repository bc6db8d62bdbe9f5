from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from pswire.schema import ElementType, EntryKind
from psworker.errors import (
    ConfigurationError,
    OptimizerUnsupportedError,
    UnsupportedError,
)
from psworker.optim.model_schema import bind_models, describe_optimizer


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Embedding(5, 3)
        self.norm = nn.BatchNorm1d(3)
        self.decoder = nn.Linear(3, 5, bias=False)
        self.decoder.weight = self.encoder.weight
        self.register_buffer("scratch", torch.zeros(2), persistent=False)


def test_parameters_come_in_order_and_buffers_after_them() -> None:
    bound = bind_models({"model": Tied()})

    assert [entry.name for entry in bound.schema.entries] == [
        "encoder.weight",
        "norm.weight",
        "norm.bias",
        "norm.running_mean",
        "norm.running_var",
        "norm.num_batches_tracked",
    ]
    assert [entry.kind for entry in bound.schema.entries[2:4]] == [
        EntryKind.PARAMETER,
        EntryKind.BUFFER,
    ]
    assert len(bound.models) == 1


def test_entries_and_their_ties_are_those_of_the_state_dict() -> None:
    model = Tied()
    names = {
        name
        for entry in bind_models({"model": model}).schema.entries
        for name in (entry.name, *entry.tied_names)
    }

    assert names == set(model.state_dict())


def test_a_module_registered_twice_is_a_tie_too() -> None:
    layer = nn.Linear(2, 2)
    model = nn.ModuleDict({"a": layer, "b": layer})

    entries = bind_models({"model": model}).schema.entries

    assert [(entry.name, entry.tied_names) for entry in entries] == [
        ("a.weight", ("b.weight",)),
        ("a.bias", ("b.bias",)),
    ]


def test_shape_type_and_frozenness_are_described() -> None:
    model = nn.Linear(2, 3, dtype=torch.bfloat16)
    model.bias.requires_grad_(False)

    weight, bias = bind_models({"net": model}).schema.entries

    assert (weight.model, weight.shape) == ("net", (3, 2))
    assert weight.element_type == ElementType.BFLOAT16
    assert (weight.trainable, bias.trainable) == (True, False)


def test_wrappers_leave_no_trace_in_names() -> None:
    plain = nn.Linear(2, 2)
    compiled = torch.compile(plain, backend="eager")

    for wrapped in (nn.DataParallel(plain), compiled):
        assert isinstance(wrapped, nn.Module)
        names = [entry.name for entry in bind_models({"model": wrapped}).schema.entries]
        assert names == ["weight", "bias"]


def test_models_that_share_a_tensor_are_refused() -> None:
    layer = nn.Linear(2, 2)

    with pytest.raises(ConfigurationError, match="share the tensor 'weight'"):
        bind_models({"model": layer, "model1": nn.Sequential(layer)})


@pytest.mark.parametrize(
    ("make", "kind", "text"),
    [
        (lambda: nn.LazyLinear(3), ConfigurationError, "no values yet"),
        (lambda: nn.Linear(2, 2, device="meta"), ConfigurationError, "no values yet"),
        (lambda: nn.Embedding(2, 2, max_norm=1), UnsupportedError, "without max_norm"),
        (lambda: nn.Linear(2, 2, dtype=torch.cfloat), UnsupportedError, "complex64"),
    ],
)
def test_what_can_not_be_sent_is_refused_with_a_cure(
    make: Callable[[], nn.Module], kind: type[Exception], text: str
) -> None:
    with pytest.raises(kind, match=text):
        bind_models({"model": make()})


def test_an_optimizer_is_described_by_identity_of_its_parameters() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    groups: list[dict[str, Any]] = [
        {"params": model[1].parameters()},
        {"params": [model[0].bias], "lr": 0.5, "momentum": 0.9},
    ]
    optimizer = torch.optim.SGD(groups, lr=0.1)

    spec = describe_optimizer("optimizer", optimizer, bind_models({"model": model}))

    assert spec.class_name == "SGD"
    assert [group.entry_indexes for group in spec.groups] == [(2, 3), (1,)]
    position = spec.hyperparameter_names.index("lr")
    assert [g.hyperparameters[position] for g in spec.groups] == [0.1, 0.5]


def test_an_unsupported_optimizer_is_refused_with_the_list() -> None:
    model = nn.Linear(2, 2)

    with pytest.raises(OptimizerUnsupportedError, match=r"SGD.*AdamW"):
        describe_optimizer(
            "optimizer",
            torch.optim.LBFGS(model.parameters()),
            bind_models({"model": model}),
        )


def test_a_parameter_of_no_model_is_named() -> None:
    model, other = nn.Linear(2, 2), nn.Linear(7, 7)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)

    with pytest.raises(ConfigurationError, match=r"shape \[7, 7\] that belongs to no"):
        describe_optimizer("optimizer", optimizer, bind_models({"model": model}))


def test_the_state_that_adagrad_is_built_with_is_no_step() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adagrad(model.parameters())

    spec = describe_optimizer("optimizer", optimizer, bind_models({"model": model}))

    assert spec.class_name == "Adagrad"


def test_a_differentiable_optimizer_is_refused() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, differentiable=True)

    with pytest.raises(UnsupportedError, match="differentiable"):
        describe_optimizer("optimizer", optimizer, bind_models({"model": model}))


def test_buffers_of_one_type_stand_together_over_all_models() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(3))

    entries = bind_models({"model": build(), "model1": build()}).schema.entries
    types = [entry.element_type for entry in entries if entry.kind == EntryKind.BUFFER]
    assert types == [ElementType.FLOAT32] * 8 + [ElementType.INT64] * 4


def test_an_optimizer_of_a_buffer_is_refused() -> None:
    model = nn.BatchNorm1d(2)
    model.codes = nn.Parameter(torch.arange(3), requires_grad=False)
    bound = bind_models({"model": model})
    for tensor, what in (
        (model.running_mean, "'running_mean' of model, a buffer [2] float32"),
        (model.codes, "'codes' of model, a buffer [3] int64"),
    ):
        groups: list[dict[str, Any]] = [{"params": [model.weight]}]
        optimizer = torch.optim.SGD([*groups, {"params": [tensor]}])
        with pytest.raises(ConfigurationError) as caught:
            describe_optimizer("optimizer", optimizer, bound)
        assert str(caught.value) == (
            f"group 1 of optimizer holds {what}, which no optimizer updates: leave it "
            "out of the optimizer, or make it an nn.Parameter of floats"
        )
