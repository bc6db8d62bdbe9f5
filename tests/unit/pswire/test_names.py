"""What may name something in a job, and what is said of what may not."""

import os

import pytest

from pswire.limits import NAME_BYTES_MAX
from pswire.names import (
    check_name,
    check_worker_id,
    name_problem,
    printable,
    worker_id_problem,
)
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


@pytest.mark.parametrize("worker_id", ["w0", "box-1.a b", "重み", "ü" * 512, "🙂"])
def test_an_id_of_a_worker_is_any_text_that_can_be_shown(worker_id: str) -> None:
    assert worker_id_problem(worker_id) == ""
    check_worker_id(worker_id)


@pytest.mark.parametrize("name", ["重み", "box 1", ""])
def test_what_can_be_shown_is_shown_as_it_is(name: str) -> None:
    assert printable(name) == name


@pytest.mark.parametrize(
    "character",
    ["\n", "\r", "\0", "\t", "\x1b", "\x7f", "\x85", "\u2028", "\u2029", "\u202e"],
)
def test_a_character_that_steers_is_in_no_id_of_a_worker(character: str) -> None:
    with pytest.raises(Refusal) as caught:
        check_worker_id(f"w{character}0")

    assert caught.value.reason is ErrorReason.MALFORMED_MESSAGE
    assert f"contains the control character {character!a} as character 2" in (
        caught.value.message
    )
    assert caught.value.message.isprintable()
    assert name_problem(f"w{character}0") == "", "a tensor may be named so"
    assert printable(f"w{character}0") == f"w{ascii(character)[1:-1]}0"


@pytest.mark.parametrize("worker_id", ["", "a\ud800b", "w" * 1025])
def test_what_names_nothing_is_no_id_of_a_worker(worker_id: str) -> None:
    assert worker_id_problem(worker_id) == name_problem(worker_id) != ""
