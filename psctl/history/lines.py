"""Histories as they are read back: files, the starts of processes in them, lines."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from psctl.history.findings import Findings
from pswire.history import HISTORY_FORMAT, SUFFIX


class Worker(NamedTuple):
    worker_id: str
    incarnation: int

    def __str__(self) -> str:
        return f"{self.worker_id}/{self.incarnation}"


class Push(NamedTuple):
    worker: Worker
    sequence: int

    def __str__(self) -> str:
        return f"push {self.sequence} of {self.worker}"


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a history, and where it is."""

    file: str
    number: int
    values: Mapping[str, Any]

    @property
    def kind(self) -> str:
        kind = self.values["type"]
        if not isinstance(kind, str):
            raise TypeError("`type` is no text")
        return kind

    @property
    def place(self) -> str:
        return f"{self.file}:{self.number}"

    def number_of(self, name: str, default: int | None = None) -> int:
        value = self.values.get(name, default)
        if not isinstance(value, int):
            raise TypeError(f"`{name}` is no whole number")
        return value

    def text_of(self, name: str) -> str:
        value = self.values[name]
        if not isinstance(value, str):
            raise TypeError(f"`{name}` is no text")
        return value

    def push(self) -> Push:
        return push_of(self.values["push"])

    def pushes(self, name: str) -> list[Push]:
        return [push_of(each) for each in self.values.get(name, ())]

    def worker(self) -> Worker:
        return Worker(*_typed(self.values["worker"], str, int))


def push_of(value: object) -> Push:
    """A push from `[id, incarnation, sequence]`."""
    worker_id, incarnation, sequence = _typed(value, str, int, int)
    return Push(Worker(worker_id, incarnation), sequence)


def _typed(value: object, *kinds: type) -> list[Any]:
    if not isinstance(value, list) or len(value) != len(kinds):
        raise TypeError(f"{value!r} is no list of {len(kinds)}")
    for each, kind in zip(value, kinds, strict=True):
        if not isinstance(each, kind):
            raise TypeError(f"{each!r} is no {kind.__name__}")
    return value


@dataclass(slots=True)
class Start:
    """What one start of one process wrote: the first line, and the others."""

    begin: Line
    lines: list[Line] = field(default_factory=list)

    @property
    def role(self) -> str:
        """`coordinator`, `shard` or `worker`."""
        return self.begin.text_of("role")


def files_of(paths: Iterable[Path]) -> list[Path]:
    """The files themselves, and the histories in the folders."""
    found: list[Path] = []
    for path in paths:
        found += sorted(path.glob(f"*{SUFFIX}")) if path.is_dir() else [path]
    return list(dict.fromkeys(found))


def read_starts(files: Iterable[Path], findings: Findings) -> list[Start]:
    """All starts of all processes, in the order of files and lines.

    A last line that was cut short by its process's end is passed over; anything else
    that can't be read is a finding.
    """
    starts: list[Start] = []
    for file in files:
        starts += _starts_of(file, findings)
    return starts


def _starts_of(file: Path, findings: Findings) -> list[Start]:
    starts: list[Start] = []
    torn: tuple[int, str] | None = None
    for number, text in enumerate(_texts(file), 1):
        try:
            values = json.loads(text)
        except (ValueError, RecursionError):
            values = None
        if not isinstance(values, dict) or "type" not in values:
            if torn is not None:
                findings.broken("files", f"{file.name}:{torn[0]}", torn[1])
            torn = (number, "this line is not one of a history")
            continue
        line = Line(file.name, number, values)
        is_begin = values["type"] == "begin"
        if torn is not None and not is_begin:
            findings.broken("files", f"{file.name}:{torn[0]}", torn[1])
        torn = None
        if is_begin:
            _check_format(line, findings)
            starts.append(Start(line))
        elif starts:
            starts[-1].lines.append(line)
        else:
            findings.broken("files", line.place, "the first line is missing")
            return []
    if not starts:
        findings.broken("files", file.name, "this is no history")
    return starts


def _texts(file: Path) -> Iterable[str]:
    with file.open(encoding="utf-8", errors="replace") as opened:
        yield from opened


def _check_format(begin: Line, findings: Findings) -> None:
    found = begin.values.get("format")
    findings.checked("files")
    if found != HISTORY_FORMAT:
        findings.broken(
            "files",
            begin.place,
            f"format {found} is not {HISTORY_FORMAT}, which this release reads",
        )
