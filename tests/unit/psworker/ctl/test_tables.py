import pytest

from psworker.ctl.tables import aligned, byte_text


def test_numbers_stand_to_the_right_and_text_to_the_left() -> None:
    table = aligned(("NAME", "COUNT"), [("a", 5), ("longer", 1234)])
    assert table.splitlines() == ["NAME    COUNT", "a           5", "longer   1234"]


def test_columns_may_be_named_to_stand_to_the_right() -> None:
    table = aligned(("NAME", "RATE"), [("a", "5.0"), ("b", "12.5")], right=["RATE"])
    assert table.splitlines() == ["NAME  RATE", "a      5.0", "b     12.5"]


def test_an_empty_table_is_its_header() -> None:
    assert aligned(("NAME", "COUNT"), []) == "NAME  COUNT"


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (64 << 20, "64.0 MiB"),
        (3 << 40, "3.0 TiB"),
    ],
)
def test_bytes_are_written_as_people_read_them(count: int, text: str) -> None:
    assert byte_text(count) == text
