"""The memory of a host group: its layout, who adds what, and the sums."""

import os
import random
from collections.abc import Iterator, Sequence

import pytest
import torch

from pswire.schema import ElementType, EntryKind, ModelSchema, SchemaEntry
from psworker.backends.host.memory import HostLayout, HostMemory, share_out
from psworker.backends.host.messages import ProcessId, StepPart
from psworker.optim.buffer_policies import BufferPolicy

PROCESSES = tuple(ProcessId(number, 7) for number in range(3))
SHAPES = ((300, 700), (5,), (0,), (3,), (2,))
TYPES = (
    ElementType.FLOAT32,
    ElementType.BFLOAT16,
    ElementType.FLOAT32,
    ElementType.FLOAT64,
    ElementType.INT64,
)
BUFFERS = {3: BufferPolicy.MEAN, 4: BufferPolicy.LEADER}


@pytest.fixture(params=[False])
def memories(request: pytest.FixtureRequest) -> Iterator[list[HostMemory]]:
    """Of three processes; the parameter says whether they add gradients up."""
    schema = ModelSchema(
        tuple(
            SchemaEntry(
                model="model",
                name=f"entry{index}",
                shape=shape,
                element_type=element_type,
                kind=EntryKind.BUFFER if index in BUFFERS else EntryKind.PARAMETER,
            )
            for index, (shape, element_type) in enumerate(
                zip(SHAPES, TYPES, strict=True)
            )
        )
    )
    made = [
        HostMemory(schema, process, BUFFERS, adds_up=request.param)
        for process in PROCESSES
    ]
    for mine in made:
        for process, other in zip(PROCESSES, made, strict=True):
            if mine is not other:
                descriptor = os.dup(other.segment.descriptor)
                mine.adopt(process, other.segment.header, descriptor)
    yield made
    for memory in made:
        memory.close()


def gradients(index: int) -> list[torch.Tensor | None]:
    draw = torch.Generator().manual_seed(index)
    return [
        torch.randn(SHAPES[0], generator=draw),
        torch.randn(5, generator=draw).bfloat16() if index else None,
        torch.zeros(0),
        torch.full((3,), float(index), dtype=torch.float64),
        torch.full((2,), index, dtype=torch.int64),
    ]


def offered(
    memories: Sequence[HostMemory], weights: Sequence[float]
) -> dict[ProcessId, StepPart]:
    return {
        process: StepPart(
            weight=weight,
            presence=memory.offer(gradients(index) if weight else [None] * 5),
        )
        for index, (process, memory, weight) in enumerate(
            zip(PROCESSES, memories, weights, strict=True)
        )
    }


def test_all_read_the_same_weighted_mean(memories: list[HostMemory]) -> None:
    weights = (1.0, 2.0, 5.0)
    parts = offered(memories, weights)
    square_sum = sum(memory.reduce(parts) for memory in memories)
    means = [memory.mean(parts, with_leaders=True) for memory in memories]
    for mean in means[1:]:
        for mine, first in zip(mean, means[0], strict=True):
            assert mine is not None
            assert first is not None
            assert torch.equal(mine, first)
    found = means[0]
    exact, half = torch.zeros(SHAPES[0], dtype=torch.float64), torch.zeros(5)
    for index, weight in enumerate(weights):
        first, second = gradients(index)[:2]
        assert first is not None
        exact += first.double() * weight / 8
        if second is not None:
            half += second.float() * weight / 8
    assert found[0] is not None
    torch.testing.assert_close(found[0].double(), exact, rtol=1e-6, atol=1e-6)
    assert found[1] is not None
    assert torch.equal(found[1], half.bfloat16())  # who lacks it counts as zeros
    assert found[3] is not None
    assert found[3].tolist() == pytest.approx([12 / 8] * 3)
    assert found[4] is not None
    assert found[4].tolist() == [0, 0]  # the first one's
    norm = float(torch.linalg.vector_norm(found[0]) ** 2) + float(
        torch.linalg.vector_norm(half) ** 2
    )
    assert square_sum == pytest.approx(norm, rel=1e-4)


