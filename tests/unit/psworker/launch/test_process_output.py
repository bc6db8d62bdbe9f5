"""Tags of lines, and their colours."""

import io
import os
import threading
from typing import TextIO

import pytest

from psworker.launch.process_output import carry_lines, is_coloured, tag_of


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("sink", "environment", "coloured"),
    [
        (Terminal(), {}, True),
        (Terminal(), {"NO_COLOR": ""}, True),
        (Terminal(), {"NO_COLOR": "1"}, False),
        (Terminal(), {"TERM": "dumb"}, False),
        (io.StringIO(), {}, False),
    ],
)
def test_colours_are_for_people_who_want_them(
    sink: TextIO, environment: dict[str, str], coloured: bool
) -> None:
    assert is_coloured(sink, environment) is coloured


def test_neighbours_have_colours_that_differ() -> None:
    assert tag_of(3, has_colour=False) == b"[p3] "
    assert tag_of(0, has_colour=True) == b"\x1b[36m[p0]\x1b[0m "
    assert len({tag_of(index, has_colour=True)[:5] for index in range(6)}) == 6


def _carried(*pieces: bytes) -> bytes:
    """What comes of pieces that a process writes before it ends."""
    reader, writer = os.pipe()
    sink = io.BytesIO()
    source = open(reader, "rb")  # noqa: SIM115, closed by who carries
    carrier = threading.Thread(
        target=carry_lines, args=(source, sink, b"[p1] "), kwargs={"interval_s": 60}
    )
    carrier.start()
    with open(writer, "wb", buffering=0) as stream:
        for piece in pieces:
            stream.write(piece)
    carrier.join()
    assert source.closed
    return sink.getvalue()


def test_a_line_is_whole_behind_its_tag() -> None:
    assert _carried(b"a\nb") == b"[p1] a\n[p1] b\n"


def test_a_bar_is_shown_without_an_end_of_line() -> None:
    ticks = [f"\r{i:5d} {'█' * (i % 20)}|".encode() for i in range(4000)]
    lines = _carried(*ticks).decode().splitlines()
    assert lines == ["[p1]     0 |", f"[p1]  3999 {'█' * 19}|"]


def test_who_reads_no_more_is_told_so() -> None:
    reader, writer = os.pipe()
    broken = io.BytesIO()
    broken.close()
    source = open(reader, "rb")  # noqa: SIM115, closed by who carries
    with open(writer, "wb", buffering=0) as stream:
        stream.write(b"a\n")
        carry_lines(source, broken, b"", interval_s=1)
        with pytest.raises(BrokenPipeError):
            stream.write(b"b\n")
