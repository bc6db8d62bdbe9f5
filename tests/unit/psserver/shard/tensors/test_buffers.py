"""Values of buffers: their mean, the single one's bits, the running average."""

import math
from collections.abc import Sequence

import pytest
import torch

from psserver.shard.core.effects import BufferAverage
from psserver.shard.tensors.apply_engine import AppliedChunk, ApplyEngine
from psserver.shard.tensors.contribution import Contribution
from pswire.job_terms import JobTerms
from pswire.optimizers import SUPPORTED
from pswire.placement import place
from pswire.reasons import ErrorReason, Refusal
from pswire.schema import (
    ElementType,
    EntryKind,
    ModelSchema,
    OptimizerSpec,
    ParameterGroup,
    SchemaEntry,
)
from pswire.torch_types import buffer_of, element_type_of, tensor_from_buffer

SGD_VALUES = (0.5, 0.0, 0.0, 0.0, 0.0, 0.0)
Parts = Sequence[torch.Tensor | None]
NAN = float("nan")


class Engine:
    """A shard of one chunk: a parameter of two elements, if any, and buffers."""

    def __init__(self, *first: torch.Tensor, parameter_count: int = 1) -> None:
        self.element_type = element_type_of(first[0].dtype)
        schema = ModelSchema(
            tuple(
                SchemaEntry(
                    name=f"t{position}",
                    shape=tuple(each.shape),
                    element_type=self.element_type,
                    kind=EntryKind.PARAMETER
                    if position < parameter_count
                    else EntryKind.BUFFER,
                )
                for position, each in enumerate(first)
            )
        )
        entries = tuple(range(parameter_count))
        spec = OptimizerSpec(
            "optimizer",
            "SGD",
            SUPPORTED["SGD"].names,
            (ParameterGroup(entries, SGD_VALUES),),
        )
        self.engine = ApplyEngine(
            JobTerms(schema=schema, optimizers=(spec,)), place(schema, 1), 0
        )
        self.sizes = [each.numel() for each in first]
        self.engine.begin_seed()
        self.engine.write_seed(0, buffer_of(torch.cat([*first])))
        self.engine.commit_seed()

    def apply(
        self,
        *pushes: tuple[float, Parts],
        average: BufferAverage | None = None,
        value_entries: frozenset[int] = frozenset(),
        source: int = 0,
    ) -> AppliedChunk:
        contributions = []
        for rank, (weight, parts) in enumerate(pushes):
            presence = tuple(part is not None for part in parts)
            present = [part for part in parts if part is not None]
            data = buffer_of(torch.cat(present))
            self.engine.check_chunk(
                0,
                presence,
                data.nbytes,
                optimizer="optimizer",
                value_entries=value_entries,
            )
            contributions.append(
                Contribution(
                    worker_id=f"w{rank}",
                    weight=weight,
                    presence=presence,
                    data=data,
                    value_entries=value_entries,
                    is_source=rank == source,
                )
            )
        return self.engine.apply(
            0,
            optimizer="optimizer",
            contributions=contributions,
            total_weight=sum(weight for weight, _ in pushes),
            hyperparameters=[SGD_VALUES],
            average=average,
        )

    def values(self) -> list[torch.Tensor]:
        data = memoryview(self.engine.vectors.read(0))
        flat = tensor_from_buffer(data, self.element_type).clone()
        return list(torch.split(flat, self.sizes))


