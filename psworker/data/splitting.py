"""`split()`: data in parts or folds, drawn the same by everybody, and checked.

What can't be split as asked is refused in words: a split that leaks or lacks a class
shows in no loss, only in a model that is worse than its numbers.
"""

import math
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import numpy as np

from pswire.leased_data import RecordedSplit
from psworker.data import split_rules as rules
from psworker.data.split_columns import Column, Times, read_column, read_gap, read_times
from psworker.data.split_value import Indices, Split, SplitRecipe
from psworker.errors import ConfigurationError, SplitError, refuse_name
from psworker.tracebacks import at_entrance

DEFAULT_PARTS: Final = {"train": 0.8, "valid": 0.1, "test": 0.1}

_KINDS: Final = ("sample", "class", "dirichlet", "group", "time", "window")
_SEED_MAX: Final = 2**32 - 1  # of numpy's generator, whose numbers never change


@at_entrance
def split(
    data: Any,  # noqa: ANN401, whatever has a length
    *,
    by: str = "sample",
    parts: Mapping[str, float] | None = None,
    folds: int | None = None,
    seed: int = 0,
    labels: object = None,
    groups: object = None,
    times: object = None,
    gap: object = 0,
    window: int | None = None,
    stride: int | None = None,
    horizon: int = 0,
    concentration: float | None = None,
) -> Split:
    """Splits data into parts, such as for training and testing, or into folds.

    The same arguments give the same split on every machine. Folds need scikit-learn:
    `pip install 'paramserver[split]'`.

    Args:
        data: The data, or how many samples it has. For windows, its rows in order of
            time.
        by: What stays together or in order. `sample`: nothing. `class`: each part has
            its share of each of the `labels`, to less than one sample. `dirichlet`:
            each class goes to the parts by shares that are drawn, so that parts differ
            in their classes, as the data of workers may. `group`: no group is in two
            parts. `time`: no part has a sample from before the end of
            an earlier part. `window`: overlapping windows, of which no two in
            different parts share a row.
        parts: Names of the parts in their order, each with its fraction (together 1)
            or its number of samples; 80 % `train`, 10 % `valid` and 10 % `test` if
            neither parts nor folds are given. By group, fractions of samples, met as
            well as whole groups allow; by Dirichlet, in the mean; for windows, of rows.
        folds: Number of folds, at least 2. Each has `train` and `test`; by time and
            window, tests follow each other, each with what was before to train on.
        seed: Of the random numbers, 0 to 2^32 - 1. Without meaning by time and window.
        labels: A class for each sample, by class and by Dirichlet; by group also, to
            share out classes among folds as far as groups allow.
        groups: A group for each sample. Otherwise than by group, a check: no group may
            come to be in two parts.
        times: A time for each sample, numbers or dates; without, samples are in order.
        gap: Between parts by time, what is left out: in the unit of the times, a
            timedelta for dates, rows without times and for windows.
        window: Rows of a window.
        stride: Rows between the starts of two windows, 1 if not given.
        horizon: Rows after a window that belong to it, such as its target.
        concentration: By Dirichlet: how alike parts are, from 0.01, where a part has
            one class or two, to 1,000, where each has its share of every class. 0.5 if
            not given.

    Returns:
        The split. Its positions are those of samples; of windows, by `window`.

    Raises:
        ConfigurationError: The data can't be split like this; the text says why.
    """
    if by not in _KINDS:
        raise ConfigurationError(f"by={by!r} is none of {', '.join(_KINDS)}")
    count = _count_of(data)
    _check_columns(by, labels=labels, groups=groups, times=times, gap=gap, folds=folds)
    _check_number("seed", seed, 0, _SEED_MAX)
    columns = _Columns(
        labels=None if labels is None else read_column("labels", labels, count),
        groups=None if groups is None else read_column("groups", groups, count),
        times=read_times(times, gap, count) if by == "time" else None,
    )
    if by == "window":
        _check_window(count, window, stride, horizon)
    elif window is not None or stride is not None or horizon:
        raise ConfigurationError("window, stride and horizon are for by='window'")
    if by != "dirichlet" and concentration is not None:
        raise ConfigurationError("concentration is for by='dirichlet'")
    wanted = 0.5 if concentration is None else concentration
    if not isinstance(wanted, int | float) or not 0.01 <= wanted <= 1000:
        raise ConfigurationError(
            f"concentration={concentration!r} must be a number from 0.01 to 1000"
        )
    if folds is not None:
        if parts is not None:
            raise ConfigurationError("give parts or folds, not both")
        _check_number("folds", folds, 2, count)
    chosen = DEFAULT_PARTS if parts is None and folds is None else parts or {}
    recipe = SplitRecipe(
        by=by,
        data_count=count,
        parts=tuple((name, _plain(size)) for name, size in chosen.items()),
        folds=folds or 0,
        seed=seed,
        gap=_gap_of(by, gap, columns),
        window=window or 0,
        stride=1 if stride is None else stride,
        horizon=horizon,
        concentration=float(wanted) if by == "dirichlet" else 0.0,
        labels=columns.labels.digest if columns.labels else "",
        groups=columns.groups.digest if columns.groups else "",
        times=columns.times.digest if columns.times else "",
        library=_library(folds),
    )
    return _built(recipe, columns)


