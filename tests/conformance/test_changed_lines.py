import pytest

from tests.conformance.changed_lines import changed_line_count


@pytest.mark.parametrize(
    ("after", "count"),
    [
        ("a\nb\nc", 0),
        ("a\nx\nb\nc", 1),
        ("a\nX\nc", 1),
        ("a\nc", 1),
        ("a\nX\nY\nc", 2),
        ("x\na\nB\nc\ny", 3),
    ],
)
def test_lines_added_removed_and_changed_count(after: str, count: int) -> None:
    assert changed_line_count("a\nb\nc", after) == count
