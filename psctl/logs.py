"""Gathers the logs of a job's processes: one stream, in the order of time.

Each process keeps a file of JSON lines, and older ones beside it; see `pswire.logs`.
"""

import heapq
import json
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import takewhile
from pathlib import Path
from typing import BinaryIO, Final

from psctl.failures import CommandError
from pswire.logs import FILE_COUNT, SUFFIX
from pswire.names import printable

POLL_S: Final = 0.3
"""Between two looks for new lines."""

_UNITS: Final = {"s": "seconds", "min": "minutes", "h": "hours", "d": "days"}
_FIELDS: Final = ("timestamp", "level", "event", "role", "id", "job", "clock")


@dataclass(frozen=True, slots=True, order=True)
class LogLine:
    """A line, which goes before those of a later time.

    Attributes:
        time: As the line has it; ISO 8601 in UTC, so that texts compare as times do.
        place: Of a line among others of the same time.
        text: As the file has it.
    """

    time: str
    place: tuple[str, int]
    text: str

    def shown(self) -> str:
        """For people: time, who, level, what, clock, and a traceback below."""
        fields = _parsed(self.text) or {"event": self.text}
        who = fields.get("role", "")
        who = f"{who} {fields['id']}" if "id" in fields else who
        head = f"{self.time[:23]:23}  {who!s:14}  {fields.get('level', '')!s:8}"
        clock = f"  (clock {fields['clock']})" if "clock" in fields else ""
        more = "".join(
            f"  {name}={value}"
            for name, value in fields.items()
            if name not in (*_FIELDS, "exception")
        )
        text = printable(f"{head}  {fields.get('event', '')}{clock}{more}")
        below = str(fields.get("exception", "")).splitlines()
        return "\n".join([text, *(f"    {printable(each)}" for each in below)])


def parsed_since(text: str, now: datetime) -> str:
    """The time that `10min` ago or an ISO time stand for, as lines have it.

    Raises:
        ValueError: It is neither.
    """
    found = re.fullmatch(r"(\d{1,6})(s|min|h|d)", text)
    try:
        if found is not None:
            when = now - timedelta(**{_UNITS[found[2]]: int(found[1])})
        else:
            when = datetime.fromisoformat(text)
        # Without a zone it is the machine's own time, as people write it.
        return when.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    except (ValueError, OverflowError):  # or before the year 1
        raise ValueError(
            f"{text[:40]!r} is no time: give how long ago, as in 30s, 10min, 2h or "
            "1d, or a time such as 2026-01-31T12:00"
        ) from None


class LogFolder:
    """The logs of one folder.

    Args:
        folder: Where they are.
        since: Time of the first line that counts, as lines have it; empty for any.
        role: Of the processes whose lines count; None for all.

    Raises:
        CommandError: There are none.
    """

    def __init__(
        self, folder: Path, *, since: str = "", role: str | None = None
    ) -> None:
        self._folder = folder
        self._since = since
        self._role = role
        self._read: dict[Path, tuple[int, int]] = {}
        if not self._paths():
            raise CommandError(
                f"there are no logs in {folder}: name the folder of --log-dir, or the "
                "--state-dir of a `psserver local`"
            )

    def lines(self) -> Iterator[LogLine]:
        """Those that were written since the last call, at first all, by time.

        What is read at a time does not grow with the files.
        """
        streams = [self._lines_of(path) for path in self._paths()]
        return filter(self._is_wanted, heapq.merge(*streams))

    def follow(self, pause: Callable[[float], None] = time.sleep) -> Iterator[LogLine]:
        """All lines, and each new one, for ever."""
        while True:
            yield from self.lines()
            pause(POLL_S)

    def _is_wanted(self, line: LogLine) -> bool:
        has_role = self._role in (None, _parsed(line.text).get("role"))
        return has_role and line.time >= self._since

    def _paths(self) -> list[Path]:
        # Nothing else: to open a pipe waits for who writes into it.
        return sorted(p for p in self._folder.glob(f"*{SUFFIX}") if p.is_file())

    def _lines_of(self, path: Path) -> Iterator[LogLine]:
        """New lines of a process, from the oldest of its files on."""
        with ExitStack() as stack:
            files: dict[int, BinaryIO] = {}  # by inode: one may be renamed meanwhile
            for number in range(FILE_COUNT - 1, -1, -1):
                older = path.with_name(f"{path.name}.{number}")
                with suppress(FileNotFoundError):
                    file = stack.enter_context((older if number else path).open("rb"))
                    files[os.fstat(file.fileno()).st_ino] = file
            inode, offset = self._read.get(path, (0, 0))
            if inode in files:
                while next(iter(files)) != inode:
                    del files[next(iter(files))]
                files[inode].seek(offset)
            at, count = "", 0
            for inode, kept in files.items():
                # A line without an end is still being written.
                offset = kept.tell()
                for raw in takewhile(lambda raw: raw.endswith(b"\n"), kept):
                    offset += len(raw)
                    text = raw.decode(errors="replace").rstrip("\n")
                    at, count = str(_parsed(text).get("timestamp") or at), count + 1
                    yield LogLine(at, (path.name, count), text)
                self._read[path] = inode, offset


def _parsed(text: str) -> dict[str, object]:
    """The object that a line is; empty for any other line."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
