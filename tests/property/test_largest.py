"""The largest elements, against sorting all of them."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pswire.encodings.largest import places_of_largest

Floats = npt.NDArray[np.float32]

checked = settings(derandomize=True, deadline=None, max_examples=60)


def by_sorting(elements: Floats, count: int) -> list[int]:
    """A dumb second implementation: sorted by size, then by place; zeros left out."""
    sizes = np.abs(elements)
    sizes[np.isnan(sizes)] = np.inf
    order = sorted(range(len(elements)), key=lambda place: (-sizes[place], place))
    return sorted(place for place in order[:count] if sizes[place] > 0)


def drawn(count: int, seed: int, levels: int, zeros: float) -> Floats:
    """Elements of some number of sizes, 0 for all different, some share of them 0."""
    generator = np.random.default_rng(seed)
    values = generator.standard_normal(count).astype(np.float32)
    if levels:
        values = np.round(values * levels) / np.float32(levels)
    values[generator.random(count) < zeros] = 0.0
    return values.astype(np.float32)


@checked
@given(
    count=st.integers(1, 5000),
    seed=st.integers(0, 2**31),
    levels=st.sampled_from([0, 1, 3, 100]),
    zeros=st.sampled_from([0.0, 0.5, 0.99, 1.0]),
    ratio=st.floats(0.0, 1.0),
)
def test_they_are_those_that_sorting_finds(
    count: int, seed: int, levels: int, zeros: float, ratio: float
) -> None:
    elements = drawn(count, seed, levels, zeros)
    before = elements.copy()
    wanted = round(count * ratio)

    places = places_of_largest(elements, wanted)

    assert places.tolist() == by_sorting(elements, wanted)
    assert np.array_equal(elements, before)


def _only_where_the_sample_looks(elements: Floats) -> None:
    elements[::61] += 100.0


def _only_where_the_sample_does_not_look(elements: Floats) -> None:
    elements[1::61] += 100.0


def _mostly_equal(elements: Floats) -> None:
    elements[:] = 1.0
    elements[5000:5100] = -2.0


def _descending(elements: Floats) -> None:
    elements[::-1].sort()


@pytest.mark.parametrize(
    "arrange",
    [
        _only_where_the_sample_looks,
        _only_where_the_sample_does_not_look,
        _mostly_equal,
        _descending,
    ],
)
@pytest.mark.parametrize("ratio", [0.001, 0.01, 0.05])
def test_a_sample_that_misleads_changes_nothing(
    arrange: Callable[[Floats], None], ratio: float
) -> None:
    elements = drawn(20_000, 7, 0, 0.0)
    arrange(elements)
    wanted = round(len(elements) * ratio)

    assert places_of_largest(elements, wanted).tolist() == by_sorting(elements, wanted)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, -np.nan])
def test_what_is_no_number_is_the_largest(bad: float) -> None:
    elements = drawn(1000, 7, 0, 0.0)
    elements[500] = bad

    assert places_of_largest(elements, 1).tolist() == [500]


def test_no_element_is_the_largest_of_none() -> None:
    assert places_of_largest(np.empty(0, np.float32), 0).tolist() == []
