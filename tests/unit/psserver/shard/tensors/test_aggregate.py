"""The weighted mean, or sum: against a slow one, in any order, without torn workers."""

from fractions import Fraction
from itertools import permutations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from psserver.shard.tensors.aggregate import finite_mean, weighted_mean
from psserver.shard.tensors.contribution import Contribution
from pswire.limits import GRADIENT_NORM_MAX
from pswire.placement import Chunk, Slice
from pswire.schema import ElementType
from pswire.torch_types import buffer_of, element_type_of

SIZES = (2, 1, 4, 3)


def chunk_of(element_type: ElementType = ElementType.FLOAT32) -> Chunk:
    return Chunk(
        index=0,
        shard_index=0,
        element_type=element_type,
        slices=tuple(Slice(index, 0, size) for index, size in enumerate(SIZES)),
        vector_start=0,
    )


def contribution(
    worker_id: str,
    weight: float,
    *parts: list[float] | None,
    dtype: torch.dtype = torch.float32,
    loss_scale: float = 1.0,
) -> Contribution:
    present = [value for part in parts if part is not None for value in part]
    return Contribution(
        worker_id=worker_id,
        weight=weight,
        presence=tuple(part is not None for part in parts),
        data=buffer_of(torch.tensor(present, dtype=dtype)),
        loss_scale=loss_scale,
    )


def whole(
    worker_id: str, weight: float, value: float, loss_scale: float = 1.0
) -> Contribution:
    parts = [[value] * size for size in SIZES]
    return contribution(worker_id, weight, *parts, loss_scale=loss_scale)


numbers = st.floats(-1e3, 1e3, width=32).filter(lambda value: abs(value) > 1e-3)
part_lists = st.tuples(
    *(st.none() | st.lists(numbers, min_size=size, max_size=size) for size in SIZES)
)
workers = st.lists(st.tuples(st.integers(0, 300), part_lists), min_size=1, max_size=4)


@given(workers, st.none() | st.integers(0, 50))
@settings(derandomize=True, deadline=None, max_examples=300)
def test_it_equals_exact_arithmetic(
    pushed: list[tuple[int, tuple[list[float] | None, ...]]],
    missing_weight: int | None,
) -> None:
    total = None
    if missing_weight is not None:
        total = sum(weight for weight, _ in pushed) + missing_weight
    if total == 0:
        return
    contributions = [
        contribution(f"w{rank}", weight, *parts)
        for rank, (weight, parts) in enumerate(pushed)
    ]
    gradient, presence = weighted_mean(chunk_of(), contributions, total)

    expected: list[float] = []
    tolerated: list[float] = []
    for position, size in enumerate(SIZES):
        held = [
            (1 if total is None else Fraction(weight, total), part)
            for weight, parts in pushed
            if weight and (part := parts[position]) is not None
        ]
        assert presence[position] == bool(held)
        for element in range(size if held else 0):
            terms = [share * Fraction(part[element]) for share, part in held]
            expected.append(float(sum(terms)))
            tolerated.append(float(sum(map(abs, terms))) * 3e-7)
    difference = (gradient.double() - torch.tensor(expected).double()).abs()
    assert gradient.numel() == len(expected)
    assert bool((difference <= torch.tensor(tolerated)).all())


def test_it_is_the_same_bit_for_bit_in_any_order_of_arrival() -> None:
    generator = torch.Generator().manual_seed(1)
    parts = torch.randn(3, 10, generator=generator).tolist()
    arrived = [
        contribution(f"w{rank}", rank + 0.7, row[:2], None, row[2:6], row[6:9])
        for rank, row in enumerate(parts)
    ]
    means = {
        bytes(buffer_of(weighted_mean(chunk_of(), in_order, 5.1)[0]))
        for order in permutations(arrived)
        for in_order in [sorted(order, key=lambda each: each.worker_id)]
    }
    assert len(means) == 1


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16]
)
def test_one_contributor_with_all_the_weight_is_left_as_it_is(
    dtype: torch.dtype,
) -> None:
    parts = [[0.1 * (element + 1) for element in range(size)] for size in SIZES]
    alone = contribution("w0", 7.3, *parts, dtype=dtype)
    gradient, _ = weighted_mean(chunk_of(element_type_of(dtype)), [alone], 7.3)
    assert bytes(buffer_of(gradient.to(dtype))) == bytes(alone.data)


