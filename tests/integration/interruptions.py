"""Interrupts a script at any line of psworker, as a signal's handler does.

Signals of a real timer come where they come. Here they are drawn: the handler is
called, in the thread that runs the script, before a given line. Lines that begin with
`with` or `try` are left out, since no signal is looked for there: tracing sees a `with`
once more on the way out, with its lock still held, and `try` is no instruction at all.
"""

import linecache
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, Self

import psworker

_FOLDER = str(Path(psworker.__file__).parent)


class Interrupted(Exception):
    """What a handler raises."""


def raise_interrupted() -> None:
    raise Interrupted


Line = tuple[str, int]
"""A file and the number of a line."""


class AtLine:
    """Calls a handler the first time that a line is about to run. A context manager.

    Attributes:
        lines: Those of psworker that were run, in the order of their first time.
        is_reached: Whether the handler was called.
    """

    def __init__(
        self, line: Line | None = None, handler: Callable[[], None] = raise_interrupted
    ) -> None:
        """Looks at nothing yet.

        Args:
            line: Where to call it; None calls it nowhere.
            handler: What runs there.
        """
        self._line = line
        self._handler = handler
        self.lines: dict[Line, None] = {}
        self.is_reached = False

    def __enter__(self) -> Self:
        sys.settrace(self._enter)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _enter(self, frame: FrameType, event: str, value: Any) -> Any:  # noqa: ANN401, as sys wants it
        return self._see if frame.f_code.co_filename.startswith(_FOLDER) else None

    def _see(self, frame: FrameType, event: str, value: Any) -> Any:  # noqa: ANN401, as sys wants it
        if event != "line":
            return self._see
        line = frame.f_code.co_filename, frame.f_lineno
        if linecache.getline(*line).strip().startswith(("with ", "try:")):
            return self._see
        self.lines[line] = None
        if line == self._line:
            self.is_reached = True
            sys.settrace(None)
            self._handler()
        return self._see


def text_of(line: Line) -> str:
    """The line, for people."""
    return f"{line[0].removeprefix(_FOLDER)}:{line[1]}: {linecache.getline(*line)}"
