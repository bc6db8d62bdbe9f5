"""The table of the suite."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Row:
    """What came of one script.

    Attributes:
        name: Of the script.
        changed_line_count: Lines that make the plain script a distributed one.
        step_count: Lines that it printed, one for each batch of one process.
        difference: Largest relative difference of a loss from one process.
        reordered: The same for one process with each batch turned around, NaN where
            that was not measured.
        allowed: Largest difference allowed.
    """

    name: str
    changed_line_count: int
    step_count: int
    difference: float
    reordered: float
    allowed: float


def table(rows: list[Row]) -> list[str]:
    """The rows as lines of Markdown."""
    lines = [
        "| script | lines | steps | difference | reordered | allowed |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row.name} | {row.changed_line_count} | {row.step_count} "
        f"| {row.difference:.1e} | {_number(row.reordered)} | {row.allowed:.0e} |"
        for row in sorted(rows, key=lambda row: row.name)
    ]
    return lines


def _number(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.1e}"
