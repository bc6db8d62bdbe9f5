import pytest

from pswire.byte_text import byte_text


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