@pytest.mark.parametrize("memories", [True], indirect=True)
def test_a_sum_takes_no_weights_and_buffers_stay_a_mean(
    memories: list[HostMemory],
) -> None:
    parts = offered(memories, (1.0, 0.0, 5.0))
    square_sum = sum(memory.reduce(parts) for memory in memories)
    found = memories[1].mean(parts, with_leaders=True)
    (first, _, *_), (second, half, *_) = gradients(0), gradients(2)
    assert first is not None
    assert second is not None
    assert found[0] is not None
    assert torch.equal(found[0], first + second)
    assert half is not None
    assert found[1] is not None
    assert torch.equal(found[1], half)
    assert found[3] is not None
    assert found[3].tolist() == pytest.approx([10 / 6] * 3)
    norms = [torch.linalg.vector_norm(each.double()) for each in (found[0], half)]
    assert square_sum == pytest.approx(float(sum(n * n for n in norms)), rel=1e-4)


def test_who_has_no_weight_counts_for_nothing(memories: list[HostMemory]) -> None:
    parts = offered(memories, (0.0, 3.0, 0.0))
    for memory in memories:
        memory.reduce(parts)
    found = memories[2].mean(parts, with_leaders=False)
    for index in range(4):
        mine, wanted = found[index], gradients(1)[index]
        assert mine is not None
        assert wanted is not None
        assert torch.equal(mine, wanted)
    assert found[4] is None  # of the job's first worker, which is another one
    nobody = offered(memories, (0.0, 0.0, 0.0))
    assert memories[0].reduce(nobody) == 0.0
    assert memories[0].mean(nobody, with_leaders=True) == [None] * 5


def test_what_is_not_finite_shows_in_the_sum_of_squares(
    memories: list[HostMemory],
) -> None:
    parts = offered(memories, (1.0, 1.0, 1.0))
    broken = gradients(1)
    assert broken[0] is not None
    broken[0][17, 3] = float("nan")
    memories[1].offer(broken)
    assert sum(memory.reduce(parts) for memory in memories) == float("inf")


def test_the_memory_of_the_dead_stays_as_it_was(memories: list[HostMemory]) -> None:
    parts = offered(memories, (1.0, 1.0, 1.0))
    for memory in memories:
        memory.reduce(parts)
    before = [
        e.clone() for e in memories[0].mean(parts, with_leaders=True) if e is not None
    ]
    memories[1].close()
    after = [e for e in memories[0].mean(parts, with_leaders=True) if e is not None]
    assert all(map(torch.equal, before, after))
    memories[0].forget({PROCESSES[1]})
    assert memories[0].processes == {PROCESSES[0], PROCESSES[2]}


def schema(*sizes: int, buffers: int = 0) -> ModelSchema:
    types = (ElementType.FLOAT32, ElementType.FLOAT64, ElementType.BFLOAT16)
    return ModelSchema(
        tuple(
            SchemaEntry(
                model="model",
                name=f"p{index}",
                shape=(size,),
                element_type=types[index % 3],
                kind=EntryKind.PARAMETER
                if index < len(sizes) - buffers
                else EntryKind.BUFFER,
            )
            for index, size in enumerate(sizes)
        )
    )


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_shares_hold_every_present_element_once_and_are_about_as_large(
    count: int,
) -> None:
    draw = random.Random(count)
    model = schema(*(draw.choice([0, 1, 5, 1_000, 30_000]) for _ in range(40)))
    presence = [draw.random() < 0.8 for _ in model.entries]
    shares = share_out(model, presence, count)
    found = sorted(run for share in shares for run in share)
    at: dict[int, int] = {}
    for index, start, stop in found:
        assert presence[index]
        assert start == at.get(index, 0)
        at[index] = stop
    wanted = {
        index: entry.element_count
        for index, entry in enumerate(model.entries)
        if presence[index] and entry.element_count
    }
    assert at == wanted
    sizes = [
        sum(
            (r.stop - r.start) * model.entries[r.entry_index].element_type.byte_count
            for r in share
        )
        for share in shares
    ]
    assert max(sizes) - min(sizes) <= 64 * 8 * 2


def test_buffers_are_not_cut() -> None:
    shares = share_out(schema(10, 4_000, 5_000, buffers=2), [True] * 3, 3)
    runs = [run for share in shares for run in share if run.entry_index > 0]
    assert [(run.start, run.stop) for run in runs] == [(0, 4_000), (0, 5_000)]


def test_areas_do_not_overlap() -> None:
    model = schema(3, 0, 100)
    layout = HostLayout.of(model)
    starts = (*layout.gradients, *layout.shares, *layout.values, layout.byte_count)
    sizes = [entry.byte_count for entry in model.entries] * 3
    assert all(
        a + size <= b for a, size, b in zip(starts, sizes, starts[1:], strict=False)
    )
    assert all(start % 64 == 0 for start in starts)