def tensor(*values: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


def test_a_clock_leaves_the_mean_of_those_that_sent_a_slice() -> None:
    engine = Engine(tensor(1, 1), tensor(0, 0), tensor(0), tensor(7))
    applied = engine.apply(
        (1, [tensor(4, 8), tensor(2, 4), None, None]),
        (3, [tensor(0, 0), tensor(6, 8), tensor(5), None]),
    )
    assert applied == AppliedChunk((True, True, True, False), ())
    found = [each.tolist() for each in engine.values()]
    # The gradient's divisor is the weight of all, a buffer's of those that have it.
    assert found == [[0.5, 0.0], [5.0, 7.0], [5.0], [7.0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_value_of_a_single_worker_keeps_its_bits(dtype: torch.dtype) -> None:
    value = tensor(NAN, -0.0, 0.1, math.inf, dtype=dtype)
    bits = value.view(torch.uint8)
    bits[0] ^= 1  # another NaN than the usual one
    engine = Engine(tensor(1, dtype=dtype), torch.zeros(4, dtype=dtype))
    engine.apply(
        (7.3, [tensor(0, dtype=dtype), value]), (0.9, [tensor(0, dtype=dtype), None])
    )
    assert torch.equal(engine.values()[1].view(torch.uint8), bits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_what_workers_agree_on_stays_as_it_is(dtype: torch.dtype) -> None:
    value = (torch.rand(500, generator=torch.Generator().manual_seed(2)) * 9).to(dtype)
    engine = Engine(tensor(1, dtype=dtype), torch.zeros(500, dtype=dtype))
    engine.apply(*[(weight, [None, value]) for weight in (0.1, 7.0, 13.7)])
    assert torch.equal(engine.values()[1], value)


def test_the_mean_is_rounded_once() -> None:
    dtype = torch.bfloat16
    engine = Engine(tensor(1, dtype=dtype), tensor(0, dtype=dtype))
    pushes = [(1.0, [None, tensor(256, dtype=dtype)])]
    pushes += [(1.0, [None, tensor(1, dtype=dtype)])] * 8
    engine.apply(*pushes)
    assert engine.values()[1].tolist() == [tensor(264 / 9, dtype=dtype).item()]


def test_integers_are_rounded_to_the_nearest_and_booleans_go_by_majority() -> None:
    large = 2**60 + 1  # no float64
    counts = Engine(torch.tensor([0, 0, 0, 0]), torch.tensor([9]), parameter_count=0)
    counts.apply(
        (1, [torch.tensor([1, 2, large, -3]), None]),
        (1, [torch.tensor([4, 4, large, -4]), None]),
    )
    found = [each.tolist() for each in counts.values()]
    assert found == [[2, 3, large, -4], [9]]

    flags = Engine(torch.tensor([True, False, True, False]), parameter_count=0)
    flags.apply(
        (1, [torch.tensor([True, True, False, False])]),
        (2, [torch.tensor([False, True, True, False])]),
        (1, [torch.tensor([True, True, True, True])]),
    )
    assert flags.values()[0].tolist() == [True, True, True, False]


def test_buffers_count_in_no_check_and_never_reach_the_optimizer() -> None:
    engine = Engine(tensor(1, 1), tensor(0))
    applied = engine.apply((2, [tensor(2, 2), tensor(NAN)]), (2, [None, tensor(3e38)]))
    assert applied == AppliedChunk((True, True), ())
    assert engine.values()[0].tolist() == [0.5, 0.5]
    assert engine.values()[1].isnan().all()
    assert engine.engine.step_counts("optimizer", 0) == (1,)

    # A gradient that is torn leaves the buffers of its chunk alone with nobody's.
    applied = engine.apply((1, [tensor(NAN, 0), tensor(4)]))
    assert applied == AppliedChunk((False, True), ("w0",))
    assert [each.tolist() for each in engine.values()] == [[0.5, 0.5], [4.0]]


def test_weight_zero_brings_no_buffers() -> None:
    engine = Engine(tensor(1), tensor(5))
    applied = engine.apply((0, [tensor(1), tensor(9)]))
    assert applied.presence == (False, False)
    assert engine.values()[1].tolist() == [5.0]


def test_a_push_by_itself_moves_averaged_buffers_by_its_share() -> None:
    engine = Engine(tensor(1), tensor(8, 8), tensor(8), tensor(8))
    average = BufferAverage(frozenset({1, 3}), 4)

    applied = engine.apply((5, [None, tensor(0, 16), tensor(0), None]), average=average)

    assert applied.presence == (False, True, True, False)
    assert [each.tolist() for each in engine.values()[1:]] == [[6, 10], [0], [8]]

    alone = BufferAverage(frozenset({1}), 1)
    engine.apply((5, [None, tensor(NAN, 3), None, None]), average=alone)
    assert engine.values()[1][0].isnan()
    assert engine.values()[1][1] == 3


def test_a_push_by_itself_replaces_integers() -> None:
    engine = Engine(torch.tensor([8]), parameter_count=0)
    average = BufferAverage(frozenset({0}), 4)
    engine.apply((5, [torch.tensor([9])]), average=average)
    assert engine.values()[0].tolist() == [9]


def test_buffers_between_parameters_are_taken_apart() -> None:
    """A parameter of integers is a buffer, and stands where it was registered."""
    schema = ModelSchema(
        tuple(
            SchemaEntry(
                name=f"t{position}",
                shape=(2,),
                element_type=ElementType.FLOAT32,
                kind=EntryKind.BUFFER if position in (0, 2) else EntryKind.PARAMETER,
            )
            for position in range(4)
        )
    )
    spec = OptimizerSpec(
        "optimizer",
        "SGD",
        SUPPORTED["SGD"].names,
        (ParameterGroup((1, 3), SGD_VALUES),),
    )
    engine = ApplyEngine(
        JobTerms(schema=schema, optimizers=(spec,)), place(schema, 1), 0
    )
    data = torch.tensor([1.0, 2, 10, 20, 3, 4, 30, 40])

    engine.apply(
        0,
        optimizer="optimizer",
        contributions=[
            Contribution(
                worker_id="w0", weight=1, presence=(True,) * 4, data=buffer_of(data)
            )
        ],
        total_weight=1,
        hyperparameters=[SGD_VALUES],
    )

    found = tensor_from_buffer(memoryview(engine.vectors.read(0)), ElementType.FLOAT32)
    assert found.tolist() == [1, 2, -5, -10, 3, 4, -15, -20]
    assert engine.buffer_entries == (0, 2)


def test_buffers_are_given_again_only_once_they_were_pushed() -> None:
    engine = Engine(tensor(1), tensor(0), tensor(0))
    assert engine.engine.updatable(0) == (True, False, False)
    engine.apply((1, [None, None, tensor(2)]))
    assert engine.engine.updatable(0) == (True, False, True)


def test_a_slice_that_is_neither_a_buffer_nor_of_the_optimizer_is_refused() -> None:
    engine = Engine(tensor(1), tensor(2), tensor(0), parameter_count=2).engine
    engine.check_chunk(0, (True, True, True), 12, optimizer="optimizer")
    with pytest.raises(Refusal) as caught:
        engine.check_chunk(0, (False, False, True), 8, optimizer="optimizer")
    assert "take 4 bytes, 8 came" in caught.value.message


def test_an_optimizer_of_a_buffer_is_refused() -> None:
    schema = ModelSchema(
        (
            SchemaEntry(
                name="running",
                shape=(2,),
                element_type=ElementType.FLOAT32,
                kind=EntryKind.BUFFER,
            ),
        )
    )
    spec = OptimizerSpec(
        "optimizer", "SGD", SUPPORTED["SGD"].names, (ParameterGroup((0,), SGD_VALUES),)
    )
    with pytest.raises(Refusal) as caught:
        ApplyEngine(JobTerms(schema=schema, optimizers=(spec,)), place(schema, 1), 0)
    assert caught.value.reason == ErrorReason.MALFORMED_MESSAGE
    assert caught.value.message == (
        "'optimizer' updates 'running', which is buffer [2] float32"
    )


# Values of parameters


@pytest.mark.parametrize("source", [0, 1])
def test_values_of_the_source_replace_those_of_the_shard(source: int) -> None:
    engine = Engine(tensor(1, 1), tensor(0, 0), parameter_count=1)
    applied = engine.apply(
        (1, [tensor(4, NAN), tensor(2, 4)]),
        (1, [tensor(6, 7), tensor(6, 8)]),
        value_entries=frozenset({0, 1}),
        source=source,
    )
    assert applied == AppliedChunk((True, True), ())
    wanted = [[tensor(4, NAN), tensor(2, 4)], [tensor(6, 7), tensor(6, 8)]][source]
    for found, exact in zip(engine.values(), wanted, strict=True):
        torch.testing.assert_close(found, exact, rtol=0, atol=0, equal_nan=True)


def test_an_update_after_values_were_replaced_goes_on_from_them() -> None:
    """Also of 16 bits, of which the shard keeps more than it gives out."""
    half = torch.bfloat16
    engine = Engine(tensor(1, 1, dtype=half), parameter_count=1)
    engine.apply((1, [tensor(2**-12, 0, dtype=half)]))
    engine.apply((1, [tensor(5, 9, dtype=half)]), value_entries=frozenset({0}))
    engine.apply((1, [tensor(2, 2, dtype=half)]))
    assert [each.tolist() for each in engine.values()] == [[4.0, 8.0]]


def test_values_go_beside_a_gradient_and_count_in_no_norm() -> None:
    engine = Engine(tensor(1, 1), tensor(3, 3), parameter_count=1)
    applied = engine.apply(
        (1, [tensor(2, 2), tensor(NAN, 5)]), value_entries=frozenset({1})
    )
    assert applied == AppliedChunk((True, True), ())
    assert engine.values()[0].tolist() == [0.0, 0.0]


def test_a_slice_of_no_optimizer_comes_as_values_only() -> None:
    schema = ModelSchema(
        tuple(
            SchemaEntry(name=name, shape=(2,), element_type=ElementType.FLOAT32)
            for name in "ab"
        )
    )
    spec = OptimizerSpec(
        "optimizer", "SGD", SUPPORTED["SGD"].names, (ParameterGroup((0,), SGD_VALUES),)
    )
    engine = ApplyEngine(
        JobTerms(schema=schema, optimizers=(spec,)), place(schema, 1), 0
    )
    both = (True, True)
    with pytest.raises(Refusal, match="does not update"):
        engine.check_chunk(0, both, 16, optimizer="optimizer")
    engine.check_chunk(0, both, 16, optimizer="optimizer", value_entries=frozenset({1}))
