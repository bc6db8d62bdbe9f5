import pytest

from psserver.coordinator.core.data.split_book import SplitBook
from pswire.leased_data import RecordedSplit
from pswire.limits import SPLIT_COUNT_MAX, SPLIT_RECIPE_BYTES_MAX
from pswire.reasons import ErrorReason
from tests.refusals import refused


def split(
    name: str = "digits", digest: str = "0" * 64, **changes: object
) -> RecordedSplit:
    values: dict[str, object] = {"recipe": "{}", "item_count": 3, "recorder": "w0"}
    values.update(changes)
    return RecordedSplit(name=name, digest=digest, **values)  # type: ignore[arg-type]


def test_the_first_split_of_a_name_stays() -> None:
    book = SplitBook()
    first = split()
    assert book.record(first) is first
    assert book.record(split(digest="1" * 64)) is first
    assert book.named("digits") is first
    assert book.named("other") is None
    assert SplitBook(book.all()).named("digits") == first


@pytest.mark.parametrize(
    ("changes", "reason", "says"),
    [
        (
            {"name": ""},
            ErrorReason.MALFORMED_MESSAGE,
            "'' of a split is empty",
        ),
        ({"name": "é" * 513}, ErrorReason.LIMIT_EXCEEDED, "has 1026 bytes in UTF-8"),
        ({"digest": "0" * 63}, ErrorReason.MALFORMED_MESSAGE, "is no SHA-256"),
        ({"digest": "G" * 64}, ErrorReason.MALFORMED_MESSAGE, "is no SHA-256"),
        ({"item_count": -1}, ErrorReason.MALFORMED_MESSAGE, "-1 items"),
        (
            {"recipe": "x" * (SPLIT_RECIPE_BYTES_MAX + 1)},
            ErrorReason.LIMIT_EXCEEDED,
            "65537 bytes, the limit is 65536",
        ),
    ],
)
def test_what_is_no_split_is_refused(
    changes: dict[str, object], reason: ErrorReason, says: str
) -> None:
    book = SplitBook()
    with refused(reason, says):
        book.record(split(**changes))  # type: ignore[arg-type]
    assert book.all() == ()


def test_a_job_records_no_more_than_a_status_can_list() -> None:
    book = SplitBook()
    for number in range(SPLIT_COUNT_MAX):
        book.record(split(name=str(number)))
    with refused(ErrorReason.LIMIT_EXCEEDED, "256 splits, the limit is 256"):
        book.record(split(name="one more"))
    assert book.record(split(name="7")).name == "7"
