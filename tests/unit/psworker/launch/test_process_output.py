"""Tags of lines, and their colours."""

import io
import os
import random
import tempfile
from typing import TextIO

import pytest

from psworker.launch.process_output import (
    LINE_BYTES_MAX,
    PARTIAL_S,
    QUIET_S,
    OutputLines,
    carry_lines,
    is_coloured,
    tag_of,
)


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
    """What comes of pieces between which no time passes."""
    source = tempfile.TemporaryFile()  # noqa: SIM115, closed by who carries
    source.writelines(pieces)
    source.seek(0)
    sink = io.BytesIO()
    carry_lines(source, sink, b"[p1] ", interval_s=60)
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


INTERVAL_S = 5.0


def shown(*pieces: bytes, pace_s: float = 0.0) -> list[bytes]:
    """All that is shown of pieces that come one after the other, until the end."""
    lines = OutputLines(INTERVAL_S)
    found: list[bytes] = []
    for index, piece in enumerate(pieces):
        found += lines.feed(piece, index * pace_s)
    return [*found, *lines.end()]


@pytest.mark.parametrize(
    ("pieces", "lines"),
    [
        pytest.param([b"a\nb\n"], [b"a", b"b"], id="lines"),
        pytest.param([b"a\n\nb\n"], [b"a", b"", b"b"], id="an empty line"),
        pytest.param([b"a", b"b\n"], [b"ab"], id="a line in parts"),
        pytest.param([b"a\nb"], [b"a", b"b"], id="a line without an end"),
        pytest.param([b"a\r\nb\r\n"], [b"a", b"b"], id="ends of Windows"),
        pytest.param([b"a\r", b"\nb\r", b"\n"], [b"a", b"b"], id="an end in two"),
        pytest.param([b"\r1%", b"\r2%", b"\r3%\n"], [b"1%", b"3%"], id="a bar"),
        pytest.param([b"1%\r", b"2%\r", b"3%\r"], [b"1%", b"3%"], id="ends behind"),
        pytest.param([b"\r1%\r2%\r   \r", b"b\n"], [b"1%", b"b"], id="a bar cleared"),
        pytest.param([b"\r1%\r2%\r\x1b[K"], [b"1%"], id="cleared by a code"),
        pytest.param([b"\r1%\r\r1%\n"], [b"1%"], id="nothing new"),
        pytest.param([b"\r1%\r2%\nb\n"], [b"1%", b"2%", b"b"], id="a line after it"),
        pytest.param(
            [b"\rout", b"\n\r1%\x1b[A", b"\n\r2%\x1b[A", b"\n\n"],
            [b"out", b"1%", b""],
            id="a bar in a bar",
        ),
        pytest.param([b"\x1b[?25l\x1b[31mred\x1b[0m\x1b[K\n"], [b"\x1b[31mred\x1b[0m"]),
        pytest.param([b"caf\xe9\n\xff\xfe"], [b"caf\xe9", b"\xff\xfe"], id="no UTF-8"),
        pytest.param([b""], [], id="nothing"),
    ],
)
def test_lines_are_whole_and_rows_are_shown_now_and_then(
    pieces: list[bytes], lines: list[bytes]
) -> None:
    assert shown(*pieces) == lines


def test_a_bar_is_shown_at_its_interval() -> None:
    found = shown(*(b"\r%d" % index for index in range(100)), pace_s=0.2)
    assert found == [b"0", b"25", b"50", b"75", b"99"]


def test_a_row_is_shown_when_it_is_still() -> None:
    lines = OutputLines(INTERVAL_S)
    assert lines.wait_s(0.0) is None
    assert not list(lines.feed(b"\r10%", 0.0))
    assert lines.wait_s(0.0) == QUIET_S
    assert not list(lines.due(QUIET_S / 2))
    assert list(lines.due(QUIET_S)) == [b"10%"]
    assert lines.wait_s(QUIET_S) is None
    assert not list(lines.feed(b"\r20%", 1.0))
    assert list(lines.due(QUIET_S + INTERVAL_S)) == [b"20%"]
    assert not list(lines.feed(b"\n", 7.0)), "it was shown already"
    assert list(lines.feed(b"20%\n", 7.0)) == [b"20%"]


def test_a_row_that_was_held_is_shown_after_the_interval() -> None:
    lines = OutputLines(INTERVAL_S)
    assert list(lines.feed(b"1%\r2%\r", 0.0)) == [b"1%"]
    assert list(lines.due(INTERVAL_S - 0.1)) == []
    assert list(lines.due(INTERVAL_S)) == [b"2%"]
    assert not list(lines.end())


def test_dots_are_shown_when_none_came_for_long() -> None:
    lines = OutputLines(INTERVAL_S)
    assert not list(lines.feed("loading ..é".encode()[:-1], 0.0))
    assert lines.wait_s(1.0) == PARTIAL_S - 1
    assert list(lines.due(PARTIAL_S)) == [b"loading .."]
    assert lines.wait_s(PARTIAL_S) is None
    assert list(lines.feed("é".encode()[1:] + b"\n", 9.0)) == ["é".encode()]


def test_a_very_long_line_is_cut_between_characters() -> None:
    text = "█" * 50_000 + "é" * 30_001 + "x"
    found = shown(text.encode())
    assert len(found) > 1
    assert "".join(line.decode() for line in found) == text
    assert max(map(len, found)) <= LINE_BYTES_MAX
    assert shown(b"\x80" * 100_000) == [
        b"\x80" * LINE_BYTES_MAX,
        b"\x80" * (100_000 - LINE_BYTES_MAX),
    ]


@pytest.mark.parametrize("seed", range(20))
def test_pieces_may_end_anywhere(seed: int) -> None:
    rng = random.Random(seed)
    texts = ["█é", "", "x" * 9, "\U0001f680"]
    data = "".join(rng.choice(texts) + rng.choice(["\n", "\r\n"]) for _ in range(200))
    whole, pieces = data.encode(), []
    while whole:
        count = rng.randint(1, 7)
        pieces.append(whole[:count])
        whole = whole[count:]
    assert b"\n".join(shown(*pieces)).decode() == "\n".join(data.splitlines())


def test_waits_come_to_an_end_when_nothing_more_comes() -> None:
    rng = random.Random(1)
    parts = [b"\r", b"\n", b"ab", b" ", b"\xe2", b"\x96\x88", b"\x1b[A", b"\x1b[K"]
    for _ in range(300):
        lines, now = OutputLines(INTERVAL_S), 0.0
        for _ in range(12):
            list(lines.feed(rng.choice(parts), now))
            for _ in range(3):
                if (wait_s := lines.wait_s(now)) is None:
                    break
                now += wait_s + 1e-6
                list(lines.due(now))
            assert lines.wait_s(now) is None, "it would ask again and again"
            now += rng.choice([0.0, 0.1, 9.0])
