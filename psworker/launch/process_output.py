"""Copies the output of several processes to one place, with the process's name.

A progress bar goes back to the start of its row and writes it again, with no end of a
line for an hour. Where several processes share a place each row is a line of its own,
so a row that will be written over is shown now and then, and its last state always.
"""

import os
import re
import select
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from typing import IO, BinaryIO, Final, TextIO

READ_BYTES: Final = 1 << 16
TERMINAL_INTERVAL_S: Final = 1.0
"""Between two states of a progress bar on a terminal."""

FILE_INTERVAL_S: Final = 5.0
"""Likewise in a file, where each is one more line."""

_COLOURS: Final = (36, 33, 35, 32, 34, 31)
"""Of ANSI terminals: cyan, yellow, magenta, green, blue, red."""

LINE_BYTES_MAX: Final = 1 << 16
QUIET_S: Final = 0.5
"""A row that has not changed for so long is complete, though nothing has ended it."""

PARTIAL_S: Final = 5.0
"""A line that is no such row, and has not changed for so long, is shown."""

_END: Final = re.compile(rb"\r*\n|\r(?!\r*\n)")
_MOVE: Final = re.compile(rb"\x1b\[[0-9;?]*[A-HJKSTfhlsu]")
"""Of ANSI terminals: moves of the cursor, and what clears. Behind a tag they would
reach the rows of others. Colours are left."""

_UP: Final = re.compile(rb"\x1b\[[0-9]*[AF]")


def carry_output(
    process: subprocess.Popen[bytes], *, index: int
) -> list[threading.Thread]:
    """Starts a thread for each of the process's streams that is a pipe."""
    streams = ((process.stdout, sys.stdout), (process.stderr, sys.stderr))
    carriers = [
        threading.Thread(
            target=carry_lines,
            args=(source, sink.buffer, tag_of(index, is_coloured(sink, os.environ))),
            kwargs={
                "interval_s": (
                    TERMINAL_INTERVAL_S if sink.isatty() else FILE_INTERVAL_S
                )
            },
        )
        for source, sink in streams
        if source is not None
    ]
    for carrier in carriers:
        carrier.daemon = True
        carrier.start()
    return carriers


def is_coloured(sink: TextIO, environment: Mapping[str, str]) -> bool:
    """Whether a person looks at a terminal that shows colours, and wants them.

    Source: https://no-color.org
    """
    return (
        sink.isatty()
        and not environment.get("NO_COLOR")
        and environment.get("TERM") != "dumb"
    )


def tag_of(index: int, has_colour: bool) -> bytes:
    """The text in front of each line of process `index`."""
    tag = f"[p{index}]"
    if has_colour:
        tag = f"\x1b[{_COLOURS[index % len(_COLOURS)]}m{tag}\x1b[0m"
    return f"{tag} ".encode()


def carry_lines(
    source: IO[bytes], sink: BinaryIO, tag: bytes, *, interval_s: float
) -> None:
    """Copies lines, each behind `tag` and in one write, until the source ends.

    Of a progress bar it copies states that are at least `interval_s` apart.
    """
    lines = OutputLines(interval_s)
    ready = select.poll()
    ready.register(source.fileno())
    with source:
        while True:
            wait_s = lines.wait_s(time.monotonic())
            if ready.poll(None if wait_s is None else 1000 * wait_s):
                data = os.read(source.fileno(), READ_BYTES)
                shown = lines.feed(data, time.monotonic()) if data else lines.end()
            else:
                data, shown = None, lines.due(time.monotonic())
            text = b"".join(tag + line + b"\n" for line in shown)
            if text:
                try:
                    sink.write(text)
                    sink.flush()
                except (BrokenPipeError, ValueError):
                    # Nobody reads any more; the process notices when it is closed.
                    return
            if data == b"":
                return


