"""Medians, trimmed means and products of a chunk: against a slow way, of any data."""

import statistics
from dataclasses import replace

import pytest
import torch

from psserver.shard.tensors.aggregate import Mean, mean_of
from psserver.shard.tensors.contribution import Contribution
from psserver.shard.tensors.robust_aggregate import (
    PRODUCT_BLOCK_COUNT,
    coordinatewise,
    median_of,
    products_of,
    spread,
)
from pswire.aggregation import Aggregation
from pswire.placement import Chunk, Slice
from pswire.schema import ElementType
from pswire.slice_rows import SliceRows
from pswire.torch_types import TORCH_DTYPES, buffer_of

SIZES = (2, 3)
MEDIAN = Aggregation.parse("median")
TRIMMED = Aggregation.parse("trimmed-mean:0.25")


def chunk_of(element_type: ElementType = ElementType.FLOAT32) -> Chunk:
    return Chunk(
        index=0,
        shard_index=0,
        element_type=element_type,
        slices=tuple(Slice(index, 0, size) for index, size in enumerate(SIZES)),
        vector_start=0,
    )


def sent(
    worker_id: str,
    *parts: list[float] | None,
    dtype: torch.dtype = torch.float32,
    loss_scale: float = 1.0,
) -> Contribution:
    present = [value for part in parts if part is not None for value in part]
    return Contribution(
        worker_id=worker_id,
        weight=1.0,
        presence=tuple(part is not None for part in parts),
        data=buffer_of(torch.tensor(present, dtype=dtype)),
        loss_scale=loss_scale,
    )


def values_of(mean: Mean) -> list[float]:
    found: list[float] = mean.gradient.tolist()
    return found


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 8, 9, 16, 33])
def test_they_equal_what_the_definition_says(count: int) -> None:
    generator = torch.Generator().manual_seed(count)
    drawn = torch.randint(-9, 9, (count, 5), generator=generator).tolist()
    parts = [sent(f"w{i:02}", row[:2], row[2:]) for i, row in enumerate(drawn)]
    columns = list(zip(*drawn, strict=True))
    out = count // 4

    medians = coordinatewise(MEDIAN, chunk_of(), parts, count)
    trimmed = coordinatewise(TRIMMED, chunk_of(), parts, count)

    assert values_of(medians) == [statistics.median(column) for column in columns]
    assert values_of(trimmed) == pytest.approx(
        [statistics.fmean(sorted(column)[out : count - out]) for column in columns]
    )


@pytest.mark.parametrize(
    "element_type", [ElementType.FLOAT16, ElementType.BFLOAT16, ElementType.FLOAT64]
)
def test_of_16_bits_they_are_float32(element_type: ElementType) -> None:
    dtype = TORCH_DTYPES[element_type]
    parts = [
        sent(f"w{i}", [i, i], [i, 2 * i, 3 * i], dtype=dtype, loss_scale=2.0**i)
        for i in range(4)
    ]

    found = coordinatewise(MEDIAN, chunk_of(element_type), parts, 4)

    is_wide = element_type is ElementType.FLOAT64
    assert found.gradient.dtype is (torch.float64 if is_wide else torch.float32)
    # Of 0, 1/2, 2/4 and 3/8, without the loss scales.
    assert values_of(found) == [0.4375, 0.4375, 0.4375, 0.875, 1.3125]


def test_what_a_worker_lacks_counts_as_zeros() -> None:
    parts = [
        sent("a", [5.0, 5.0], None),
        sent("b", [4.0, -4.0], None),
        sent("c", [3.0, 3.0], None),
    ]

    of_three = coordinatewise(MEDIAN, chunk_of(), parts, 3)
    of_seven = coordinatewise(MEDIAN, chunk_of(), parts, 7)

    assert of_three.presence == (True, False)
    assert values_of(of_three) == [4.0, 3.0]
    assert values_of(of_seven) == [0.0, 0.0]


def test_what_is_not_finite_is_left_out_and_named() -> None:
    parts = [sent(f"w{i}", [float(i)] * 2, [1.0] * 3) for i in range(4)]
    parts[1] = sent("w1", [float("nan")] * 2, [1.0] * 3)
    parts[2] = sent("w2", [1.0] * 2, [1e30] * 3)

    found = coordinatewise(MEDIAN, chunk_of(), parts, 4)
    nothing = coordinatewise(MEDIAN, chunk_of(), parts[1:3], 2)

    assert found.torn_worker_ids == ("w1", "w2")
    assert values_of(found) == [1.5, 1.5, 1.0, 1.0, 1.0]
    assert (nothing.presence, nothing.gradient.numel()) == ((False, False), 0)
    assert nothing.torn_worker_ids == ("w1", "w2")


def test_what_was_sent_stays_as_it_is() -> None:
    parts = [sent(f"w{i}", [3.0 - i] * 2, [float(i)] * 3) for i in range(3)]
    before = [bytes(each.data) for each in parts]

    coordinatewise(MEDIAN, chunk_of(), parts, 3)
    buffers = [each.elements(chunk_of()) for each in parts]
    assert median_of(buffers).tolist() == [2.0, 2.0, 1.0, 1.0, 1.0]

    assert [bytes(each.data) for each in parts] == before


def test_a_buffer_that_is_no_number_is_outvoted() -> None:
    nan = float("nan")
    good = torch.tensor([1.0, 2.0, nan])
    bad = torch.full((3,), nan)
    assert str(median_of([bad, good, good]).tolist()) == "[1.0, 2.0, nan]"
    assert str(median_of([good, bad, good + 2, good]).tolist()) == "[2.0, 3.0, nan]"
    assert bad.isnan().all()


def test_products_are_those_of_whole_gradients() -> None:
    generator = torch.Generator().manual_seed(1)
    gradients = list(torch.randn(4, 2 * PRODUCT_BLOCK_COUNT + 3, generator=generator))
    gradients[2] = gradients[2] * float("nan")
    exact = torch.stack(gradients).double()

    pairs = products_of(gradients, has_pairs=True)
    alone = products_of(gradients, has_pairs=False)

    for one in range(4):
        for other in range(4):
            wanted = float(exact[one] @ exact[other])
            assert pairs[one][other] == pytest.approx(wanted, rel=1e-9, nan_ok=True)
        wanted = float(exact[one] @ exact[one])
        assert alone[one][one] == pytest.approx(wanted, rel=1e-9, nan_ok=True)
    again = products_of([each.clone() for each in gradients], has_pairs=True)
    assert str(again) == str(pairs)


def test_rows_have_their_places_among_all_elements() -> None:
    rows = SliceRows(Slice(1, 0, 3), 1, torch.tensor([2]).numpy())
    part = replace(sent("a", [7.0, 8.0], [9.0]), rows=(None, rows))

    found = spread(chunk_of(), mean_of(chunk_of(), [part], None), torch.zeros(5))

    assert found.tolist() == [7.0, 8.0, 0.0, 0.0, 9.0]
