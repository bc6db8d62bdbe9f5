"""Declarations after the first: whose slices count, and what becomes of the state."""

from dataclasses import replace

import pytest
import torch

from psserver.shard.tensors.apply_engine import ApplyEngine
from psserver.shard.tensors.contribution import Contribution
from pswire.job_terms import JobTerms
from pswire.optimizers import SUPPORTED
from pswire.placement import place
from pswire.reasons import ErrorReason, Refusal
from pswire.schema import (
    ElementType,
    ModelSchema,
    OptimizerSpec,
    ParameterGroup,
    SchemaEntry,
)
from pswire.torch_types import buffer_of, tensor_from_buffer
from tests.refusals import refused

SCHEMA = ModelSchema(
    tuple(
        SchemaEntry(name=name, shape=(2,), element_type=ElementType.FLOAT32)
        for name in ("first", "second", "third")
    )
)
MOMENTUM = (0.5, 0.9, 0.0, 0.0, 0.0, 0.0)


def sgd(*groups: tuple[int, ...], exchange_count: int = 0) -> OptimizerSpec:
    return OptimizerSpec(
        "optimizer",
        "SGD",
        SUPPORTED["SGD"].names,
        tuple(ParameterGroup(entries, MOMENTUM) for entries in groups),
        exchange_count,
    )


FIRST = sgd((0,))
GROWN = sgd((0,), (1,))
OTHER = sgd((0,), exchange_count=1)


@pytest.fixture
def engine() -> ApplyEngine:
    return ApplyEngine(
        JobTerms(schema=SCHEMA, optimizers=(FIRST, GROWN, OTHER)), place(SCHEMA, 1), 0
    )


def push(*present: bool) -> Contribution:
    ones = torch.ones(2 * sum(present))
    return Contribution(
        worker_id="w0", weight=1.0, presence=present, data=buffer_of(ones)
    )


def step(engine: ApplyEngine, spec: OptimizerSpec, *pushes: Contribution) -> None:
    engine.apply(
        0,
        optimizer="optimizer",
        contributions=pushes,
        total_weight=len(pushes),
        hyperparameters=[group.hyperparameters for group in spec.groups],
        spec_digest=spec.digest,
    )


def values_of(engine: ApplyEngine) -> list[float]:
    data = memoryview(engine.vectors.read(0))
    return tensor_from_buffer(data, ElementType.FLOAT32).tolist()[::2]


def test_state_goes_on_where_a_group_was_added(engine: ApplyEngine) -> None:
    step(engine, FIRST, push(True, False, False))
    step(engine, GROWN, push(True, True, False))

    # 0.5, then 0.5 * (0.9 + 1); the second slice has had one step.
    assert values_of(engine) == pytest.approx([-1.45, -0.5, 0.0])


def test_state_begins_anew_where_another_optimizer_took_the_place(
    engine: ApplyEngine,
) -> None:
    step(engine, FIRST, push(True, False, False))
    assert engine.export_state("optimizer", 0)
    assert not engine.export_state("optimizer", 0, spec_digest=OTHER.digest)
    step(engine, OTHER, push(True, False, False))

    assert values_of(engine) == pytest.approx([-1.0, 0.0, 0.0])


def test_slices_that_only_other_declarations_have_are_left_out(
    engine: ApplyEngine,
) -> None:
    engine.check_chunk(0, (True, True, False), 16, optimizer="optimizer")
    step(engine, FIRST, push(True, True, False), push(False, True, False))

    assert values_of(engine) == pytest.approx([-0.25, 0.0, 0.0])


def test_no_push_may_have_a_slice_of_no_declaration(engine: ApplyEngine) -> None:
    with pytest.raises(Refusal, match="slice of tensor 2"):
        engine.check_chunk(0, (True, True, True), 24, optimizer="optimizer")
    assert engine.updatable(0) == (True, True, False)


def test_a_later_declaration_widens_what_may_come(engine: ApplyEngine) -> None:
    wider = sgd((0,), (1,), (2,))
    assert not engine.declared.has("optimizer", wider.digest)

    engine.declare(wider)

    assert engine.declared.has("optimizer", wider.digest)
    assert engine.updatable(0) == (True, True, True)
    step(engine, wider, push(False, False, True))
    assert values_of(engine) == pytest.approx([0.0, 0.0, -0.5])


def test_values_of_groups_are_no_part_of_a_declaration() -> None:
    (group,) = FIRST.groups
    faster = replace(FIRST, groups=(replace(group, hyperparameters=(9.0,) * 6),))
    assert faster.digest == FIRST.digest
    assert len({FIRST.digest, GROWN.digest, OTHER.digest}) == 3


def test_an_unknown_declaration_is_refused(engine: ApplyEngine) -> None:
    with refused(ErrorReason.OPTIMIZER_MISMATCH, "was never declared"):
        engine.declared.check_hyperparameters("optimizer", [MOMENTUM], spec_digest="x")


def test_a_slice_that_was_taken_out_stands_still_and_keeps_its_state(
    engine: ApplyEngine,
) -> None:
    step(engine, GROWN, push(True, True, False))
    step(engine, FIRST, push(True, True, False))
    assert values_of(engine) == pytest.approx([-1.45, -0.5, 0.0])

    step(engine, GROWN, push(True, True, False))

    # 0.5 * (1 + 1.9 + 2.71), and 0.5 * (1 + 1.9) for the one that had a step less.
    assert values_of(engine) == pytest.approx([-2.805, -1.45, 0.0])


def test_state_moves_with_a_slice_to_another_group(engine: ApplyEngine) -> None:
    moved = sgd((), (1, 0))
    engine.declare(moved)
    step(engine, GROWN, push(True, True, False))

    step(engine, moved, push(True, True, False))

    assert values_of(engine) == pytest.approx([-1.45, -1.45, 0.0])


def test_state_of_a_slice_that_was_taken_out_is_told_checked_and_loaded(
    engine: ApplyEngine,
) -> None:
    step(engine, GROWN, push(True, True, False))
    step(engine, FIRST, push(True, False, False))

    found = engine.export_state("optimizer", 0)
    engine.check_state("optimizer", 0, found)
    engine.load_state("optimizer", {0: found})
    step(engine, GROWN, push(False, True, False))
    assert values_of(engine) == pytest.approx([-1.45, -1.45, 0.0])

    wrong = {key._replace(name="exp_avg"): value for key, value in found.items()}
    beyond = {key: value for key, value in wrong.items() if key.first == 1}
    assert beyond, "the slices had other histories"
    with pytest.raises(Refusal, match="the state of another"):
        engine.check_state("optimizer", 0, beyond)


def test_state_that_is_thrown_away_is_gone_for_slices_that_were_taken_out(
    engine: ApplyEngine,
) -> None:
    step(engine, GROWN, push(True, True, False))
    engine.load_state("optimizer", {}, spec_digest=FIRST.digest)

    step(engine, GROWN, push(True, True, False))

    assert values_of(engine) == pytest.approx([-1.0, -1.0, 0.0])
