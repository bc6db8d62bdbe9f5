"""What may name something in a job: a tensor, a model, a loader, a worker, a split.

Names are data: any text of at most `NAME_BYTES_MAX` bytes in UTF-8. Python's texts may
also have lone surrogates, as it makes of bytes of the environment that are no UTF-8;
those can't be sent at all.
"""

from pswire.limits import NAME_BYTES_MAX
from pswire.reasons import ErrorReason, Refusal


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


def check_name(what: str, name: str) -> None:
    """Checks a name that a client sends.

    Args:
        what: What it names, such as `worker`.
        name: The name.

    Raises:
        Refusal: `MALFORMED_MESSAGE`, or `LIMIT_EXCEEDED` where it is too long.
    """
    problem = name_problem(name)
    if problem:
        is_long = problem.startswith("has ")
        raise Refusal(
            ErrorReason.LIMIT_EXCEEDED if is_long else ErrorReason.MALFORMED_MESSAGE,
            f"the name {name[:64]!r} of {_article(what)} {what} {problem}",
            cure="give it a shorter name" if is_long else "give it another name",
        )


def _article(what: str) -> str:
    return "an" if what[0] in "aeiou" else "a"