class OutputLines:
    """What to show of one stream. Bytes that are no UTF-8 are passed on as they are."""

    def __init__(self, interval_s: float) -> None:
        """Takes the least time between two states of a row that is written over."""
        self._interval_s = interval_s
        self._rest = b""
        self._is_row = False
        self._came_at = 0.0
        self._row_at = -interval_s
        self._shown_row: bytes | None = None
        self._held_row: bytes | None = None

    def feed(self, data: bytes, now: float) -> Iterator[bytes]:
        """Takes bytes; the lines to show, without their ends."""
        self._rest += data
        self._came_at = now
        start = 0
        # A carriage return at the end may be half of a line's end.
        held_back = len(self._rest) - len(self._rest.rstrip(b"\r"))
        for end in _END.finditer(self._rest, 0, len(self._rest) - held_back):
            text = self._rest[start : end.start()]
            start = end.end()
            is_row = end.group() == b"\r" or bool(_UP.search(text))
            yield from self._row(text, now) if is_row else self._line(text)
            self._is_row = is_row
        self._rest = self._rest[start:]
        while len(self._rest) > LINE_BYTES_MAX:
            yield from self._line(self._cut(LINE_BYTES_MAX))

    def due(self, now: float) -> Iterator[bytes]:
        """What to show if there are no more bytes until now."""
        if self._due_s(now) > 0:
            return
        if self._has_row_rest:
            yield from self._row(_whole(self._rest), now)
        elif self._held_row is not None:
            yield from self._row(self._held_row, now)
        elif whole := _whole(self._rest):
            yield from self._line(self._cut(len(whole)))

    def wait_s(self, now: float) -> float | None:
        """How long to wait for bytes before `due`, `None` for ever."""
        due_s = self._due_s(now)
        return None if due_s == float("inf") else max(0.0, due_s)

    def end(self) -> Iterator[bytes]:
        """What is left at the end of the stream."""
        rest, self._rest = self._rest.rstrip(b"\r"), b""
        if _visible(rest):
            yield from self._line(rest)
        elif self._held_row is not None and not rest:
            yield from self._line(self._held_row)

    @property
    def _has_row_rest(self) -> bool:
        """Whether the row that is being written has something new to show."""
        if not (self._is_row or self._rest.endswith(b"\r")):
            return False
        row = _visible(_whole(self._rest))
        return bool(row) and row != self._shown_row

    def _due_s(self, now: float) -> float:
        """Seconds until `due` has something to show."""
        if self._has_row_rest:
            return max(self._came_at + QUIET_S, self._row_at + self._interval_s) - now
        if self._held_row is not None:
            return self._row_at + self._interval_s - now
        if not self._is_row and _visible(_whole(self._rest)):
            return self._came_at + PARTIAL_S - now
        return float("inf")

    def _row(self, text: bytes, now: float) -> Iterator[bytes]:
        row = _visible(text)
        if not row:
            if text:
                self._held_row = None  # it was cleared
            return
        self._held_row = None
        if row == self._shown_row:
            return
        if now - self._row_at < self._interval_s:
            self._held_row = row
            return
        self._shown_row, self._row_at = row, now
        yield row

    def _line(self, text: bytes) -> Iterator[bytes]:
        """A line that is not written over; a row that was held before it goes."""
        was_shown = _visible(text) == self._shown_row
        self._held_row = self._shown_row = None
        self._is_row = False
        if not was_shown:
            yield _MOVE.sub(b"", text)

    def _cut(self, count: int) -> bytes:
        """Takes at most so many bytes of what is left, with no character in two."""
        head = _whole(self._rest[:count]) or self._rest[:count]
        self._rest = self._rest[len(head) :]
        return head


def _visible(text: bytes) -> bytes:
    """What a person sees of a row; empty of one that was cleared."""
    return _MOVE.sub(b"", text.rstrip(b"\r")).rstrip()


def _whole(data: bytes) -> bytes:
    """`data` without a last character of which bytes are missing."""
    for back in range(1, min(4, len(data)) + 1):
        byte = data[-back]
        if byte & 0xC0 == 0x80:  # goes on with a character
            continue
        width = 4 if byte >= 0xF0 else 3 if byte >= 0xE0 else 2 if byte >= 0xC0 else 1
        return data[:-back] if back < width else data
    return data
