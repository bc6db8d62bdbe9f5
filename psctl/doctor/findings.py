"""What a check has found, for people and for programs."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from pswire.exit_codes import ExitCode
from pswire.names import printable

SCHEMA_VERSION: Final = 1


class Level(StrEnum):
    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check has seen.

    Attributes:
        level: How bad it is.
        seen: What was seen, in a sentence.
        cure: What to do next; empty where nothing is to be done.
        figures: What was measured, by name, for programs.
    """

    level: Level
    seen: str
    cure: str = ""
    figures: Mapping[str, object] = field(default_factory=dict)


def ok(seen: str, **figures: object) -> Finding:
    return Finding(Level.OK, seen, "", figures)


def warning(seen: str, cure: str, **figures: object) -> Finding:
    return Finding(Level.WARNING, seen, cure, figures)


def problem(seen: str, cure: str, **figures: object) -> Finding:
    return Finding(Level.PROBLEM, seen, cure, figures)


def unknown(seen: str, cure: str = "", **figures: object) -> Finding:
    return Finding(Level.UNKNOWN, seen, cure, figures)


Findings = Sequence[tuple[str, Finding]]
"""Each with the name of the check that has found it."""


def exit_code(findings: Findings) -> ExitCode:
    """1 with a problem, else 0: a warning stops nobody."""
    is_bad = any(each.level is Level.PROBLEM for _, each in findings)
    return ExitCode.ERROR if is_bad else ExitCode.DONE


def findings_json(coordinator: str | None, findings: Findings) -> dict[str, object]:
    """As `docs/psctl.md` describes it."""
    counts = Counter(each.level for _, each in findings)
    return {
        "schema_version": SCHEMA_VERSION,
        "coordinator": coordinator,
        "counts": {level.value: counts[level] for level in Level},
        "findings": [
            {
                "check": name,
                "level": each.level.value,
                "seen": each.seen,
                "cure": each.cure or None,
                "figures": dict(each.figures),
            }
            for name, each in findings
        ],
    }


def finding_text(name: str, finding: Finding) -> str:
    """A line, and one more with what to do."""
    text = f"{finding.level:<8} {name:<14} {printable(finding.seen)}"
    return f"{text}\n{'':>23} -> {printable(finding.cure)}" if finding.cure else text


def summary_text(findings: Findings) -> str:
    counts = Counter(each.level for _, each in findings)
    nouns = (Level.WARNING, Level.PROBLEM)
    return ", ".join(
        f"{counts[level]} {level}{'s' * (level in nouns and counts[level] > 1)}"
        for level in Level
        if counts[level]
    )