def rebuilt(
    recipe: SplitRecipe,
    data: Any,  # noqa: ANN401, whatever has a length
    *,
    labels: object = None,
    groups: object = None,
    times: object = None,
) -> Split:
    """The split of a recipe over again.

    Raises:
        ConfigurationError: The data does not fit it.
        SplitError: The data is not what was split.
    """
    given = split(
        data,
        by=recipe.by,
        parts=None if recipe.folds else dict(recipe.parts),
        folds=recipe.folds or None,
        seed=recipe.seed,
        labels=labels,
        groups=groups,
        times=times,
        gap=_gap_again(recipe, times),
        window=recipe.window or None,
        stride=recipe.stride if recipe.window else None,
        horizon=recipe.horizon,
        concentration=recipe.concentration or None,
    )
    differences = given.recipe.differences(recipe)
    others = [each for each in differences if not each.startswith("library ")]
    if others:
        raise SplitError(
            f"the data is not what was split: {'; '.join(others)}; give the same data, "
            "with the same labels, groups and times"
        )
    return given


def _gap_again(recipe: SplitRecipe, times: object) -> object:
    kind = np.asarray(times).dtype.kind if times is not None else ""
    is_date = kind == "M" or (kind == "O" and recipe.by == "time")
    return np.timedelta64(int(recipe.gap), "ns") if is_date else recipe.gap


def _gap_of(by: str, gap: object, columns: "_Columns") -> float:
    if columns.times is not None:
        return columns.times.gap
    return read_gap(gap, "rows") if by == "window" else 0


def _plain(size: Any) -> Any:  # noqa: ANN401, numbers of numpy too
    return size.item() if isinstance(size, np.generic) else size


class _Columns(NamedTuple):
    """What was given along with the data."""

    labels: Column | None
    groups: Column | None
    times: Times | None


def _built(recipe: SplitRecipe, columns: _Columns) -> Split:
    if recipe.by == "window":
        return _built_of_windows(recipe)
    sizes = _sizes(recipe) if not recipe.folds else {}
    _check_members(recipe, columns)
    folds = _dealt(recipe, columns, sizes)
    _refuse_empty(folds, recipe)
    if columns.groups is not None and recipe.by != "group":
        _refuse_leaks(folds, columns.groups, recipe.by)
    return Split(recipe, recipe.data_count, folds)


def _dealt(
    recipe: SplitRecipe, columns: _Columns, sizes: rules.Sizes
) -> list[rules.Fold]:
    folds, seed = recipe.folds, recipe.seed
    labels, groups, times = columns
    if recipe.by == "class":
        assert labels is not None, "checked"
        if folds:
            return rules.class_folds(labels, folds, seed)
        return [rules.class_parts(sizes, labels, seed)]
    if recipe.by == "dirichlet":
        assert labels is not None, "checked"
        return [rules.dirichlet_parts(sizes, labels, recipe.concentration, seed)]
    if recipe.by == "group":
        assert groups is not None, "checked"
        if folds:
            return rules.group_folds(groups, labels, folds, seed)
        return [rules.group_parts(sizes, groups, seed)]
    if recipe.by == "time":
        assert times is not None, "read"
        if folds:
            return rules.time_folds(times, folds)
        return [rules.time_parts(sizes, times)]
    if folds:
        return rules.sample_folds(recipe.data_count, folds, seed)
    return [rules.sample_parts(sizes, seed)]


