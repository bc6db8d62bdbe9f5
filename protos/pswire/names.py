"""What may name something in a job: a tensor, a model, a loader, a worker, a split.

Names are data: any text of at most `NAME_BYTES_MAX` bytes in UTF-8. Python's texts may
also have lone surrogates, as it makes of bytes of the environment that are no UTF-8;
those can't be sent at all. The id of a worker is more than data: logs, tables and the
names of files have it as it is. It has no characters that steer whoever reads those.
What a script logs has a name that is a label of metrics, too: ASCII, and short.
"""

import re
import unicodedata
from typing import Final

from pswire.limits import METRIC_NAME_LENGTH_MAX, NAME_BYTES_MAX
from pswire.reasons import ErrorReason, Refusal

_METRIC: Final = re.compile(r"[A-Za-z0-9_./-]+")

_STEERING: Final = frozenset({"Cc", "Cf", "Zl", "Zp"})
"""Unicode's categories of control characters, of invisible ones that change how others
are shown, and of the ends of lines and paragraphs."""


def name_problem(name: str) -> str:
    """Why a text names nothing in a job, in words; empty where it may."""
    if not name:
        return "is empty"
    try:
        byte_count = len(name.encode())
    except UnicodeEncodeError as error:
        return (
            f"can't be written in UTF-8: its character {error.start + 1} is the lone "
            f"surrogate {name[error.start]!a}, as of bytes in another encoding"
        )
    if byte_count > NAME_BYTES_MAX:
        return f"has {byte_count} bytes in UTF-8, of at most {NAME_BYTES_MAX}"
    return ""


def worker_id_problem(worker_id: str) -> str:
    """Why a text is no worker's id, in words; empty where it may be one."""
    problem = name_problem(worker_id)
    if problem or worker_id.isprintable():
        return problem
    for position, character in enumerate(worker_id, 1):
        if unicodedata.category(character) in _STEERING:
            return (
                f"contains the control character {character!a} as character "
                f"{position}, which would garble logs and tables"
            )
    return ""


def metric_name_problem(name: str) -> str:
    """Why a text names nothing that a script logs, in words; empty where it may."""
    if not name:
        return "is empty"
    if len(name) > METRIC_NAME_LENGTH_MAX:
        return f"has {len(name)} characters, of at most {METRIC_NAME_LENGTH_MAX}"
    if not _METRIC.fullmatch(name):
        return "contains more than letters, digits and _ . / -"
    return ""


def printable(text: str) -> str:
    """A text with whatever could steer a terminal, or end its line, escaped."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def shown_url(url: str) -> str:
    """A URL or a path for people: without a password.

    One may have any character, also those that end it in a URL that is well formed.
    """
    return re.sub("://.*@", "://...@", printable(url))


def check_name(what: str, name: str) -> None:
    """Checks a name that a client sends.

    Args:
        what: What it names, such as `worker`.
        name: The name.

    Raises:
        Refusal: `MALFORMED_MESSAGE`, or `LIMIT_EXCEEDED` where it is too long.
    """
    _refuse(what, name, name_problem(name))


def check_worker_id(worker_id: str) -> None:
    """Checks the id that a client wants for its worker.

    Raises:
        Refusal: As `check_name`.
    """
    _refuse("worker", worker_id, worker_id_problem(worker_id))


def check_metric_name(name: str) -> None:
    """Checks the name of something that a worker's script has logged.

    Raises:
        Refusal: As `check_name`.
    """
    _refuse("metric", name, metric_name_problem(name))


def _refuse(what: str, name: str, problem: str) -> None:
    if problem:
        is_long = problem.startswith("has ")
        raise Refusal(
            ErrorReason.LIMIT_EXCEEDED if is_long else ErrorReason.MALFORMED_MESSAGE,
            f"the name {name[:64]!r} of {_article(what)} {what} {problem}",
            cure="give it a shorter name" if is_long else "give it another name",
        )


def _article(what: str) -> str:
    return "an" if what[0] in "aeiou" else "a"
