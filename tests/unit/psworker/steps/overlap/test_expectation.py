"""When a gradient counts as final, as the steps before have shown."""

import pytest

from pswire.placement import place
from pswire.schema import ElementType, ModelSchema, SchemaEntry
from psworker.steps.overlap.expectation import Expectation
from tests.doubles.core_values import sgd

SCHEMA = ModelSchema(
    tuple(
        SchemaEntry(name=name, shape=(8,), element_type=ElementType.FLOAT32)
        for name in ("a", "b", "c")
    )
)


@pytest.fixture
def one() -> Expectation:
    """All three tensors in one chunk, of one optimizer."""
    return Expectation(place(SCHEMA, 1), {"optimizer": sgd(groups=((0, 1, 2),))})


def noted(expectation: Expectation, *entries: int) -> list[list[int]]:
    return [[c.index for c in expectation.note(entry)] for entry in entries]


def test_the_first_step_shows_what_there_is_to_expect(one: Expectation) -> None:
    assert noted(one, 2, 1, 0) == [[], [], []]
    one.stepped("optimizer")

    assert noted(one, 2, 1, 0) == [[], [], [0]]


def test_a_gradient_of_several_backward_passes_is_final_with_the_last(
    one: Expectation,
) -> None:
    noted(one, 2, 1, 0, 2, 1, 0)
    one.stepped("optimizer")

    assert noted(one, 2, 1, 0, 2, 1, 0) == [[]] * 5 + [[0]]


def test_a_tensor_that_was_not_used_is_not_waited_for(one: Expectation) -> None:
    noted(one, 2, 0)
    one.stepped("optimizer")

    assert noted(one, 2, 1, 0) == [[], [], [0]]


def test_optimizers_that_step_in_turn_are_told_apart() -> None:
    specs = {"d": sgd(groups=((0,),)), "g": sgd(groups=((1,),))}
    expectation = Expectation(place(SCHEMA, 1), specs)
    for _ in range(2):
        noted(expectation, 0, 0)
        expectation.stepped("d")
        noted(expectation, 0, 1)
        expectation.stepped("g")

    assert expectation.optimizer == "d"
    assert noted(expectation, 0, 0) == [[], [0]]
    expectation.stepped("d")
    assert expectation.optimizer == "g"
    assert noted(expectation, 0, 1) == [[], [0]]


def test_a_last_tensor_without_elements_makes_no_chunk_final() -> None:
    last = SchemaEntry(name="d", shape=(0, 4), element_type=ElementType.FLOAT32)
    schema = ModelSchema((*SCHEMA.entries, last))
    spec = sgd(groups=((0, 1, 2, 3),))
    expectation = Expectation(place(schema, 1), {"optimizer": spec})
    noted(expectation, 3, 2, 1, 0)
    expectation.stepped("optimizer")

    assert noted(expectation, 3, 2, 1, 0) == [[], [], [], [0]]