def test_sixteen_bits_are_not_rounded() -> None:
    # 256 + 1 is no bfloat16: rounding after an addition would lose every 1.
    chunk = chunk_of(ElementType.BFLOAT16)
    contributions = [
        contribution("w0", 1, [256.0, 256.0], None, None, None, dtype=torch.bfloat16),
        *(
            contribution(f"w{n}", 1, [1.0, 1.0], None, None, None, dtype=torch.bfloat16)
            for n in range(1, 5)
        ),
    ]
    gradient, _ = weighted_mean(chunk, contributions, 1)
    assert gradient.dtype is torch.float32
    assert gradient.tolist() == [260.0, 260.0]

    gradient, _ = weighted_mean(chunk, contributions[:2], 1)
    assert gradient.tolist() == [257.0, 257.0]

    other = contribution("w9", 1, None, [1.0], None, None, dtype=torch.bfloat16)
    gradient, _ = weighted_mean(chunk, [*contributions[:2], other], 1)
    assert gradient.tolist() == [257.0, 257.0, 1.0]


def test_absent_slices_count_as_zeros_under_the_whole_weight() -> None:
    gradient, presence = weighted_mean(
        chunk_of(),
        [
            contribution("w0", 1, [4.0, 4.0], None, None, [8.0] * 3),
            contribution("w1", 3, None, None, None, [4.0] * 3),
        ],
        8,
    )
    assert presence == (True, False, False, True)
    assert gradient.tolist() == [0.5, 0.5, 2.5, 2.5, 2.5]


def test_weight_zero_counts_for_nothing_even_when_it_is_not_finite() -> None:
    mean = finite_mean(chunk_of(), [whole("w0", 0, float("nan")), whole("w1", 2, 3)], 2)
    assert mean.gradient.tolist() == [3.0] * 10
    assert mean.torn_worker_ids == ()

    nothing = finite_mean(chunk_of(), [whole("w0", 0, 1.0)], 0)
    assert not any(nothing.presence)


def test_a_loss_scale_is_divided_out() -> None:
    mean = finite_mean(
        chunk_of(), [whole("w0", 1, 1024, 1024.0), whole("w1", 1, 3, 0.0)], 2
    )
    assert mean.gradient.tolist() == [2.0] * 10


@pytest.mark.parametrize(
    "value", [float("nan"), float("inf"), -float("inf"), GRADIENT_NORM_MAX]
)
def test_a_torn_contribution_is_left_out_with_its_weight(value: float) -> None:
    mean = finite_mean(
        chunk_of(),
        [whole("w0", 1, 2.0), whole("w1", 5, value), whole("w2", 3, 6.0)],
        9,
    )
    assert mean.torn_worker_ids == ("w1",)
    assert mean.gradient.tolist() == [5.0] * 10
    assert all(mean.presence)


def test_a_torn_contribution_is_left_out_of_a_sum_and_scales_are_divided_out() -> None:
    pushed = [
        whole("w0", 1, 2.0),
        whole("w1", 5, float("nan")),
        whole("w2", 3, 6.0, 4.0),
        whole("w3", 0, 9.0),
    ]
    for contributions in (pushed, [pushed[0], pushed[2]]):
        mean = finite_mean(chunk_of(), contributions, None)
        assert mean.gradient.tolist() == [3.5] * 10
        torn = ("w1",) if len(contributions) > 2 else ()
        assert mean.torn_worker_ids == torn

    nothing = finite_mean(chunk_of(), [pushed[1]], None)
    assert nothing.torn_worker_ids == ("w1",)
    assert not any(nothing.presence)
    assert nothing.gradient.numel() == 0


def test_slices_that_only_a_torn_worker_has_are_absent() -> None:
    mean = finite_mean(
        chunk_of(),
        [
            contribution("w0", 1, [2.0, 2.0], None, None, None),
            contribution("w1", 1, None, [float("nan")], None, None),
        ],
        2,
    )
    assert mean.presence == (True, False, False, False)
    assert mean.gradient.tolist() == [2.0, 2.0]


def test_nothing_is_applied_when_all_are_torn_or_only_the_sum_is() -> None:
    torn = [whole("w0", 1, float("nan")), whole("w1", 1, float("inf"))]
    large = GRADIENT_NORM_MAX / 4
    for contributions, total in (
        (torn, 2.0),
        ([whole("w0", 1, large), whole("w1", 1, large)], 1.0),
    ):
        mean = finite_mean(chunk_of(), contributions, total)
        assert mean.torn_worker_ids == ("w0", "w1")
        assert not any(mean.presence)
        assert mean.gradient.numel() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_what_was_sent_stays_as_it_is(dtype: torch.dtype) -> None:
    parts = ([1.0] * 2, [2.0], [3.0] * 4, [4.0] * 3)
    sent = [contribution(name, 1.0, *parts, dtype=dtype) for name in ("w0", "w1")]
    before = [bytes(each.data) for each in sent]

    for total in (2.0, 4.0):
        gradient, _ = weighted_mean(chunk_of(element_type_of(dtype)), sent, total)
        assert gradient[-1].item() == 4.0 * 2 / total
    assert [bytes(each.data) for each in sent] == before
