"""Splits of data that the job's workers have agreed on: who is first decides.

Pure. Names and recipes are a client's data: kept and returned, never read.
"""

import re

from pswire.leased_data import RecordedSplit
from pswire.limits import SPLIT_COUNT_MAX, SPLIT_RECIPE_BYTES_MAX
from pswire.names import check_name
from pswire.reasons import ErrorReason, Refusal

_DIGEST = re.compile(r"[0-9a-f]{64}")


def check_split(split: RecordedSplit) -> None:
    """Checks a client's values.

    Raises:
        Refusal: `MALFORMED_MESSAGE` or `LIMIT_EXCEEDED`.
    """
    check_name("split", split.name)
    size = len(split.recipe.encode())
    if size > SPLIT_RECIPE_BYTES_MAX:
        raise Refusal(
            ErrorReason.LIMIT_EXCEEDED,
            f"the recipe of split {split.name[:64]!r} has {size} bytes, the limit "
            f"is {SPLIT_RECIPE_BYTES_MAX}",
        )
    if not _DIGEST.fullmatch(split.digest) or split.item_count < 0:
        raise Refusal(
            ErrorReason.MALFORMED_MESSAGE,
            f"split {split.name[:64]!r} has digest {split.digest[:70]!r} and "
            f"{split.item_count} items, which is no SHA-256 or no number",
        )


class SplitBook:
    """All splits of a job, by name."""

    def __init__(self, splits: tuple[RecordedSplit, ...] = ()) -> None:
        self._splits = {each.name: each for each in splits}

    def record(self, split: RecordedSplit) -> RecordedSplit:
        """Keeps the first split of a name; returns what is kept under it.

        Raises:
            Refusal: `MALFORMED_MESSAGE` or `LIMIT_EXCEEDED`; no state changed.
        """
        check_split(split)
        known = self._splits.get(split.name)
        if known is not None:
            return known
        if len(self._splits) >= SPLIT_COUNT_MAX:
            raise Refusal(
                ErrorReason.LIMIT_EXCEEDED,
                f"the job has {len(self._splits)} splits, the limit is "
                f"{SPLIT_COUNT_MAX}",
            )
        self._splits[split.name] = split
        return split

    def forget(self, name: str) -> None:
        """Takes back a split that could not be kept."""
        del self._splits[name]

    def named(self, name: str) -> RecordedSplit | None:
        return self._splits.get(name)

    def all(self) -> tuple[RecordedSplit, ...]:
        """All splits, in the order of recording."""
        return tuple(self._splits.values())
