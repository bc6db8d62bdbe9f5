"""Copies the lines of several processes to one place, with the process's name."""

import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from typing import IO, BinaryIO, Final, TextIO

from psworker.launch.output_lines import OutputLines

READ_BYTES: Final = 1 << 16
TERMINAL_INTERVAL_S: Final = 1.0
"""Between two states of a progress bar on a terminal."""

FILE_INTERVAL_S: Final = 5.0
"""Likewise in a file, where each is one more line."""

_COLOURS: Final = (36, 33, 35, 32, 34, 31)
"""Of ANSI terminals: cyan, yellow, magenta, green, blue, red."""


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
