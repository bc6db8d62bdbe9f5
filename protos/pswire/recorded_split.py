"""A split as the job has it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedSplit:
    """A split under its name.

    Attributes:
        name: Its name in the job.
        recipe: How to draw it again, as JSON; empty in a list of all.
        digest: SHA-256 of its positions, in hexadecimal.
        item_count: Positions that there are.
        recorder: Id of the worker that recorded it; empty before it is recorded.
    """

    name: str
    digest: str
    item_count: int
    recipe: str = ""
    recorder: str = ""
