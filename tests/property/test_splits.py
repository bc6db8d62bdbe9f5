"""Splits of any data: disjoint, complete, in proportion, whole and in order."""

import itertools
from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from psworker.data import Parts, Split, split
from psworker.errors import ConfigurationError

SETTINGS = settings(derandomize=True, max_examples=60, deadline=None)

seeds = st.integers(0, 2**32 - 1)
fractions = st.lists(st.integers(1, 9), min_size=2, max_size=4).map(
    lambda weights: {
        f"part{number}": weight / sum(weights) for number, weight in enumerate(weights)
    }
)


def asked(count: int, **arguments: object) -> Split:
    """The split, unless it is one that is refused, as some drawn ones must be."""
    try:
        return split(count, **arguments)  # type: ignore[arg-type]
    except ConfigurationError as refused:
        if "too few" not in str(refused):
            raise
    assume(False)
    raise AssertionError("drawn anew")


def all_in(parts: Iterable[np.ndarray]) -> list[int]:
    return sorted(itertools.chain.from_iterable(each.tolist() for each in parts))


def assert_folds_test_everything_once(made: Split, count: int) -> None:
    assert all_in(fold.test for fold in made.folds) == list(range(count))
    for fold in made.folds:
        assert all_in(fold.values()) == list(range(count))


@SETTINGS
@given(st.integers(4, 200), fractions, seeds)
def test_parts_by_sample_are_disjoint_complete_and_of_their_sizes(
    count: int, parts: dict[str, float], seed: int
) -> None:
    made = asked(count, parts=parts, seed=seed)
    assert all_in(made.folds[0].values()) == list(range(count))
    for name, fraction in parts.items():
        assert abs(len(made[name]) - fraction * count) < 1
    assert made.digest == split(count, parts=parts, seed=seed).digest


@SETTINGS
@given(st.integers(2, 100), st.data(), seeds)
def test_folds_by_sample_test_each_sample_once(
    count: int, data: st.DataObject, seed: int
) -> None:
    folds = data.draw(st.integers(2, min(7, count)))
    made = split(count, folds=folds, seed=seed)
    assert_folds_test_everything_once(made, count)


@SETTINGS
@given(
    st.lists(st.integers(4, 40), min_size=1, max_size=7),
    fractions,
    seeds,
    st.booleans(),
)
def test_each_class_is_in_each_part_by_its_share_to_less_than_one(
    class_sizes: list[int], parts: dict[str, float], seed: int, is_shuffled: bool
) -> None:
    labels = np.repeat(np.arange(len(class_sizes)), class_sizes)
    if is_shuffled:
        labels = np.random.RandomState(seed).permutation(labels)
    made = asked(len(labels), by="class", labels=labels, parts=parts, seed=seed)
    assert all_in(made.folds[0].values()) == list(range(len(labels)))
    for where in made.folds[0].values():
        for label, size in enumerate(class_sizes):
            share = size * len(where) / len(labels)
            assert abs(np.count_nonzero(labels[where] == label) - share) < 1
    of_any = split(len(labels), parts=parts)
    assert [len(made[name]) for name in parts] == [len(of_any[name]) for name in parts]


@SETTINGS
@given(
    st.lists(st.integers(4, 40), min_size=1, max_size=7),
    fractions,
    st.floats(0.01, 1000),
    seeds,
)
def test_parts_by_dirichlet_are_disjoint_complete_and_not_empty(
    class_sizes: list[int], parts: dict[str, float], concentration: float, seed: int
) -> None:
    labels = np.repeat(np.arange(len(class_sizes)), class_sizes)
    made = asked(
        len(labels),
        by="dirichlet",
        labels=labels,
        parts=parts,
        concentration=concentration,
        seed=seed,
    )
    assert all_in(made.folds[0].values()) == list(range(len(labels)))
    assert all(len(where) for where in made.folds[0].values())


def test_the_concentration_says_how_alike_parts_by_dirichlet_are() -> None:
    labels = np.repeat(np.arange(10), 100)
    parts = {f"worker {number}": 0.1 for number in range(10)}

    def classes_of_half(concentration: float) -> float:
        """Classes that make up half of a part, in the mean."""
        made = split(
            1000,
            by="dirichlet",
            labels=labels,
            parts=parts,
            concentration=concentration,
        )
        counts = [np.bincount(labels[each]) for each in made.folds[0].values()]
        return float(
            np.mean(
                [
                    1 + np.searchsorted(np.cumsum(np.sort(c)[::-1]), c.sum() / 2)
                    for c in counts
                ]
            )
        )

    assert classes_of_half(1000) == 5
    assert 2 < classes_of_half(1) < 4
    assert classes_of_half(0.05) < 2


