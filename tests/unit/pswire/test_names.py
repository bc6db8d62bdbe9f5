"""What may name something in a job, and what is said of what may not."""

import os

import pytest

from pswire.limits import NAME_BYTES_MAX
from pswire.names import check_name, name_problem
from pswire.reasons import ErrorReason, Refusal


@pytest.mark.parametrize("name", ["w", "ü" * (NAME_BYTES_MAX // 2), "a\nb", "重み"])
def test_any_text_names_something(name: str) -> None:
    assert name_problem(name) == ""
    check_name("tensor", name)


@pytest.mark.parametrize(
    ("name", "reason", "says", "cure"),
    [
        ("", ErrorReason.MALFORMED_MESSAGE, "is empty", "give it another name"),
        (
            "a\ud800b",
            ErrorReason.MALFORMED_MESSAGE,
            r"can't be written in UTF-8: its character 2 is the lone surrogate "
            r"'\ud800', as of bytes in another encoding",
            "give it another name",
        ),
        (
            os.fsdecode(b"w\xff"),
            ErrorReason.MALFORMED_MESSAGE,
            r"its character 2 is the lone surrogate '\udcff'",
            "give it another name",
        ),
        (
            "ü" * 513,
            ErrorReason.LIMIT_EXCEEDED,
            "has 1026 bytes in UTF-8, of at most 1024",
            "give it a shorter name",
        ),
    ],
)
def test_other_names_are_refused_with_the_cure_of_their_cause(
    name: str, reason: ErrorReason, says: str, cure: str
) -> None:
    with pytest.raises(Refusal) as caught:
        check_name("loader", name)

    assert says in caught.value.message
    assert "of a loader" in caught.value.message
    assert caught.value.reason is reason
    assert caught.value.cure == cure
