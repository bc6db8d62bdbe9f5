"""The engine's part of clipping: what it measures is what it applies."""

import math

import pytest
import torch

from psserver.shard.tensors.apply_engine import ApplyEngine
from psserver.shard.tensors.contribution import Contribution
from pswire.job_terms import JobTerms
from pswire.optimizers import SUPPORTED
from pswire.placement import place
from pswire.schema import (
    ElementType,
    EntryKind,
    ModelSchema,
    OptimizerSpec,
    ParameterGroup,
    SchemaEntry,
)
from pswire.torch_types import TORCH_DTYPES, buffer_of, tensor_from_buffer

SGD_VALUES = (1.0, 0.0, 0.0, 0.0, 0.0, 0.0)


def engine_of(element_type: ElementType, *, loss_is_sum: bool = False) -> ApplyEngine:
    """A parameter of four, a buffer of two, a parameter of three."""
    schema = ModelSchema(
        (
            SchemaEntry(name="a", shape=(4,), element_type=element_type),
            SchemaEntry(
                name="mean",
                shape=(2,),
                element_type=element_type,
                kind=EntryKind.BUFFER,
            ),
            SchemaEntry(name="b", shape=(3,), element_type=element_type),
        )
    )
    spec = OptimizerSpec(
        "optimizer",
        "SGD",
        SUPPORTED["SGD"].names,
        (ParameterGroup((0, 2), SGD_VALUES),),
        loss_is_sum=loss_is_sum,
    )
    return ApplyEngine(JobTerms(schema=schema, optimizers=(spec,)), place(schema, 1), 0)


def part(
    worker_id: str,
    values: list[float],
    element_type: ElementType,
    *,
    weight: float = 1.0,
    presence: tuple[bool, ...] = (True, False, True),
    loss_scale: float = 1.0,
) -> Contribution:
    data = torch.tensor(values, dtype=TORCH_DTYPES[element_type])
    return Contribution(
        worker_id=worker_id,
        weight=weight,
        presence=presence,
        data=buffer_of(data),
        loss_scale=loss_scale,
    )


@pytest.mark.parametrize(
    "element_type",
    [ElementType.FLOAT32, ElementType.FLOAT64, ElementType.BFLOAT16],
)
def test_it_measures_the_weighted_mean_without_buffers(
    element_type: ElementType,
) -> None:
    engine = engine_of(element_type)
    parts = [
        part(
            "a",
            [1, 2, 3, 4, 90, 90, 5, 6, 7],
            element_type,
            weight=3.0,
            presence=(True, True, True),
        ),
        part("b", [8.0, 8.0, 8.0], element_type, presence=(False, False, True)),
        part("c", [64.0] * 7, element_type, weight=0.0),
    ]
    expected = [0.75, 1.5, 2.25, 3.0, 5.75, 6.5, 7.25]

    found = engine.sum_of_squares(
        0, optimizer="optimizer", contributions=parts, total_weight=4.0
    )

    assert found == pytest.approx(math.fsum(x * x for x in expected), rel=1e-7)
    assert not any(values_of(engine, element_type))


@pytest.mark.parametrize(
    "element_type", [ElementType.FLOAT32, ElementType.FLOAT64, ElementType.FLOAT16]
)
def test_what_is_applied_is_the_scaled_mean(element_type: ElementType) -> None:
    engine = engine_of(element_type)
    sent = part("a", [8.0] * 7, element_type, loss_scale=4.0)
    assert engine.sum_of_squares(
        0, optimizer="optimizer", contributions=[sent], total_weight=1.0
    ) == pytest.approx(28.0)

    engine.apply(
        0,
        optimizer="optimizer",
        contributions=[sent],
        total_weight=1.0,
        hyperparameters=[SGD_VALUES],
        gradient_scale=0.25,
    )

    assert values_of(engine, element_type) == [-0.5] * 4 + [0.0] * 2 + [-0.5] * 3
    sent_again = tensor_from_buffer(sent.data, element_type)
    assert sent_again.tolist() == [8.0] * 7


def test_a_torn_contribution_is_left_out_of_both() -> None:
    engine = engine_of(ElementType.FLOAT32)
    torn = part("a", [math.nan] * 7, ElementType.FLOAT32)
    sound = part("b", [2.0] * 7, ElementType.FLOAT32)

    found = engine.sum_of_squares(
        0, optimizer="optimizer", contributions=[torn, sound], total_weight=2.0
    )

    assert found == pytest.approx(28.0)


def test_of_a_sum_the_sum_is_measured_and_applied_and_buffers_stay_a_mean() -> None:
    engine = engine_of(ElementType.FLOAT32, loss_is_sum=True)
    parts = [
        part(
            "a",
            [1.0] * 4 + [8.0, 8.0] + [1.0] * 3,
            ElementType.FLOAT32,
            weight=3.0,
            presence=(True, True, True),
        ),
        part(
            "b",
            [8.0] * 6 + [16.0] * 3,
            ElementType.FLOAT32,
            presence=(True, True, True),
            loss_scale=8.0,
        ),
        part("c", [math.nan] * 7, ElementType.FLOAT32, weight=9.0),
        part("d", [64.0] * 7, ElementType.FLOAT32, weight=0.0),
    ]
    clock = {"optimizer": "optimizer", "contributions": parts, "total_weight": 13.0}

    found = engine.sum_of_squares(0, **clock)  # type: ignore[arg-type]
    applied = engine.apply(
        0,
        hyperparameters=[SGD_VALUES],
        gradient_scale=0.5,
        **clock,  # type: ignore[arg-type]
    )

    assert found == pytest.approx(4 * 2.0**2 + 3 * 3.0**2)
    assert applied.torn_worker_ids == ("c",)
    assert values_of(engine, ElementType.FLOAT32) == [-1.0] * 4 + [8.0] * 2 + [-1.5] * 3


def test_of_nothing_the_sum_is_0() -> None:
    engine = engine_of(ElementType.FLOAT32)
    assert (
        engine.sum_of_squares(
            0, optimizer="optimizer", contributions=[], total_weight=1.0
        )
        == 0.0
    )


def test_slices_that_only_another_declaration_has_count_in_neither() -> None:
    engine = engine_of(ElementType.FLOAT32)
    narrower = OptimizerSpec(
        "optimizer",
        "SGD",
        SUPPORTED["SGD"].names,
        (ParameterGroup((0,), SGD_VALUES),),
        exchange_count=1,
    )
    engine.declare(narrower)
    sent = part("a", [2.0] * 7, ElementType.FLOAT32)
    for spec_digest, expected in (("", 28.0), (narrower.digest, 16.0)):
        found = engine.sum_of_squares(
            0,
            optimizer="optimizer",
            contributions=[sent],
            total_weight=1.0,
            spec_digest=spec_digest,
        )
        assert found == pytest.approx(expected)
    engine.apply(
        0,
        optimizer="optimizer",
        contributions=[sent],
        total_weight=1.0,
        hyperparameters=[SGD_VALUES],
        spec_digest=narrower.digest,
    )
    assert values_of(engine, ElementType.FLOAT32) == [-2.0] * 4 + [0.0] * 5


def values_of(engine: ApplyEngine, element_type: ElementType) -> list[float]:
    return tensor_from_buffer(memoryview(engine.vectors.read(0)), element_type).tolist()
