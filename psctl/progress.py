"""How far long work is, on stderr: a bar for people at a terminal, else plain lines."""

import os
import sys
import time
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final, Protocol

from psctl.options import say
from psworker.pace import duration_text

LONG_S: Final = 2.0
"""Of work that took longer, a line in a pipe says when it was over."""


class Work(Protocol):
    """Work that is under way. Any thread may call."""

    @abstractmethod
    def advance(self, byte_count: int) -> None:
        """So many bytes more are done."""

    @abstractmethod
    def update(self, byte_count: int, total: int) -> None:
        """So many bytes are done, of so many."""


class _Plain(Work):
    def advance(self, byte_count: int) -> None:
        return

    def update(self, byte_count: int, total: int) -> None:
        return


def is_animated(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether stderr is a terminal on which a line can be written again."""
    return sys.stderr.isatty() and environment.get("TERM", "dumb") != "dumb"


@contextmanager
def working(text: str, total: int | None = None) -> Iterator[Work]:
    """Shows work while it is under way, and then nothing of it on a terminal.

    Args:
        text: What is done, such as `reading step-000000000500`.
        total: Its bytes, None where they are not known, or not yet.
    """
    if not is_animated():
        say(text)
        began_s = time.monotonic()
        yield _Plain()
        took_s = time.monotonic() - began_s
        if took_s >= LONG_S:
            say(f"{text}: done in {duration_text(took_s)}")
        return
    with _bar(text, total) as work:
        yield work


@contextmanager
def _bar(text: str, total: int | None) -> Iterator[Work]:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    console = Console(stderr=True, highlight=False)
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=20),
        TimeElapsedColumn(),
    )
    of_bytes = (
        *columns[:2],
        DownloadColumn(binary_units=True),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as shown:
        task = shown.add_task(text, total=total)
        if total is not None:
            shown.columns = of_bytes

        class Bar(Work):
            def advance(self, byte_count: int) -> None:
                shown.advance(task, byte_count)

            def update(self, byte_count: int, total: int) -> None:
                shown.columns = of_bytes
                shown.update(task, completed=byte_count, total=total)

        yield Bar()
