"""How positions are dealt to parts: pure functions, the same for a seed everywhere.

Folds are scikit-learn's. Its splitters know two parts, train and test; three or more
are dealt here, in one go: applied twice they would round twice.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from psworker.data.split_columns import Column, Times
from psworker.data.split_value import Indices
from psworker.errors import ConfigurationError

Sizes = Mapping[str, int]
Fold = dict[str, Indices]

TRAIN = "train"
TEST = "test"

_DRAW_COUNT_MAX = 100


def library(what: str) -> Any:  # noqa: ANN401, untyped
    """`sklearn.model_selection`.

    Raises:
        ConfigurationError: It is not installed.
    """
    try:
        from sklearn import model_selection
    except ImportError:
        raise ConfigurationError(
            f"{what} needs scikit-learn, which is not installed: "
            "pip install 'paramserver[split]'"
        ) from None
    return model_selection


def library_name() -> str:
    """Name and release of what draws folds."""
    import sklearn

    return f"scikit-learn {sklearn.__version__}"


def sample_parts(sizes: Sizes, seed: int) -> Fold:
    """Any samples in any part."""
    order = np.random.RandomState(seed).permutation(sum(sizes.values()))
    return _cut(order, sizes)


def sample_folds(count: int, folds: int, seed: int) -> list[Fold]:
    """Any samples in any fold."""
    splitter = library("folds=").KFold(folds, shuffle=True, random_state=seed)
    return _drawn(splitter.split(np.zeros(count)))


def class_parts(sizes: Sizes, labels: Column, seed: int) -> Fold:
    """Each class in each part by its share: rounded up or down, by less than one."""
    counts = labels.counts
    table = _rounded(counts, np.array(list(sizes.values())))
    random = np.random.RandomState(seed)
    parts: dict[str, list[Indices]] = {name: [] for name in sizes}
    for code in range(len(counts)):
        members = random.permutation(np.flatnonzero(labels.codes == code))
        shares = dict(zip(sizes, table[code].tolist(), strict=True))
        for name, where in _cut(members, shares).items():
            parts[name].append(where)
    return {name: _ascending(np.concatenate(found)) for name, found in parts.items()}


def class_folds(labels: Column, folds: int, seed: int) -> list[Fold]:
    """Each class in each fold by its share."""
    model_selection = library("folds=")
    splitter = model_selection.StratifiedKFold(folds, shuffle=True, random_state=seed)
    return _drawn(splitter.split(np.zeros(len(labels.codes)), labels.codes))


def dirichlet_parts(
    sizes: Sizes, labels: Column, concentration: float, seed: int
) -> Fold:
    """Each class in parts by shares of its own, drawn anew while a part is empty.

    Of M. Yurochkin and others, "Bayesian nonparametric federated learning of neural
    networks", ICML 2019; for parts of one size. Shares are by `sizes` in the mean.
    """
    random = np.random.RandomState(seed)
    # Small data may give a part less than half a sample in the mean.
    means = np.maximum(list(sizes.values()), 0.5) / sum(sizes.values())
    for _ in range(_DRAW_COUNT_MAX):
        parts: dict[str, list[Indices]] = {name: [] for name in sizes}
        for code, count in enumerate(labels.counts.tolist()):
            shares = _shares(random, concentration * len(sizes) * means)
            members = random.permutation(np.flatnonzero(labels.codes == code))
            counts = sizes_of(list(zip(sizes, shares, strict=True)), count)
            for name, where in _cut(members, counts).items():
                parts[name].append(where)
        if all(any(len(each) for each in found) for found in parts.values()):
            break
    return {name: _ascending(np.concatenate(found)) for name, found in parts.items()}


def _shares(random: np.random.RandomState, alpha: npt.NDArray[Any]) -> list[float]:
    """Drawn anew where all of them are too small for a float, and their sum is 0."""
    while True:
        with np.errstate(invalid="ignore"):
            shares: list[float] = random.dirichlet(alpha).tolist()
        if all(map(math.isfinite, shares)):
            return shares


def group_parts(sizes: Sizes, groups: Column, seed: int) -> Fold:
    """Whole groups, large ones first, each to the part that lacks most."""
    counts = groups.counts
    shuffled = np.random.RandomState(seed).permutation(len(counts))
    by_size = shuffled[np.argsort(-counts[shuffled], kind="stable")]
    lacking = np.array(list(sizes.values()), dtype=np.int64)
    part_of = np.full(len(counts), -1)
    every = np.arange(len(lacking))
    is_empty = np.ones(len(lacking), dtype=bool)
    for done, group in enumerate(by_size):
        empty = every[is_empty]
        # The last groups go where there is none yet.
        choice = empty if len(counts) - done <= len(empty) else every
        part = choice[np.argmax(lacking[choice])]
        part_of[group] = part
        is_empty[part] = False
        lacking[part] -= counts[group]
    of_sample = part_of[groups.codes]
    return {
        name: np.flatnonzero(of_sample == part).astype(np.int64)
        for part, name in enumerate(sizes)
    }


def group_folds(
    groups: Column, labels: Column | None, folds: int, seed: int
) -> list[Fold]:
    """Whole groups; with labels, each class by its share as far as groups allow."""
    model_selection = library("folds=")
    count = len(groups.codes)
    if labels is not None:
        splitter = model_selection.StratifiedGroupKFold(
            folds, shuffle=True, random_state=seed
        )
        return _drawn(splitter.split(np.zeros(count), labels.codes, groups.codes))
    # It takes no seed before 1.6, but goes by the order of groups of one size.
    renamed = np.random.RandomState(seed).permutation(len(groups.values))
    splitter = model_selection.GroupKFold(folds)
    return _drawn(splitter.split(np.zeros(count), groups=renamed[groups.codes]))


def time_parts(sizes: Sizes, times: Times) -> Fold:
    """Earlier samples in earlier parts; equal times in one, gaps left out."""
    order = np.argsort(times.numbers, kind="stable")
    ordered = times.numbers[order]
    parts: Fold = {}
    start, last = 0, None
    stop = 0
    for name, size in sizes.items():
        stop += size
        end = _after_equal(ordered, stop)
        own = np.arange(start, end)
        if last is not None:
            own = own[ordered[own] - last > times.gap]
        if len(own):
            last = ordered[own[-1]]
        parts[name] = _ascending(order[own])
        start = max(start, end)
    return parts


def time_folds(times: Times, folds: int) -> list[Fold]:
    """Tests one after the other, each with all that was before it to train on."""
    splitter = library("folds=").TimeSeriesSplit(folds)
    order = np.argsort(times.numbers, kind="stable")
    ordered = times.numbers[order]
    found = []
    for _, test in splitter.split(np.zeros(len(ordered))):
        start, stop = (_after_equal(ordered, int(e)) for e in (test[0], test[-1] + 1))
        before = np.arange(start)
        if start < stop:
            before = before[ordered[start] - ordered[before] > times.gap]
        found.append(
            {TRAIN: _ascending(order[before]), TEST: _ascending(order[start:stop])}
        )
    return found


def window_parts(sizes: Sizes, starts: Indices, span: int, gap: int) -> Fold:
    """Windows that lie whole within the rows of a part."""
    parts = {}
    stop = 0
    for position, (name, size) in enumerate(sizes.items()):
        first = stop + (gap if position else 0)
        stop += size
        parts[name] = _within(starts, span, first, stop)
    return parts


def window_folds(
    row_count: int, starts: Indices, span: int, gap: int, folds: int
) -> list[Fold]:
    """Tests one after the other, each with the windows that end before its rows."""
    splitter = library("folds=").TimeSeriesSplit(folds)
    return [
        {
            TRAIN: _within(starts, span, 0, int(test[0]) - gap),
            TEST: _within(starts, span, int(test[0]), int(test[-1]) + 1),
        }
        for _, test in splitter.split(np.zeros(row_count))
    ]


def sizes_of(fractions: Sequence[tuple[str, float]], count: int) -> dict[str, int]:
    """Fractions of a count as whole numbers that add up, by largest remainders."""
    exact = [(name, fraction * count) for name, fraction in fractions]
    sizes = {name: int(size) for name, size in exact}
    by_rest = sorted(exact, key=lambda each: int(each[1]) - each[1])
    for name, _ in by_rest[: count - sum(sizes.values())]:
        sizes[name] += 1
    return sizes


def _rounded(rows: Indices, columns: Indices) -> Indices:
    """Whole numbers with these sums, each less than one from its exact share.

    Each row rounds up its largest remainders. What columns then have too much or too
    little is passed on along cells that may be rounded either way, which always
    succeeds (Bacharach, "Matrix rounding problems", 1966).
    """
    shares = rows[:, None] * columns[None, :]
    total = int(columns.sum())
    floors, remainders = shares // total, shares % total
    can_rise = remainders > 0
    is_up = np.zeros_like(can_rise)
    for row, lacking in enumerate((rows - floors.sum(axis=1)).tolist()):
        is_up[row, np.argsort(-remainders[row], kind="stable")[:lacking]] = True
    while True:
        off = (floors + is_up).sum(axis=0) - columns
        if not off.any():
            return (floors + is_up).astype(np.int64)
        _pass_on(is_up, can_rise, int(np.argmax(off)), off)


def _pass_on(
    is_up: npt.NDArray[np.bool_],
    can_rise: npt.NDArray[np.bool_],
    source: int,
    off: Indices,
) -> None:
    """Moves one unit from a column that has too much to one that has too little."""
    came_from = {source: (-1, -1)}
    queue = [source]
    for column in queue:
        if off[column] < 0:
            while came_from[column][0] >= 0:
                before, row = came_from[column]
                is_up[row, before], is_up[row, column] = False, True
                column = before
            return
        for other in range(len(off)):
            movable = is_up[:, column] & can_rise[:, other] & ~is_up[:, other]
            if other not in came_from and movable.any():
                came_from[other] = (column, int(np.argmax(movable)))
                queue.append(other)
    raise AssertionError("some rounding has these sums")


def _cut(order: Indices, sizes: Sizes) -> Fold:
    stops = np.cumsum(list(sizes.values()))
    pieces = np.split(order, stops[:-1])
    return {name: _ascending(each) for name, each in zip(sizes, pieces, strict=True)}


def _ascending(where: Indices) -> Indices:
    return np.sort(where).astype(np.int64)


def _drawn(found: Any) -> list[Fold]:  # noqa: ANN401, untyped
    return [{TRAIN: _ascending(train), TEST: _ascending(test)} for train, test in found]


def _after_equal(ordered: npt.NDArray[Any], stop: int) -> int:
    """The first position from `stop` on whose time is later than the one before."""
    if stop == 0:
        return 0
    return int(np.searchsorted(ordered, ordered[stop - 1], side="right"))


def _within(starts: Indices, span: int, first: int, stop: int) -> Indices:
    is_inside = (starts >= first) & (starts + span <= stop)
    return np.flatnonzero(is_inside).astype(np.int64)
