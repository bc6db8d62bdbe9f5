import pytest

from pswire.byte_text import byte_text, parsed_bytes


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


@pytest.mark.parametrize(
    ("text", "count"),
    [("1b", 1), ("5GB", 5 * 10**9), ("512 MiB", 512 << 20), (" 2kb", 2000)],
)
def test_sizes_are_read_as_people_write_them(text: str, count: int) -> None:
    assert parsed_bytes(text) == count


@pytest.mark.parametrize("text", ["", "5", "0GB", "-1GB", "1.5GB", "5 apples", "GB"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no size, such as 5GB or 512MiB"):
        parsed_bytes(text)
