"""The job in the last row of a terminal, below what the processes of a host print.

The terminal scrolls the rows above alone (DECSTBM of the VT100), so that lines and
progress bars of scripts, which write to it themselves, stay as they are.
"""

import asyncio
import os
import shutil
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any, Final, Self, TextIO

from pswire.names import printable
from psworker.pace import EpochProgress, Pace

INTERVAL_S: Final = 2.0
ANSWER_TIMEOUT_S: Final = 1.0
"""The end of the processes waits for an answer at most so long."""

ROW_COUNT_MIN: Final = 8
"""A terminal with fewer rows has none to spare."""

QUIET_CAUSES: Final = (None, "training", "finished")
"""Of what a job is doing, all that nobody has to do anything about."""

_SAVE, _RESTORE = "\x1b7", "\x1b8"

Document = Mapping[str, Any]


def has_row(stream: TextIO, environment: Mapping[str, str] = os.environ) -> bool:
    """Whether a stream is a terminal that can keep a row apart."""
    return (
        stream.isatty()
        and environment.get("TERM", "dumb") != "dumb"
        and shutil.get_terminal_size().lines >= ROW_COUNT_MIN
    )


def row_text(document: Document, epoch: EpochProgress | None, width: int) -> str:
    """A job in one line: what is wrong, if anything is, else how far it is."""
    parts = [f"job {document['phase']}"]
    if epoch is not None:
        parts.append(f"epoch {epoch.epoch} {100 * epoch.part:.0f} % {epoch.left_text}")
    clocks = [w["clock"] for w in document["workers"] if w["clock"] is not None]
    if clocks:
        parts.append(f"clock {min(clocks):,}")
    loss = document["metrics"].get("loss")
    if loss is not None:
        parts.append(f"loss {loss:.4g}")
    diagnosis = document["diagnosis"]
    if diagnosis["cause"] not in QUIET_CAUSES and diagnosis["sentence"]:
        parts.append(diagnosis["sentence"])
    return printable("  ".join(part.rstrip() for part in parts))[:width]


class StatusRow:
    """Keeps the last row of a terminal for the job. A context manager."""

    def __init__(
        self,
        ask: Callable[[], Document | str],
        *,
        stream: TextIO = sys.stderr,
        interval_s: float = INTERVAL_S,
        size: Callable[[], os.terminal_size] = shutil.get_terminal_size,
    ) -> None:
        """Takes no row yet.

        Args:
            ask: Returns the job's status, or why there is none.
            stream: The terminal.
            interval_s: Between two questions.
            size: Columns and rows of the terminal.
        """
        self._ask = ask
        self._stream = stream
        self._interval_s = interval_s
        self._size = size
        self._taken = os.terminal_size((0, 0))
        self._pace = Pace()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="status", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        if self._taken.lines:
            last = f"\x1b[{self._taken.lines};1H\x1b[2K"
            self._write(f"{_SAVE}\x1b[r{last}{_RESTORE}")

    def _run(self) -> None:
        while not self._over.is_set():
            found = self._ask()
            if not self._over.is_set():
                self._show(found)
            self._over.wait(self._interval_s)

    def _show(self, found: Document | str) -> None:
        size, before = self._size(), ""
        width = size.columns - 1
        if isinstance(found, str):
            text = found[:width]
        else:
            text = row_text(found, self._pace.take(dict(found)), width)
        if size != self._taken:
            # A new line first: the cursor may be in the row that is taken.
            region = f"{_SAVE}\x1b[1;{size.lines - 1}r{_RESTORE}"
            before = f"\n{region}\x1b[1A"
            self._taken = size
        self._write(f"{before}{_SAVE}\x1b[{size.lines};1H\x1b[2K{text}{_RESTORE}")

    def _write(self, text: str) -> None:
        """In one piece, so that nothing of others comes between."""
        self._stream.write(text)
        self._stream.flush()


def asking(coordinator: str) -> Callable[[], Document | str]:
    """What asks a coordinator for its status, from any thread without an event loop."""
    from psworker.transport.calls import CallError
    from psworker.transport.status_client import fetch_document

    def ask() -> Document | str:
        try:
            fetched = fetch_document(coordinator, timeout_s=ANSWER_TIMEOUT_S)
            return asyncio.run(fetched)
        except CallError:
            return f"job: no answer from the coordinator at {coordinator}"

    return ask
