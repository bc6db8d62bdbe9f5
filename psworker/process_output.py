"""Lines of several processes in one place, each with the name of its process."""

import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from typing import IO, BinaryIO, Final, TextIO

LINE_BYTES_MAX: Final = 1 << 16
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
    """What stands in front of the lines of process `index`."""
    tag = f"[p{index}]"
    if has_colour:
        tag = f"\x1b[{_COLOURS[index % len(_COLOURS)]}m{tag}\x1b[0m"
    return f"{tag} ".encode()


def carry_lines(source: IO[bytes], sink: BinaryIO, tag: bytes) -> None:
    """Copies lines, each behind `tag` and in one write. Splits a very long one."""
    with source:
        while line := source.readline(LINE_BYTES_MAX):
            ended = line if line.endswith(b"\n") else line + b"\n"
            try:
                sink.write(tag + ended)
                sink.flush()
            except (BrokenPipeError, ValueError):
                # Nobody reads any more. Closing our end tells the process so.
                return
