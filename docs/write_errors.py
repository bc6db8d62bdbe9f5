"""Writes the reasons of `errors.md` beside this file, from the code.

    python docs/write_errors.py

What happened is said by the comments of `error.proto`, what follows by the catalogue of
`pswire.reasons`, and what is raised by psworker. A test holds the page against them.
"""

import re
from pathlib import Path
from typing import Final

from psctl.failures import exit_code_of
from pswire.exit_codes import ExitCode
from pswire.reasons import CATALOGUE, ErrorReason
from psworker.errors import ERROR_CLASSES

PAGE: Final = Path(__file__).with_name("errors.md")
PROTO: Final = PAGE.parents[1] / "protos" / "pswire" / "v1" / "error.proto"
TABLE: Final = re.compile(r"(?<=<!-- reasons -->\n).*?(?=<!-- end -->)", re.DOTALL)
_ENTRY: Final = re.compile(
    r"((?:^  // .*\n)+)  ERROR_REASON_(\w+) = \d+;", re.MULTILINE
)


def happened() -> dict[str, str]:
    """What each reason means, by its name, from the comments of the proto."""
    text = PROTO.read_text().partition("enum ErrorReason {")[2].partition("\n}")[0]
    return {
        name: " ".join(line.strip().removeprefix("// ") for line in comment.split("\n"))
        for comment, name in _ENTRY.findall(text)
    }


def section(reason: ErrorReason, meaning: str) -> str:
    """The part of the page about one reason."""
    case, raised = CATALOGUE[reason], ERROR_CLASSES[reason]
    code = exit_code_of(raised("", reason=reason))
    cure = case.cure[0].upper() + case.cure[1:]
    retry = (
        "may succeed later, unchanged"
        if case.retryable
        else "fails again until something is changed"
    )
    return (
        f"### {reason.name}\n\n{meaning.strip()}\n\n"
        f"- **What to do:** {cure}.\n"
        f"- **In a script:** `psworker.{raised.__name__}`. `psctl` ends with {code}"
        f" ({ExitCode(code).name}).\n"
        f"- **On the wire:** `{case.status}`, {reason.value}. The same call {retry}.\n"
    )


def tables() -> str:
    """All of them, in the order of names."""
    meanings = happened()
    reasons = sorted(CATALOGUE, key=lambda reason: reason.name)
    return "\n".join(section(each, meanings[each.name]) for each in reasons)


def main() -> None:
    """Writes the page anew."""
    page = PAGE.read_text()
    PAGE.write_text(TABLE.sub(lambda _: "\n" + tables() + "\n", page))


if __name__ == "__main__":
    main()
