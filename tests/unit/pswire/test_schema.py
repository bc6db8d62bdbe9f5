"""What a schema refuses, what its digest covers, and how a difference reads."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pswire.limits import (
    DIMENSION_COUNT_MAX,
    ELEMENT_COUNT_MAX,
    ENTRY_COUNT_MAX,
    NAME_BYTES_MAX,
)
from pswire.reasons import ErrorReason, Refusal
from pswire.schema import ElementType, EntryKind, ModelSchema, SchemaEntry
from tests.refusals import refused

WEIGHT = SchemaEntry(name="w", shape=(3, 4), element_type=ElementType.FLOAT32)
BIAS = replace(WEIGHT, name="b", shape=(4,))
TWICE = "is declared twice: a name, also a tied one, is of one tensor, once"
SCALAR = replace(WEIGHT, name="s", shape=())


def schema(*entries: SchemaEntry) -> ModelSchema:
    return ModelSchema(entries)


entries = st.builds(
    SchemaEntry,
    model=st.sampled_from(["model", "model1"]),
    name=st.sampled_from(["a", "b", "c.weight"]),
    shape=st.sampled_from([(), (0,), (3,), (3, 4)]),
    element_type=st.sampled_from([ElementType.FLOAT32, ElementType.BFLOAT16]),
    kind=st.sampled_from(EntryKind),
    tied_names=st.sampled_from([(), ("t",), ("t", "u")]),
    trainable=st.booleans(),
)
schemas = st.lists(
    entries.map(
        lambda entry: replace(
            entry, tied_names=tuple(f"{entry.name}.{each}" for each in entry.tied_names)
        )
    ),
    max_size=4,
    unique_by=lambda entry: (entry.model, entry.name),
).map(lambda drawn: ModelSchema(tuple(drawn)))


@settings(derandomize=True, deadline=None)
@given(schemas, schemas)
def test_digests_are_equal_exactly_when_nothing_but_the_order_differs(
    first: ModelSchema, second: ModelSchema
) -> None:
    first.validate()

    order = first.order_of(second)
    if first.differences(second):
        assert first.digest() != second.digest()
    else:
        assert order is not None
        here = {first.entries[position] for position in order}
        assert sorted(order) == list(range(len(first.entries)))
        assert {entry.name for entry in here} == {e.name for e in second.entries}
        in_order = sorted(zip(order, second.entries, strict=True), key=lambda e: e[0])
        again = ModelSchema(tuple(entry for _, entry in in_order))
        assert again.digest() == first.digest()


@settings(derandomize=True, deadline=None)
@given(schemas)
def test_what_may_change_in_a_run_is_not_in_the_digest(before: ModelSchema) -> None:
    after = ModelSchema(
        tuple(replace(entry, trainable=not entry.trainable) for entry in before.entries)
    )

    assert after.digest() == before.digest()
    assert not before.differences(after)


def test_the_digest_is_the_same_in_every_release() -> None:
    assert schema(WEIGHT, BIAS).digest()[:16] == "96f70c564757b776"


@pytest.mark.parametrize(
    ("job", "here", "lines"),
    [
        ((WEIGHT,), (WEIGHT,), []),
        (
            (WEIGHT, BIAS),
            (WEIGHT,),
            ["- model.b: parameter [4] float32 (only in the job)"],
        ),
        (
            (WEIGHT,),
            (WEIGHT, replace(BIAS, kind=EntryKind.BUFFER)),
            ["+ model.b: buffer [4] float32 (only here)"],
        ),
        (
            (WEIGHT,),
            (replace(WEIGHT, shape=(4, 4), element_type=ElementType.FLOAT16),),
            [
                "! model.w: parameter [3, 4] float32 in the job, "
                "parameter [4, 4] float16 here"
            ],
        ),
        (
            (WEIGHT,),
            (replace(WEIGHT, tied_names=("v",)),),
            ["! model.w: tied to [] in the job, to ['v'] here"],
        ),
        ((WEIGHT, BIAS, SCALAR), (WEIGHT, SCALAR, BIAS), []),
        (
            (WEIGHT,),
            (replace(WEIGHT, model="generator"),),
            [
                "! the models are model in the job, generator here: give prepare() the "
                "same models, under the same names, on all workers",
                "- model.w: parameter [3, 4] float32 (only in the job)",
                "+ generator.w: parameter [3, 4] float32 (only here)",
            ],
        ),
        (
            (replace(WEIGHT, name="\x1b[2J\n"),),
            (),
            [r"- 'model.\x1b[2J\n': parameter [3, 4] float32 (only in the job)"],
        ),
    ],
)
def test_a_difference_says_what_differs_and_on_which_side(
    job: tuple[SchemaEntry, ...], here: tuple[SchemaEntry, ...], lines: list[str]
) -> None:
    assert ModelSchema(job).differences(ModelSchema(here)) == lines


@pytest.mark.parametrize(
    "name", ["w", "ü" * (NAME_BYTES_MAX // 2), "../etc", "<b>", "a\nb", "重み"]
)
def test_any_name_that_torch_accepts_is_accepted(name: str) -> None:
    schema(replace(WEIGHT, name=name)).validate()


@pytest.mark.parametrize(
    ("name", "reason", "text"),
    [
        ("", ErrorReason.MALFORMED_MESSAGE, "is empty"),
        ("\ud800", ErrorReason.MALFORMED_MESSAGE, "can't be written in UTF-8"),
        (
            "x" * (NAME_BYTES_MAX + 1),
            ErrorReason.LIMIT_EXCEEDED,
            "has 1025 bytes in UTF-8, of at most 1024",
        ),
    ],
)
@pytest.mark.parametrize("place", ["model", "name", "tied_names"])
def test_other_names_are_refused(
    name: str, reason: ErrorReason, text: str, place: str
) -> None:
    entry = replace(
        WEIGHT,
        model=name if place == "model" else "model",
        name=name if place == "name" else "w",
        tied_names=(name,) if place == "tied_names" else (),
    )

    with refused(reason, text):
        schema(entry).validate()


@pytest.mark.parametrize(
    ("refused", "text"),
    [
        ((WEIGHT, BIAS, WEIGHT), f"tensor 'w' of 'model' {TWICE}"),
        ((replace(WEIGHT, tied_names=("b",)), BIAS), f"tensor 'b' of 'model' {TWICE}"),
        ((BIAS, replace(WEIGHT, tied_names=("b",))), f"tensor 'b' of 'model' {TWICE}"),
        ((replace(WEIGHT, tied_names=("w",)),), f"tensor 'w' of 'model' {TWICE}"),
        (
            (replace(WEIGHT, tied_names=("t", "t")),),
            f"tensor 't' of 'model' {TWICE}",
        ),
        (
            (replace(WEIGHT, tied_names=("t",)), replace(BIAS, tied_names=("t",))),
            f"tensor 't' of 'model' {TWICE}",
        ),
        ((replace(WEIGHT, shape=(3, -1)),), "tensor 'w' has a negative size"),
    ],
)
def test_a_schema_that_makes_no_sense_is_refused(
    refused: tuple[SchemaEntry, ...], text: str
) -> None:
    with pytest.raises(Refusal) as caught:
        ModelSchema(refused).validate()
    assert caught.value.reason is ErrorReason.MALFORMED_MESSAGE
    assert caught.value.message == text


def test_equal_names_in_two_models_never_meet() -> None:
    schema(WEIGHT, replace(WEIGHT, model="model1")).validate()


@pytest.mark.parametrize(
    ("refused", "text"),
    [
        (
            (replace(WEIGHT, shape=(2,) * (DIMENSION_COUNT_MAX + 1)),),
            "tensor 'w' has 65 dimensions, the limit is 64",
        ),
        # In 64-bit arithmetic this product wraps around to 4.
        (
            (replace(WEIGHT, shape=(4194305, 4194305, 211106198978564)),),
            f"the limit is {ELEMENT_COUNT_MAX}",
        ),
        (
            (
                replace(WEIGHT, shape=(ELEMENT_COUNT_MAX,)),
                replace(BIAS, shape=(1,)),
            ),
            f"the model declares {ELEMENT_COUNT_MAX + 1} elements",
        ),
        (
            (WEIGHT,) * (ENTRY_COUNT_MAX + 1),
            f"the model has {ENTRY_COUNT_MAX + 1} tensors",
        ),
    ],
)
def test_a_schema_that_is_too_large_is_refused_before_it_costs(
    refused: tuple[SchemaEntry, ...], text: str
) -> None:
    with pytest.raises(Refusal) as caught:
        ModelSchema(refused).validate()
    assert caught.value.reason is ErrorReason.LIMIT_EXCEEDED
    assert text in caught.value.message


def test_the_largest_schema_is_accepted() -> None:
    schema(
        replace(WEIGHT, shape=(ELEMENT_COUNT_MAX,)),
        replace(BIAS, shape=(0,) * DIMENSION_COUNT_MAX),
    ).validate()
