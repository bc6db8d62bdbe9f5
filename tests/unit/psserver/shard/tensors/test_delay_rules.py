"""What a late push becomes, beside a formula element by element and by hand."""

import math

import pytest
import torch

from psserver.shard.tensors.apply_engine import ApplyEngine
from psserver.shard.tensors.contribution import Contribution
from psserver.shard.tensors.delay_rules import DelayRules, compensated, scaled_rates
from psserver.shard.tensors.sent_values import SentValues, sent_bytes
from pswire.frames import decode_chunk, split_fields
from pswire.job_terms import JobTerms
from pswire.optimizers import SUPPORTED
from pswire.placement import place
from pswire.schema import (
    ElementType,
    ModelSchema,
    OptimizerSpec,
    ParameterGroup,
    SchemaEntry,
)
from pswire.torch_types import buffer_of, tensor_from_buffer

RATE = 0.5
SGD_VALUES = (RATE, 0.0, 0.0, 0.0, 0.0, 0.0)
STRENGTH = 0.25
CHUNK_FIELD = 1


def sgd(*entry_indexes: int) -> OptimizerSpec:
    return OptimizerSpec(
        "optimizer",
        "SGD",
        SUPPORTED["SGD"].names,
        (ParameterGroup(entry_indexes, SGD_VALUES),),
    )


def engine_of(
    rules: DelayRules,
    *sizes: int,
    element_type: ElementType = ElementType.FLOAT32,
    first: float = 1.0,
) -> ApplyEngine:
    """A shard with one chunk of tensors of these sizes, seeded with one value."""
    schema = ModelSchema(
        tuple(
            SchemaEntry(name=f"p{position}", shape=(size,), element_type=element_type)
            for position, size in enumerate(sizes)
        )
    )
    engine = ApplyEngine(
        JobTerms(schema=schema, optimizers=(sgd(*range(len(sizes))),)),
        place(schema, 1),
        0,
        delay=rules,
    )
    engine.begin_seed()
    values = torch.full((sum(sizes),), first).to(dtype_of(element_type))
    engine.write_seed(0, buffer_of(values))
    engine.commit_seed()
    return engine


def dtype_of(element_type: ElementType) -> torch.dtype:
    return tensor_from_buffer(memoryview(b""), element_type).dtype


def members() -> tuple[SentValues, SentValues]:
    """Two workers of whose values copies are kept."""
    made = SentValues(), SentValues()
    for each in made:
        each.keep_copies(True)
    return made


def give(engine: ApplyEngine, worker: SentValues) -> torch.Tensor:
    """The values as the worker is given them."""
    (message,) = engine.encode(0, CHUNK_FIELD, reader=worker)
    ((_, view),) = split_fields(message)
    return tensor_from_buffer(decode_chunk(view).data, ElementType.FLOAT32)


def push(
    engine: ApplyEngine,
    worker: SentValues,
    gradient: torch.Tensor,
    *,
    presence: tuple[bool, ...] = (True,),
    staleness: int = 0,
    is_streamed: bool = True,
) -> None:
    engine.apply(
        0,
        optimizer="optimizer",
        contributions=[
            Contribution(
                worker_id="w",
                weight=8.0,
                presence=presence,
                data=buffer_of(gradient),
            )
        ],
        total_weight=8.0,
        hyperparameters=[SGD_VALUES],
        pulled=worker if is_streamed else None,
        staleness=staleness if is_streamed else None,
    )