def _built_of_windows(recipe: SplitRecipe) -> Split:
    span = recipe.window + recipe.horizon
    starts: Indices = np.arange(
        0, recipe.data_count - span + 1, recipe.stride, dtype=np.int64
    )
    gap = math.ceil(recipe.gap)
    if recipe.folds:
        folds = rules.window_folds(recipe.data_count, starts, span, gap, recipe.folds)
    else:
        folds = [rules.window_parts(_sizes(recipe), starts, span, gap)]
    _refuse_empty(folds, recipe)
    return Split(recipe, len(starts), folds)


def _sizes(recipe: SplitRecipe) -> dict[str, int]:
    """Sizes of the parts as numbers that add up."""
    count = recipe.data_count
    if not recipe.parts:
        raise ConfigurationError("parts names no part; name two or more")
    for name, size in recipe.parts:
        if not isinstance(name, str) or not name:
            raise ConfigurationError(f"{name!r} is no name of a part; give a string")
        if isinstance(size, bool) or not isinstance(size, int | float) or not size > 0:
            raise ConfigurationError(
                f"part {name!r} has size {size!r}; give a fraction or a count above 0"
            )
    total = sum(size for _, size in recipe.parts)
    if all(isinstance(size, int) for _, size in recipe.parts):
        if total != count:
            raise ConfigurationError(
                f"the parts have {total} samples together and the data has {count}; "
                "let them add up, if need be with a part for what is left"
            )
        return {name: int(size) for name, size in recipe.parts}
    if any(isinstance(size, int) for _, size in recipe.parts):
        raise ConfigurationError(
            "give all parts as fractions or all as counts, not some of each"
        )
    if abs(total - 1) > 1e-6:
        raise ConfigurationError(
            f"the fractions of the parts add up to {total:g}, not to 1; let them, if "
            "need be with a part for what is left"
        )
    return rules.sizes_of([(n, s / total) for n, s in recipe.parts], count)


def _check_members(recipe: SplitRecipe, columns: _Columns) -> None:
    """Refuses classes and groups that are too few."""
    count = recipe.folds or len(recipe.parts)
    what = "folds" if recipe.folds else "parts"
    if recipe.by == "class":
        assert columns.labels is not None, "checked"
        members = columns.labels.counts
        rarest = int(np.argmin(members))
        if members[rarest] < count:
            raise ConfigurationError(
                f"class {columns.labels.shown(rarest)} has {members[rarest]} "
                f"members, which are too few for {count} {what}; join it with another "
                "class, leave it out, or split by='sample'"
            )
    if recipe.by == "group":
        assert columns.groups is not None, "checked"
        group_count = len(columns.groups.values)
        if group_count < count:
            raise ConfigurationError(
                f"there are {group_count} groups, which are too few for {count} {what}"
                "; take fewer, or smaller groups"
            )


def _refuse_empty(folds: list[rules.Fold], recipe: SplitRecipe) -> None:
    for position, fold in enumerate(folds):
        for name, where in fold.items():
            if not len(where):
                place = f" of fold {position}" if recipe.folds else ""
                raise ConfigurationError(
                    f"part {name!r}{place} would be empty: {recipe.data_count} samples "
                    f"by {recipe.by} are too few for its size"
                    f"{', the gap' if recipe.gap else ''} and what must stay together; "
                    "make it larger, or take fewer"
                )


def _refuse_leaks(folds: list[rules.Fold], groups: Column, by: str) -> None:
    """Refuses groups that are in two parts."""
    for fold in folds:
        seen: dict[int, str] = {}
        for name, where in fold.items():
            for code in np.unique(groups.codes[where]).tolist():
                if code in seen:
                    raise ConfigurationError(
                        f"by={by!r} puts group {groups.shown(code)} into "
                        f"{seen[code]!r} and {name!r}: what is learned of it in one "
                        "shows in the other; split by='group', or give no groups"
                    )
                seen[code] = name


