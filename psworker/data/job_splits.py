"""Splits and the job: the first worker records one, all others must have the same."""

from pswire.recorded_split import RecordedSplit
from psworker.data.split_value import Split, SplitRecipe
from psworker.data.splitting import rebuilt
from psworker.errors import ConfigurationError, SplitError, refuse_name


def to_record(name: str, split: object) -> RecordedSplit:
    """What the coordinator is told of a split.

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
