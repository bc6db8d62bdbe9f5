"""The limits of a daemon are read, passed on, and written down."""

from pathlib import Path

import pytest

from psserver.edge.descriptors import fitted
from psserver.edge.limits import DEFAULT_LIMITS, Limits
from pswire.limits import ENTRY_COUNT_MAX
from pswire.reasons import ErrorReason
from pswire.schema import ElementType, ModelSchema, SchemaEntry
from tests.refusals import refused

PAGE = Path(__file__).resolve().parents[4] / "docs" / "limits.md"


def model(*shapes: tuple[int, ...]) -> ModelSchema:
    return ModelSchema(
        tuple(
            SchemaEntry(name=str(number), shape=shape, element_type=ElementType.FLOAT32)
            for number, shape in enumerate(shapes)
        )
    )


def test_they_are_read_and_passed_on_as_they_were_given() -> None:
    limits = Limits.parse(["calls=100", "idle_s=1.5", "calls=200"])
    assert limits == Limits(calls=200, idle_s=1.5)
    arguments = limits.arguments()
    assert {"--limit=calls=200", "--limit=idle-s=1.5"} < {*arguments}
    assert len(arguments) == len(Limits.rows())  # also those that have their defaults
    assert Limits.parse(each.partition("=")[2] for each in arguments) == limits
    texts = [each.removeprefix("--limit=") for each in DEFAULT_LIMITS.arguments()]
    assert Limits.parse(texts) == DEFAULT_LIMITS


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("call=1", "'call' is no limit: give NAME=VALUE.*, calls,"),
        ("calls", "calls: '' is not a whole number from 16 to"),
        ("calls=3.5", "calls: 3.5 is not a whole number"),
        ("idle-s=nan", "idle-s: nan is not a number of seconds"),
        ("tensors=200001", "tensors: 200001 is not .* to 200000"),
        ("connections=1e9", "is not a whole number"),
    ],
)
def test_what_is_no_limit_is_refused_with_those_that_are(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Limits.parse([text])


def test_the_page_has_all_of_them_with_their_defaults() -> None:
    text = PAGE.read_text()
    for name, default, meaning in Limits.rows():
        assert f"| `{name}` | {default} | {meaning} |" in text


def test_models_of_3_gib_and_of_200_000_tensors_fit_in_the_defaults() -> None:
    DEFAULT_LIMITS.check_model(model((3 << 28,)))
    DEFAULT_LIMITS.check_model(model(*[(3,)] * ENTRY_COUNT_MAX))


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        (Limits(tensors=1), r"2 tensors, the limit of this job is 1 \(tensors\)"),
        (Limits(model_bytes=31), r"declares 32 bytes, .* is 31 \(model-bytes\)"),
    ],
)
def test_a_larger_model_is_refused_with_both_numbers(limits: Limits, said: str) -> None:
    with refused(ErrorReason.LIMIT_EXCEEDED, said):
        limits.check_model(model((4,), (4,)))


def test_one_machine_leaves_half_of_few_descriptors_to_others() -> None:
    few = fitted(DEFAULT_LIMITS, 1024)
    assert (few.connections, few.machine_connections) == (768, 384)
    asked = fitted(Limits(machine_connections=5), 1024)
    assert asked.machine_connections == 5
