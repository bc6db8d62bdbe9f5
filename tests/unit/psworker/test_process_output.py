"""Tags of lines, and their colours."""

import io
from typing import TextIO

import pytest

from psworker.process_output import carry_lines, is_coloured, tag_of


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


def test_a_line_is_whole_behind_its_tag() -> None:
    sink = io.BytesIO()
    carry_lines(io.BytesIO(b"a\nb"), sink, b"[p1] ")
    assert sink.getvalue() == b"[p1] a\n[p1] b\n"
