from psctl.tables import aligned


def test_numbers_stand_to_the_right_and_text_to_the_left() -> None:
    table = aligned(("NAME", "COUNT"), [("a", 5), ("longer", 1234)])
    assert table.splitlines() == ["NAME    COUNT", "a           5", "longer   1234"]


def test_columns_may_be_named_to_stand_to_the_right() -> None:
    table = aligned(("NAME", "RATE"), [("a", "5.0"), ("b", "12.5")], right=["RATE"])
    assert table.splitlines() == ["NAME  RATE", "a      5.0", "b     12.5"]


def test_an_empty_table_is_its_header() -> None:
    assert aligned(("NAME", "COUNT"), []) == "NAME  COUNT"
