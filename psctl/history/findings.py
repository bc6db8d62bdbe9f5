"""What a check of histories has found: how much was checked, and what is broken."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Final

PROMISES: Final = {
    "files": "histories are whole and belong together",
    "G1": "a push is applied exactly once",
    "G3": "a push is on all shards or on none",
    "G4": "pushes are in order, nothing goes back",
    "G6": "no staleness beyond the bound",
    "G40": "a quorum and its window close clocks, and late pushes count later",
}
"""What is checked, in the order of the report."""


@dataclass(frozen=True, slots=True)
class Break:
    """A promise that was not kept; the place is the file and line that show it."""

    promise: str
    place: str
    text: str


@dataclass(slots=True)
class Findings:
    """What a check has found so far: counts of checks, breaks, and numbers by name."""

    checks: Counter[str] = field(default_factory=Counter)
    breaks: list[Break] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    def checked(self, promise: str) -> None:
        assert promise in PROMISES
        self.checks[promise] += 1

    def broken(self, promise: str, place: str, text: str) -> None:
        assert promise in PROMISES
        self.breaks.append(Break(promise, place, text))

    def require(self, promise: str, kept: bool, place: str, text: str) -> None:
        self.checked(promise)
        if not kept:
            self.broken(promise, place, text)

    def breaks_of(self, promise: str) -> list[Break]:
        return [each for each in self.breaks if each.promise == promise]
