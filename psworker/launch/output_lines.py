"""Lines of what a process writes bit by bit, among them rows that it writes over.

A progress bar goes back to the start of its row and writes it again, with no end of a
line for an hour. Where several processes share a place each row is a line of its own,
so a row that will be written over is shown now and then, and its last state always.
"""

import re
from collections.abc import Iterator
from typing import Final

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