@SETTINGS
@given(st.lists(st.integers(5, 20), min_size=2, max_size=5), st.integers(2, 5), seeds)
def test_each_class_is_in_each_fold_by_its_share(
    class_sizes: list[int], folds: int, seed: int
) -> None:
    labels = np.repeat(np.arange(len(class_sizes)), class_sizes)
    made = split(len(labels), by="class", labels=labels, folds=folds, seed=seed)
    assert_folds_test_everything_once(made, len(labels))
    for fold in made.folds:
        for label, size in enumerate(class_sizes):
            found = np.count_nonzero(labels[fold.test] == label)
            assert abs(found - size / folds) <= 1


@SETTINGS
@given(st.lists(st.integers(0, 12), min_size=8, max_size=80), fractions, seeds)
def test_groups_stay_whole_and_no_part_is_empty(
    groups: list[int], parts: dict[str, float], seed: int
) -> None:
    made = asked(len(groups), by="group", groups=groups, parts=parts, seed=seed)
    assert_groups_whole(made.folds[0], groups)
    assert all_in(made.folds[0].values()) == list(range(len(groups)))
    # Whole groups miss a size by one group at most.
    largest = max(groups.count(each) for each in groups)
    for name, fraction in parts.items():
        assert len(made[name]) - fraction * len(groups) < largest + 1


@SETTINGS
@given(
    st.lists(st.integers(0, 9), min_size=12, max_size=60),
    st.integers(2, 3),
    st.booleans(),
    seeds,
)
def test_groups_stay_whole_in_folds(
    groups: list[int], folds: int, is_stratified: bool, seed: int
) -> None:
    labels = [each % 2 for each in range(len(groups))] if is_stratified else None
    made = asked(
        len(groups), by="group", groups=groups, labels=labels, folds=folds, seed=seed
    )
    assert_folds_test_everything_once(made, len(groups))
    for fold in made.folds:
        assert_groups_whole(fold, groups)


def assert_groups_whole(parts: Parts, groups: list[int]) -> None:
    found = [{groups[index] for index in where.tolist()} for where in parts.values()]
    assert sum(map(len, found)) == len(set().union(*found))


@SETTINGS
@given(
    st.lists(st.integers(0, 60), min_size=8, max_size=80), fractions, st.integers(0, 6)
)
def test_no_part_has_anything_of_before_an_earlier_one(
    times: list[int], parts: dict[str, float], gap: int
) -> None:
    made = asked(len(times), by="time", times=times, parts=parts, gap=gap)
    values = [np.array(times)[where] for where in made.folds[0].values()]
    for earlier, later in itertools.pairwise(values):
        assert later.min() - earlier.max() > gap
    kept = all_in(made.folds[0].values())
    assert len(set(kept)) == len(kept)
    if gap == 0:
        assert kept == list(range(len(times)))


@SETTINGS
@given(
    st.lists(st.integers(0, 60), min_size=12, max_size=80),
    st.integers(2, 4),
    st.integers(0, 6),
)
def test_folds_by_time_train_on_what_was_before(
    times: list[int], folds: int, gap: int
) -> None:
    made = asked(len(times), by="time", times=times, folds=folds, gap=gap)
    values = np.array(times)
    last = -1
    for fold in made.folds:
        assert values[fold.test].min() - values[fold.train].max() > gap
        assert values[fold.test].min() > last
        last = values[fold.test].max()
    assert last == values.max()


@SETTINGS
@given(
    st.integers(20, 70),
    st.integers(1, 6),
    st.integers(1, 5),
    st.integers(0, 3),
    st.integers(0, 4),
    st.sampled_from([None, 2, 3]),
)
def test_windows_of_different_parts_share_no_row(
    rows: int, window: int, stride: int, horizon: int, gap: int, folds: int | None
) -> None:
    made = asked(
        rows,
        by="window",
        window=window,
        stride=stride,
        horizon=horizon,
        gap=gap,
        folds=folds,
        parts=None if folds else {"train": 0.5, "valid": 0.25, "test": 0.25},
    )
    for number, fold in enumerate(made.folds):
        which = number if folds else None
        used = []
        for name in fold:
            spans = made.rows(name, fold=which)
            assert np.all(spans[:, 1] - spans[:, 0] == window + horizon)
            assert spans.max() <= rows
            used.append({row for span in spans.tolist() for row in range(*span)})
        for earlier, later in itertools.pairwise(used):
            assert min(later) - max(earlier) > gap
        # What is in no part lies across a border, or within a gap.
        inside = [set(range(min(each), max(each) + 1)) for each in used]
        for item in range(made.item_count):
            span = set(range(item * stride, item * stride + window + horizon))
            is_taken = any(item in where for where in fold.values())
            assert is_taken or not any(span <= part for part in inside)


@pytest.mark.parametrize("count", [1, 2, 9])
def test_few_samples_are_split_or_refused_but_never_left_out(count: int) -> None:
    made = split(count, parts={"all": count})
    assert made["all"].tolist() == list(range(count))
