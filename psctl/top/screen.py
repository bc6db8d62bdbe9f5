"""The terminal of `psctl top`: what differs from before is written, and nothing else.

A whole screen for each look would be some kilobytes, and flicker over a slow line.
"""

import os
import sys
import termios
import tty
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import StringIO
from typing import Final, TextIO

from rich.console import Console
from rich.text import Text

from psctl.top.view import Line, Style

_ENTER: Final = "\x1b[?1049h\x1b[?25l\x1b[?7l"
"""The other screen, without a cursor, and without a new row behind the last column."""

_LEAVE: Final = "\x1b[?7h\x1b[?25h\x1b[?1049l"

_STYLES: Final[Mapping[Style, str]] = {
    Style.PLAIN: "",
    Style.DIM: "dim",
    Style.TITLE: "bold",
    Style.CHOSEN: "bold reverse",
    Style.GOOD: "bold green",
    Style.NOTICE: "bold yellow",
    Style.BAD: "bold red",
}

_KEYS: Final = {
    b"\x1b[A": "up",
    b"\x1b[B": "down",
    b"\x1b[C": "right",
    b"\x1b[D": "left",
    b"\x1bOA": "up",
    b"\x1bOB": "down",
    b"\x1bOC": "right",
    b"\x1bOD": "left",
}


class Painter:
    """Turns lines into what a terminal has to be sent."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        """Colours are as the terminal has them; none with `NO_COLOR`."""
        self._environment = environment
        self._shown: list[str] = []
        self._size = (0, 0)

    def update(self, lines: Sequence[Line], width: int, height: int) -> str:
        """What makes of the screen as it is one with these lines."""
        parts = []
        if self._size != (width, height):
            self._size, self._shown = (width, height), []
            parts.append("\x1b[0m\x1b[2J")
        painted = [self._painted(line, width) for line in lines]
        for row, text in enumerate(painted):
            if row >= len(self._shown) or self._shown[row] != text:
                parts.append(f"\x1b[{row + 1};1H\x1b[2K{text}")
        self._shown = painted
        return "".join(parts)

    def _painted(self, line: Line, width: int) -> str:
        if not line.text:
            return ""
        console = Console(
            file=StringIO(),
            force_terminal=True,
            width=width,
            highlight=False,
            legacy_windows=False,
            _environ=dict(self._environment),
        )
        text = Text(line.text, style=_STYLES[line.style], no_wrap=True, overflow="crop")
        if line.style is Style.CHOSEN:
            text.pad_right(max(0, width - text.cell_len))
        with console.capture() as captured:
            console.print(text, end="", crop=True)
        return captured.get()


@contextmanager
def whole_screen(terminal: TextIO, keyboard: int) -> Iterator[None]:
    """Takes the screen and the keys, and gives both back as they were."""
    before = termios.tcgetattr(keyboard)
    try:
        tty.setcbreak(keyboard)
        terminal.write(_ENTER)
        terminal.flush()
        yield
    finally:
        terminal.write(_LEAVE)
        terminal.flush()
        termios.tcsetattr(keyboard, termios.TCSADRAIN, before)


def keys_in(data: bytes) -> list[str]:
    """Names of the keys behind some bytes of a terminal."""
    found = []
    while data:
        known = next((code for code in _KEYS if data.startswith(code)), None)
        if known is not None:
            found.append(_KEYS[known])
            data = data[len(known) :]
        else:
            found.append(chr(data[0]))
            data = data[1:]
    return found


def can_show_whole_screen() -> bool:
    """Whether there is a terminal that can, and a person at it."""
    return (
        sys.stdout.isatty()
        and sys.stdin.isatty()
        and os.environ.get("TERM", "dumb") != "dumb"
    )


def speaks_unicode(stream: TextIO) -> bool:
    return (stream.encoding or "").lower().replace("-", "") == "utf8"
