"""Shows the demo's progress on stderr: a live table, or a line now and then."""

import os
import sys
import time
from abc import abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Final, Self

from psctl.demo.progress import Progress

LINE_INTERVAL_S: Final = 2.0
_REFRESHES_PER_S: Final = 4


class Display(AbstractContextManager["Display"]):
    @abstractmethod
    def note(self, text: str) -> None:
        """Says what happens now."""

    @abstractmethod
    def show(self, progress: Progress) -> None:
        """Shows the newest figures, if it's time to."""


def display_for_stderr(environment: Mapping[str, str] = os.environ) -> Display:
    """A live table for a terminal that can, plain lines for anything else."""
    is_plain = environment.get("NO_COLOR") or environment.get("TERM") == "dumb"
    return LineDisplay() if is_plain or not sys.stderr.isatty() else LiveDisplay()


class LineDisplay(Display):
    """A plain line every two seconds, while there is something new."""

    def __init__(self) -> None:
        self._next_s = 0.0
        self._shown = ""

    def note(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def show(self, progress: Progress) -> None:
        now_s = time.monotonic()
        text = "  ".join(f"{name} {value}" for name, value in progress.columns())
        if now_s >= self._next_s and text != self._shown:
            self._next_s = now_s + LINE_INTERVAL_S
            self._shown = text
            self.note(text)

    def __exit__(self, *unused: object) -> None:
        return


class LiveDisplay(Display):
    """A table that is redrawn in place; notes are above it."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live

        self._console = Console(stderr=True, markup=False, highlight=False)
        self._live = Live(
            console=self._console, refresh_per_second=_REFRESHES_PER_S, transient=False
        )

    def note(self, text: str) -> None:
        self._console.print(text)

    def show(self, progress: Progress) -> None:
        from rich.table import Table
        from rich.text import Text

        columns = progress.columns()
        table = Table()
        for name, _ in columns:
            table.add_column(Text(name), justify="right")
        table.add_row(*[Text(value) for _, value in columns])
        self._live.update(table)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *unused: object) -> None:
        self._live.stop()
