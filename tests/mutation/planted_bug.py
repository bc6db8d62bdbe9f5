"""A bug that is put into a copy of the sources, to see that the tests notice."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Edit:
    """One place that is changed; `old` occurs in `file` exactly once."""

    file: str
    old: str
    new: str


@dataclass(frozen=True, slots=True)
class PlantedBug:
    """One bug.

    Attributes:
        name: What it is, in a few words.
        edits: What makes it.
        tests: Files of tests, or single ones as pytest names them, of which one must
            fail. Without any, the drawn schedules and the unit tests of both cores.
    """

    name: str
    edits: tuple[Edit, ...]
    tests: tuple[str, ...] = ()

    def plant(self, root: Path) -> None:
        """Changes a copy of the sources.

        Raises:
            LookupError: The sources have changed, and the bug with them has to.
        """
        for edit in self.edits:
            path = root / edit.file
            text = path.read_text()
            if text.count(edit.old) != 1:
                raise LookupError(
                    f"{edit.file} holds the text that {self.name!r} changes "
                    f"{text.count(edit.old)} times, not once: bring the bug up to date"
                )
            path.write_text(text.replace(edit.old, edit.new))


def bug(name: str, *edits: Edit, tests: str | tuple[str, ...] = ()) -> PlantedBug:
    """A bug by its edits; where one test is named, it needs no tuple."""
    return PlantedBug(name, edits, (tests,) if isinstance(tests, str) else tests)