def values_of(
    engine: ApplyEngine, element_type: ElementType = ElementType.FLOAT32
) -> torch.Tensor:
    return tensor_from_buffer(memoryview(engine.vectors.read(0)), element_type).clone()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_compensation_is_the_formula(dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(3)
    gradient, now, pulled = torch.randn(3, 50, generator=random, dtype=dtype)
    expected = [
        g + 0.3 * g * g * (w_now - w_pulled)
        for g, w_now, w_pulled in zip(
            gradient.tolist(), now.tolist(), pulled.tolist(), strict=True
        )
    ]

    found = compensated(gradient, now, pulled, 0.3)

    assert found.dtype is dtype
    assert found.tolist() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_master_values_are_compared_with_what_was_pulled_in_16_bits(
    dtype: torch.dtype,
) -> None:
    random = torch.Generator().manual_seed(4)
    gradient, now, pulled = torch.randn(3, 400, generator=random)
    narrow = pulled.to(dtype)

    found = compensated(gradient, now, narrow, 0.3)

    assert torch.equal(found, compensated(gradient, now, narrow.float(), 0.3))
    assert found.dtype is torch.float32


def test_two_workers_by_hand() -> None:
    """Both start from 1. A pushes 2, then B pushes 4, which it computed at 1."""
    engine = engine_of(DelayRules(compensation=STRENGTH), 1)
    a, b = members()
    assert give(engine, a).tolist() == [1.0]
    assert give(engine, b).tolist() == [1.0]

    push(engine, a, torch.tensor([2.0]))
    # Nothing has gone on since A was given 1: 1 - 0.5 * 2.
    assert values_of(engine).tolist() == [0.0]

    push(engine, b, torch.tensor([4.0]))
    # Since B was given 1, the value went to 0: 4 + 0.25 * 16 * (0 - 1) = 0.
    assert values_of(engine).tolist() == [0.0]

    assert give(engine, b).tolist() == [0.0]
    push(engine, b, torch.tensor([4.0]))
    # B was given 0, and nothing came in between: 0 - 0.5 * 4.
    assert values_of(engine).tolist() == [-2.0]

    push(engine, a, torch.tensor([2.0]))
    # A was not given anything since 1: 2 + 0.25 * 4 * (-2 - 1) = -1.
    assert values_of(engine).tolist() == [-1.5]


def test_only_present_slices_are_compensated() -> None:
    engine = engine_of(DelayRules(compensation=STRENGTH), 2, 1, 3)
    a, b = members()
    pulled = give(engine, b).clone()
    push(engine, a, torch.arange(6.0), presence=(True, True, True))
    now = values_of(engine)
    gradient = torch.tensor([1.0, -2.0, 3.0, 4.0, -5.0])

    push(engine, b, gradient, presence=(True, False, True))

    expected = now.clone()
    for position, g in zip([0, 1, 3, 4, 5], gradient.tolist(), strict=True):
        drift = float(now[position] - pulled[position])
        expected[position] -= RATE * (g + STRENGTH * g * g * drift)
    assert values_of(engine).tolist() == pytest.approx(expected.tolist())


def test_a_worker_that_was_given_nothing_is_not_compensated() -> None:
    engine = engine_of(DelayRules(compensation=STRENGTH), 1)
    a, b = members()
    give(engine, a)
    push(engine, a, torch.tensor([2.0]))

    push(engine, b, torch.tensor([4.0]))

    assert values_of(engine).tolist() == [-2.0]


def test_the_seeder_has_what_it_seeded() -> None:
    engine = engine_of(DelayRules(compensation=STRENGTH), 1)
    a, b = members()
    engine.note_seeder(b)
    push(engine, a, torch.tensor([2.0]))

    push(engine, b, torch.tensor([4.0]))

    assert values_of(engine).tolist() == [0.0]


def test_a_clock_of_bsp_is_not_compensated() -> None:
    rules = DelayRules(compensation=STRENGTH, is_rate_scaled=True)
    engine = engine_of(rules, 1)
    a, b = members()
    give(engine, b)
    push(engine, a, torch.tensor([2.0]), is_streamed=False)

    push(engine, b, torch.tensor([4.0]), is_streamed=False, staleness=7)

    assert values_of(engine).tolist() == [-2.0]


def test_a_compensation_beyond_the_type_is_left_out() -> None:
    rules = DelayRules(compensation=1e3)
    engine = engine_of(rules, 1)
    a, b = members()
    engine.encode(0, CHUNK_FIELD, reader=b)
    push(engine, a, torch.tensor([2.0]))

    push(engine, b, torch.tensor([2.0**30]))

    assert values_of(engine).tolist() == [-(2.0**29)]


def test_a_push_in_16_bits_is_compensated_at_the_master_values() -> None:
    engine = engine_of(
        DelayRules(compensation=STRENGTH), 1, element_type=ElementType.BFLOAT16
    )
    a, b = members()
    engine.encode(0, CHUNK_FIELD, reader=b)
    tiny = torch.tensor([2.0**-10], dtype=torch.bfloat16)
    for _ in range(2):
        push(engine, a, tiny)
    assert values_of(engine, ElementType.BFLOAT16).tolist() == [1.0]

    push(engine, b, torch.tensor([2.0], dtype=torch.bfloat16))

    # Two updates that 16 bits do not show: 2 + 0.25 * 4 * -2^-10.
    expected = torch.tensor([1 - 2.0**-10 - RATE * (2 - 2.0**-10)]).bfloat16()
    assert values_of(engine, ElementType.BFLOAT16).tolist() == expected.tolist()


def test_copies_are_counted_and_kept_while_they_are_wanted() -> None:
    engine = engine_of(DelayRules(compensation=STRENGTH), 10)
    a, b = members()
    for worker in (a, b, a):
        engine.encode(0, CHUNK_FIELD, reader=worker)
    assert sent_bytes([a, b]) == 80

    a.keep_copies(False)
    assert sent_bytes([a, b]) == 40

    engine.encode(0, CHUNK_FIELD, reader=a)
    assert sent_bytes([a, b]) == 40
    b.keep_copies(True)
    assert sent_bytes([b]) == 40, "what is kept stays"


def test_without_compensation_nothing_is_copied() -> None:
    engine = engine_of(DelayRules(), 10)
    a, b = members()

    engine.encode(0, CHUNK_FIELD, reader=a)
    engine.note_seeder(b)

    assert sent_bytes([a, b]) == 0


@pytest.mark.parametrize(("staleness", "divisor"), [(0, 1), (1, 1), (2, 2), (8, 8)])
def test_the_rate_is_divided_by_the_staleness(staleness: int, divisor: int) -> None:
    engine = engine_of(DelayRules(is_rate_scaled=True), 1)
    a, _ = members()

    push(engine, a, torch.tensor([4.0]), staleness=staleness)

    assert values_of(engine).tolist() == [1.0 - RATE * 4.0 / divisor]


def test_only_the_rate_is_scaled_in_every_group() -> None:
    spec = OptimizerSpec(
        "optimizer",
        "AdamW",
        SUPPORTED["AdamW"].names,
        (
            ParameterGroup((0,), tuple(map(float, range(8)))),
            ParameterGroup((1,), tuple(map(float, range(8)))),
        ),
    )
    names = spec.hyperparameter_names
    values = [[float(position + 1) for position in range(len(names))]] * 2

    for group in scaled_rates(spec, values, 4):
        for name, value, given in zip(names, group, values[0], strict=True):
            assert math.isclose(value, given / 4 if name == "lr" else given)


@pytest.mark.parametrize("class_name", SUPPORTED)
def test_every_optimizer_has_a_rate(class_name: str) -> None:
    assert "lr" in SUPPORTED[class_name].names
