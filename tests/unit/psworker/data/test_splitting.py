"""What `split()` gives and refuses; `tests/property/test_splits.py` draws the rest."""

import sys
from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset, TensorDataset

from psworker.data import Split, SplitRecipe, split
from psworker.data.splitting import rebuilt
from psworker.errors import ConfigurationError, SplitError

COUNT = 60
LABELS = [number % 3 for number in range(COUNT)]
GROUPS = [number // 5 for number in range(COUNT)]
DAYS = [datetime(2024, 1, 1) + timedelta(days=number) for number in range(COUNT)]


def test_a_split_has_parts_by_name_and_subsets_of_the_data() -> None:
    dataset = TensorDataset(torch.arange(COUNT))
    made = split(dataset, parts={"train": 40, "test": 20}, seed=3)
    assert made.train is made["train"]
    assert (len(made.train), len(made.test)) == (40, 20)
    subset = made.subset(dataset, "test")
    assert [int(value) for (value,) in subset] == made.test.tolist()
    assert split([None] * COUNT, parts={"train": 40, "test": 20}, seed=3).digest == (
        made.digest
    )
    assert split(COUNT, parts={"train": 40, "test": 20}, seed=4).digest != made.digest
    assert "60 samples by sample, seed 3: train 40, test 20; digest" in made.describe()
    assert made.describe() in repr(made)
    assert list(made.folds[0]) == ["train", "test"]


def test_without_parts_it_is_eight_to_one_to_one() -> None:
    made = split(COUNT)
    assert [len(where) for where in made.folds[0].values()] == [48, 6, 6]
    assert list(made.folds[0]) == ["train", "valid", "test"]


def test_the_positions_of_a_seed_are_the_same_in_every_release() -> None:
    """Recorded jobs rely on it."""
    assert split(10, parts={"a": 6, "b": 4}, seed=1)["b"].tolist() == [1, 5, 7, 8]
    stratified = split(
        12, by="class", labels=[0, 1, 2] * 4, parts={"a": 0.5, "b": 0.5}, seed=1
    )
    assert stratified["b"].tolist() == [0, 2, 3, 4, 5, 10]
    uneven = split(
        12, by="dirichlet", labels=[0, 1, 2] * 4, parts={"a": 0.5, "b": 0.5}, seed=1
    )
    assert uneven["b"].tolist() == [1, 4, 5, 7, 11]


def test_folds_are_taken_one_by_one() -> None:
    made = split(COUNT, folds=3)
    assert len(made.folds) == 3
    assert len(made.subset(range(COUNT), "test", fold=1)) == 20
    with pytest.raises(KeyError, match="has 3 folds"):
        made["train"]
    with pytest.raises(ConfigurationError, match="say which, fold=0 to fold=2"):
        made.subset(range(COUNT), "train")
    with pytest.raises(ConfigurationError, match="fold=3 is none of this split's 3"):
        made.subset(range(COUNT), "train", fold=3)
    with pytest.raises(AttributeError, match=r"take \.folds\[0\]\.train"):
        _ = made.train
    assert "3 folds, the first: train 40, test 20" in made.describe()


def test_a_part_that_is_not_there_is_told() -> None:
    with pytest.raises(AttributeError, match="'tets' is no part; there are 'train'"):
        _ = split(COUNT).tets
    with pytest.raises(KeyError, match="'tets' is no part"):
        split(COUNT)["tets"]


def test_dates_are_times_and_their_gap_a_timedelta() -> None:
    parts = {"train": 0.5, "test": 0.5}
    made = split(COUNT, by="time", times=DAYS, parts=parts, gap=timedelta(days=2))
    assert made.train.tolist() == list(range(30))
    assert made.test.tolist() == list(range(32, 60))
    same = split(
        COUNT,
        by="time",
        times=np.array(DAYS, dtype="datetime64[s]"),
        parts=parts,
        gap=np.timedelta64(2, "D"),
    )
    assert same.digest == made.digest
    assert same.recipe.times == made.recipe.times


def test_without_times_the_order_is_that_of_the_data() -> None:
    made = split(COUNT, by="time", parts={"train": 30, "test": 30}, gap=4)
    assert (made.train.max(), made.test.min()) == (29, 34)


def test_windows_are_numbered_and_have_rows() -> None:
    made = split(
        COUNT,
        by="window",
        parts={"train": 0.5, "test": 0.5},
        window=4,
        stride=2,
        horizon=1,
    )
    assert made.item_count == 28
    assert made.rows("train")[:2].tolist() == [[0, 5], [2, 7]]
    assert made.rows("train").max() <= 30 <= made.rows("test").min()
    assert "28 windows by window" in made.describe()
    with pytest.raises(ConfigurationError, match=r"60 items .* 28 windows"):
        made.subset(range(COUNT), "train")
    with pytest.raises(ConfigurationError, match="only a split by='window'"):
        split(COUNT).rows("train")


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


REFUSALS: list[tuple[dict[str, Any], str]] = [
    (
        {"by": "samples"},
        "by='samples' is none of sample, class, dirichlet, group, time, window",
    ),
    ({"data": Stream()}, r"Stream has no length.*give a map-style dataset"),
    ({"data": 0}, "there are 0 samples; give at least 1"),
    ({"data": True}, "there are True samples"),
    ({"seed": -1}, "seed=-1 must be a whole number from 0 to 4294967295"),
    ({"seed": 0.5}, "seed=0.5 must be a whole number"),
    ({"folds": 1}, "folds=1 must be a whole number from 2 to 60"),
    ({"folds": 61}, "folds=61 must be"),
    ({"folds": 3, "parts": {"a": 1.0}}, "give parts or folds, not both"),
    ({"parts": {}}, "parts names no part; name two or more"),
    ({"parts": {"": 1.0}}, "'' is no name of a part"),
    ({"parts": {"a": 0.5, "b": 0.4}}, r"add up to 0\.9, not to 1; .*for what is left"),
    ({"parts": {"a": 30, "b": 20}}, "50 samples together and the data has 60; let"),
    ({"parts": {"a": 30, "b": 0.5}}, "all parts as fractions or all as counts"),
    ({"parts": {"a": 1.5, "b": -0.5}}, r"part 'b' has size -0\.5; give a fraction"),
    ({"parts": {"a": "half"}}, "part 'a' has size 'half'"),
    ({"data": 4}, "part '(valid|test)' would be empty: 4 samples by sample are too f"),
    ({"by": "class"}, "by='class' needs labels: one for each sample"),
    ({"by": "group"}, "by='group' needs groups"),
    ({"by": "class", "labels": [1, 2]}, r"labels of shape \[2\] do not fit 60 samples"),
    ({"by": "class", "labels": [[1]] * 60}, r"labels of shape \[60, 1\] do not fit"),
    (
        {"by": "class", "labels": [1.0] * 59 + [float("nan")]},
        r"labels\[59\] is missing .*, and 0 more are; leave",
    ),
    ({"by": "class", "labels": ["a", None] * 30}, r"labels\[1\] is missing"),
    (
        {"by": "class", "labels": np.array(["a", 1] * 30, dtype=object)},
        "labels are of kinds that can't be compared",
    ),
    (
        {"by": "class", "labels": ["b"] * 58 + ["a"] * 2},
        "class 'a' has 2 members, which are too few for 3 parts; join it",
    ),
    (
        {"by": "class", "labels": [0] * 58 + [1] * 2, "folds": 3},
        "class 1 has 2 members, which are too few for 3 folds",
    ),
    ({"by": "group", "groups": [0, 1] * 30}, "2 groups, which are too few for 3 parts"),
    ({"groups": GROUPS}, "by='sample' puts group .* into .*; split by='group', or"),
    (
        {"by": "class", "labels": LABELS, "groups": GROUPS, "folds": 3},
        "by='class' puts group",
    ),
    ({"labels": LABELS}, "labels are for by='class'"),
    ({"by": "dirichlet"}, "needs labels"),
    ({"by": "dirichlet", "labels": LABELS, "folds": 3}, "one for each worker, and no"),
    ({"concentration": 1.0}, "concentration is for by='dirichlet'"),
    (
        {"by": "dirichlet", "labels": LABELS, "concentration": 0.001},
        "concentration=0.001 must be a number from 0.01 to 1000",
    ),
    ({"times": DAYS}, "times are for by='time'"),
    ({"gap": 3}, "gap is for by='time' and by='window'"),
    (
        {"by": "time", "times": [1.0, float("nan")] * 30},
        r"times\[1\] is no time .*29",
    ),
    (
        {"by": "time", "times": np.array([np.datetime64("NaT", "s")] * 60)},
        r"times\[0\] is no time \(NaN or NaT\), as are 59 more",
    ),
    ({"by": "time", "times": ["noon"] * 60}, "times must be numbers or dates"),
    ({"by": "time", "times": [object()] * 60}, "times must be numbers or dates"),
    ({"by": "time", "gap": -1}, "gap=-1 must be a number from 0, in rows"),
    ({"by": "time", "times": DAYS, "gap": 2}, "gap=2 must be a timedelta"),
    ({"by": "time", "gap": 30}, "would be empty: 60 samples by time .* the gap"),
    ({"by": "window"}, "needs window=: the rows of a window"),
    ({"by": "window", "window": 61}, "window=61 must be a whole number from 1 to 60"),
    ({"by": "window", "window": 5, "stride": 0}, "stride=0 must be"),
    ({"by": "window", "window": 5, "horizon": 56}, "horizon=56 must be"),
    ({"by": "window", "window": 5, "groups": GROUPS}, "split each series by itself"),
    ({"by": "window", "window": 40}, "would be empty"),
    ({"window": 5}, "window, stride and horizon are for by='window'"),
]


@pytest.mark.parametrize(("arguments", "says"), REFUSALS)
def test_what_cant_be_split_is_refused_in_words(
    arguments: dict[str, Any], says: str
) -> None:
    data = arguments.pop("data", COUNT) if "data" in arguments else COUNT
    with pytest.raises(ConfigurationError, match=says):
        split(data, **arguments)


def test_groups_that_stay_whole_by_chance_are_no_leak() -> None:
    made = split(COUNT, by="time", parts={"train": 30, "test": 30}, groups=GROUPS)
    assert len(made.train) == 30


def test_without_scikit_learn_folds_name_the_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'paramserver\[split\]'"):
        split(COUNT, folds=3)
    assert len(split(COUNT).train) == 48


EACH_KIND: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"seed": 5}, {}),
    ({"folds": 4, "seed": 2}, {}),
    ({"by": "class", "parts": {"a": 0.5, "b": 0.5}}, {"labels": LABELS}),
    (
        {"by": "dirichlet", "parts": {"a": 0.5, "b": 0.5}, "concentration": 2},
        {"labels": LABELS},
    ),
    ({"by": "group", "folds": 3}, {"groups": GROUPS, "labels": LABELS}),
    ({"by": "time", "gap": timedelta(days=1)}, {"times": DAYS}),
    ({"by": "time", "gap": 1.25}, {"times": np.arange(COUNT) / 3}),
    ({"by": "time", "gap": 3}, {}),
    ({"by": "window", "window": 3, "stride": 2, "horizon": 1, "gap": 1}, {}),
]


@pytest.mark.parametrize(("how", "columns"), EACH_KIND)
def test_a_recipe_draws_the_same_split_again(
    how: dict[str, Any], columns: dict[str, Any]
) -> None:
    made: Split = split(COUNT, **how, **columns)
    recipe = SplitRecipe.from_json(made.recipe.to_json())
    assert recipe == made.recipe
    assert rebuilt(recipe, COUNT, **columns).digest == made.digest


def test_other_data_than_was_split_is_told() -> None:
    made = split(COUNT, by="class", labels=LABELS)
    with pytest.raises(SplitError, match=r"data_count is 30, not 60.*give the same da"):
        rebuilt(made.recipe, 30, labels=LABELS[:30])
    with pytest.raises(SplitError, match="is not what was split: labels is"):
        rebuilt(made.recipe, COUNT, labels=LABELS[::-1])


@pytest.mark.parametrize("text", ["[]", '{"by": "sample", "pickle": "x"}', "{"])
def test_what_is_no_recipe_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"no recipe|Expecting"):
        SplitRecipe.from_json(text)
