"""Plain text tables, the same on a terminal and in a pipe."""

import time
from collections.abc import Collection, Sequence
from typing import Final

from pswire.names import printable

WIDTH_MAX: Final = 80
"""Columns of the narrowest usual terminal."""


def count_text(count: int, one: str, many: str = "") -> str:
    """Such as `1 file` and `2 files`."""
    return f"{count} {one if count == 1 else many or one + 's'}"


def time_text(unix_s: float, form: str) -> str:
    """A time of this machine; that of a coordinator may be none, and has no text."""
    try:
        return time.strftime(form, time.localtime(unix_s))
    except (ValueError, OverflowError, OSError):
        return "at no time"


def aligned(
    header: Sequence[str],
    rows: Sequence[Sequence[object]],
    *,
    right: Collection[str] = (),
) -> str:
    """A table; columns of numbers, and those named in `right`, are aligned right."""
    cells = [[printable(str(cell)) for cell in row] for row in rows]
    columns = list(zip(header, *cells, strict=True))
    widths = [max(map(len, column)) for column in columns]
    is_number = [
        name in right
        or (bool(rows) and all(isinstance(row[index], int | float) for row in rows))
        for index, name in enumerate(header)
    ]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(line, widths, is_number, strict=True)
        ).rstrip()
        for line in ([*header], *cells)
    )


def fitted(
    header: Sequence[str],
    rows: Sequence[Sequence[object]],
    *,
    least_useful: Sequence[str],
    right: Collection[str] = (),
    width_max: int = WIDTH_MAX,
) -> str:
    """A table without its least useful columns, in this order, while it is too wide."""
    left = list(header)
    text = aligned(header, rows, right=right)
    for name in least_useful:
        if max(map(len, text.splitlines())) <= width_max:
            break
        left.remove(name)
        kept = [header.index(each) for each in left]
        shown = [[row[index] for index in kept] for row in rows]
        text = aligned(left, shown, right=right)
    return text
