"""What is refused between a worker's split and the one that its job has recorded."""

from dataclasses import replace

import pytest

from pswire.leased_data import RecordedSplit
from psworker.data import split
from psworker.data.splitting import check_recorded, read_back, to_record
from psworker.errors import ConfigurationError, SplitError

COUNT = 20


def recorded(recorder: str = "w0") -> RecordedSplit:
    return replace(to_record("rows", split(COUNT)), recorder=recorder)


@pytest.mark.parametrize("name", ["", 3, None])
def test_what_is_no_name_is_refused(name: object) -> None:
    with pytest.raises(ConfigurationError) as caught:
        to_record(name, split(COUNT))  # type: ignore[arg-type]

    assert str(caught.value) == f"{name!r} is no name of a split; give a string"


def test_what_is_no_split_is_refused() -> None:
    with pytest.raises(ConfigurationError) as caught:
        to_record("rows", {"train": [0, 1]})

    assert str(caught.value) == (
        "a dict is no split: give what psworker.data.split() returns"
    )


def test_the_split_of_another_seed_is_refused_with_the_difference() -> None:
    with pytest.raises(SplitError) as caught:
        check_recorded(split(COUNT, seed=1), recorded())

    assert str(caught.value) == (
        "split 'rows' differs from the one that worker 'w0' has recorded: seed is 1, "
        "not 0; give every worker the same data, arguments and release of the library, "
        "or record this split under another name"
    )


def test_a_split_of_the_same_recipe_and_other_positions_is_refused() -> None:
    other = replace(recorded(recorder=""), digest="0" * 64)

    with pytest.raises(
        SplitError,
        match=r"^split 'rows' differs from the one that this script has recorded: "
        r"with the same recipe other positions were drawn; give every worker the same ",
    ):
        check_recorded(split(COUNT), other)


@pytest.mark.parametrize("recipe", ["", "[]", "{}", '{"by": 3}'])
def test_a_recipe_that_can_not_be_read_is_of_another_release(recipe: str) -> None:
    with pytest.raises(SplitError) as caught:
        read_back(replace(recorded(), recipe=recipe), COUNT)

    assert str(caught.value) == (
        "the recipe of split 'rows' is of another release; install the release that "
        "the job's workers have"
    )


def test_a_recipe_that_can_not_be_read_does_not_hide_that_splits_differ() -> None:
    with pytest.raises(SplitError, match="other positions were drawn"):
        check_recorded(split(COUNT, seed=1), replace(recorded(), recipe="{}"))


def test_a_recorded_split_is_drawn_again() -> None:
    assert read_back(recorded(), COUNT).digest == split(COUNT).digest
