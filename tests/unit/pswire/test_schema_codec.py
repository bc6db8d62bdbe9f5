"""Schema and optimizers survive the wire, and hostile ones are refused by name."""

import math
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pswire.reasons import ErrorReason, Refusal
from pswire.schema import (
    ElementType,
    EntryKind,
    ModelSchema,
    OptimizerSpec,
    ParameterGroup,
    SchemaEntry,
)
from pswire.schema_codec import (
    optimizer_from_message,
    optimizer_to_message,
    schema_from_message,
    schema_to_message,
)
from pswire.v1 import schema_pb2

names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)
schemas = st.lists(
    st.builds(
        SchemaEntry,
        model=names,
        name=names,
        shape=st.lists(st.integers(0, 9), max_size=4).map(tuple),
        element_type=st.sampled_from(ElementType),
        kind=st.sampled_from(EntryKind),
        tied_names=st.lists(names, max_size=2).map(tuple),
        trainable=st.booleans(),
    ),
    max_size=5,
    unique_by=lambda entry: (entry.model, entry.name),
).map(lambda drawn: ModelSchema(tuple(drawn)))


@settings(derandomize=True, deadline=None)
@given(schemas)
def test_a_schema_comes_back(schema: ModelSchema) -> None:
    encoded = schema_to_message(schema).SerializeToString()

    assert schema_from_message(schema_pb2.ModelSchema.FromString(encoded)) == schema


@pytest.mark.parametrize("value", [0, 11, -1])
def test_an_unknown_element_type_is_refused_with_those_known(value: int) -> None:
    message = schema_to_message(MODEL)
    message.entries[1].element_type = value  # type: ignore[assignment]

    with pytest.raises(Refusal, match=f"'b' has the element type {value}, known are"):
        schema_from_message(message)


@pytest.mark.parametrize("value", [0, 3])
def test_an_unknown_kind_is_refused_with_those_known(value: int) -> None:
    message = schema_to_message(MODEL)
    message.entries[0].kind = value  # type: ignore[assignment]

    with pytest.raises(Refusal, match=rf"'w' has the kind {value}, known are 1 \(para"):
        schema_from_message(message)


def test_enums_are_those_of_the_proto() -> None:
    assert {f"ELEMENT_TYPE_{item.name}": int(item) for item in ElementType} == {
        name: number for name, number in schema_pb2.ElementType.items() if number
    }
    assert {f"ENTRY_KIND_{item.name}": int(item) for item in EntryKind} == {
        name: number for name, number in schema_pb2.EntryKind.items() if number
    }


def test_both_sides_validate() -> None:
    doubled = ModelSchema((MODEL.entries[0], MODEL.entries[0]))
    message = schema_to_message(MODEL)
    message.entries[1].name = "w"

    with pytest.raises(Refusal, match="declared twice"):
        schema_to_message(doubled)
    with pytest.raises(Refusal, match="declared twice"):
        schema_from_message(message)


MODEL = ModelSchema(
    (
        SchemaEntry(name="w", shape=(3, 4), element_type=ElementType.FLOAT32),
        SchemaEntry(name="b", shape=(4,), element_type=ElementType.FLOAT32),
        SchemaEntry(
            name="mean",
            shape=(4,),
            element_type=ElementType.FLOAT32,
            kind=EntryKind.BUFFER,
        ),
    )
)
ADAM = OptimizerSpec(
    name="optimizer",
    class_name="Adam",
    hyperparameter_names=("lr", "eps"),
    groups=(
        ParameterGroup((1,), (1e-3, 1e-8)),
        ParameterGroup((), (0.5, math.inf)),
        ParameterGroup((0,), (0.0, -0.0)),
    ),
    loss_is_sum=True,
)


def test_an_optimizer_comes_back() -> None:
    encoded = optimizer_to_message(ADAM).SerializeToString()
    message = schema_pb2.OptimizerSpec.FromString(encoded)

    assert optimizer_from_message(message, MODEL) == ADAM


def set_indexes(message: schema_pb2.OptimizerSpec, *indexes: int) -> None:
    message.groups[1].entry_indexes[:] = indexes


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            lambda message: set_indexes(message, 3),
            "group 1 of optimizer 'optimizer' refers to tensor 3, the model has 3",
        ),
        (
            lambda message: set_indexes(message, -1),
            "group 1 of optimizer 'optimizer' refers to tensor -1, the model has 3",
        ),
        (
            lambda message: set_indexes(message, 2),
            "group 1 of optimizer 'optimizer' refers to 'mean', which is a buffer",
        ),
        (
            lambda message: set_indexes(message, 1),
            "group 1 of optimizer 'optimizer' refers to 'b', which a group has already",
        ),
        (
            lambda message: message.groups[2].hyperparameters.values.pop(),
            "group 2 of optimizer 'optimizer' has 1 hyperparameters, expected 2",
        ),
        (
            lambda message: message.hyperparameter_names.append("lr"),
            "optimizer 'optimizer' names a hyperparameter twice",
        ),
        (
            lambda message: message.ClearField("name"),
            "the name '' of an optimizer is empty",
        ),
        (
            lambda message: message.ClearField("class_name"),
            "optimizer 'optimizer' has no class",
        ),
    ],
)
def test_an_optimizer_that_makes_no_sense_is_refused(
    change: Callable[[schema_pb2.OptimizerSpec], object], text: str
) -> None:
    message = optimizer_to_message(ADAM)
    change(message)

    with pytest.raises(Refusal) as caught:
        optimizer_from_message(message, MODEL)
    assert caught.value.reason is ErrorReason.MALFORMED_MESSAGE
    assert caught.value.message == text
