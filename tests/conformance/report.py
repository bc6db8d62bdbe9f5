"""The table of the suite."""

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Row:
    """What came of one script.

    Attributes:
        name: Of the script.
        title: What it trains.
        changed_line_count: Lines that make the plain script a distributed one.
        step_count: Lines that it printed, one for each batch of one process.
        difference: Largest relative difference of a loss from one process.
        reordered: The same for one process with each batch turned around, NaN where
            that was not measured.
        allowed: Largest difference that is not a failure.
    """

    name: str
    title: str
    changed_line_count: int
    step_count: int
    difference: float
    reordered: float
    allowed: float


def table(rows: Sequence[Row]) -> list[str]:
    """The rows as lines of Markdown, in the order of names."""
    lines = [
        "| script | what | lines | steps | difference | reordered | allowed |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row.name} | {row.title} | {row.changed_line_count} "
        f"| {row.step_count} | {row.difference:.1e} | {_number(row.reordered)} "
        f"| {row.allowed:.0e} |"
        for row in sorted(rows, key=lambda row: row.name)
    ]
    return lines


def _number(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.1e}"