def _check_columns(
    by: str,
    *,
    labels: object,
    groups: object,
    times: object,
    gap: object,
    folds: object,
) -> None:
    """Refuses what is missing, and what would be of no effect."""
    by_class = by in ("class", "dirichlet")
    if (by_class and labels is None) or (by == "group" and groups is None):
        name = "labels" if by_class else "groups"
        raise ConfigurationError(f"by={by!r} needs {name}: one for each sample")
    if labels is not None and not by_class and not (by == "group" and folds):
        raise ConfigurationError(
            "labels are for by='class' and 'dirichlet', and for by='group' with folds; "
            "leave them out"
        )
    if by == "dirichlet" and folds:
        raise ConfigurationError(
            "by='dirichlet' makes parts, one for each worker, and no folds"
        )
    if times is not None and by != "time":
        raise ConfigurationError("times are for by='time'; leave them out")
    if groups is not None and by == "window":
        raise ConfigurationError(
            "by='window' takes no groups: split each series by itself"
        )
    if by not in ("time", "window") and gap != 0:
        raise ConfigurationError("gap is for by='time' and by='window'")


def _check_window(
    count: int, window: int | None, stride: int | None, horizon: int
) -> None:
    if window is None:
        raise ConfigurationError("by='window' needs window=: the rows of a window")
    _check_number("window", window, 1, count)
    _check_number("stride", 1 if stride is None else stride, 1, count)
    _check_number("horizon", horizon, 0, count - window)


def _check_number(name: str, given: object, least: int, most: int) -> None:
    if type(given) is not int or not least <= given <= most:  # a bool is none
        raise ConfigurationError(
            f"{name}={given!r} must be a whole number from {least} to {most}"
        )


def _count_of(data: Any) -> int:  # noqa: ANN401, whatever has a length
    count = data
    if not isinstance(data, int):
        try:
            count = len(data)
        except TypeError:
            raise ConfigurationError(
                f"a {type(data).__name__} has no length, so there are no positions to "
                "split; give a map-style dataset, a sequence, or a number of samples"
            ) from None
    if isinstance(data, bool) or count < 1:
        raise ConfigurationError(f"there are {data!r} samples; give at least 1")
    return int(count)


def _library(folds: int | None) -> str:
    if not folds:
        return f"numpy {np.__version__}"
    rules.library("folds=")
    return rules.library_name()


def to_record(name: str, split: object) -> RecordedSplit:
    """What the coordinator records of a split.

    Raises:
        ConfigurationError: It is none, or the name is no text.
    """
    if not isinstance(name, str) or not name:
        raise ConfigurationError(f"{name!r} is no name of a split; give a string")
    refuse_name("name of a split", name, "record it under another name")
    if not isinstance(split, Split):
        raise ConfigurationError(
            f"a {type(split).__name__} is no split: give what psworker.data.split() "
            "returns"
        )
    return RecordedSplit(
        name=name,
        digest=split.digest,
        item_count=split.item_count,
        recipe=split.recipe.to_json(),
    )


def check_recorded(split: Split, recorded: RecordedSplit) -> None:
    """Compares a worker's split with the one that the job has under its name.

    Raises:
        SplitError: They differ; the text says how.
    """
    if split.digest == recorded.digest:
        return
    try:
        theirs = SplitRecipe.from_json(recorded.recipe)
        differences = split.recipe.differences(theirs)
    except (ValueError, TypeError):
        differences = []
    how = "; ".join(differences) or "with the same recipe other positions were drawn"
    recorder = f"worker {recorded.recorder!r}" if recorded.recorder else "this script"
    raise SplitError(
        f"split {recorded.name!r} differs from the one that {recorder} has recorded: "
        f"{how}; give every worker the same data, "
        "arguments and release of the library, or record this split under another name"
    )


def read_back(
    recorded: RecordedSplit,
    data: object,
    *,
    labels: object = None,
    groups: object = None,
    times: object = None,
) -> Split:
    """Draws a recorded split again, and checks that it is the same.

    Raises:
        ConfigurationError: The data can't be split like this.
        SplitError: It is not the same.
    """
    try:
        recipe = SplitRecipe.from_json(recorded.recipe)
    except (ValueError, TypeError):
        raise SplitError(
            f"the recipe of split {recorded.name!r} is of another release; install the "
            "release that the job's workers have"
        ) from None
    split = rebuilt(recipe, data, labels=labels, groups=groups, times=times)
    check_recorded(split, recorded)
    return split
