"""How lines of a log look, and where they go: one way for daemons and workers.

For people as text on a terminal, for programs as one JSON object a line. Each line has
the role of its process and, once they are known, the job, the process's id in it and
the clock. With a folder each process keeps a file in it too, of bounded size, which
`psctl logs` reads.
"""

import logging
import logging.handlers
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from logging import Handler
from pathlib import Path
from typing import TYPE_CHECKING, Final, TextIO

from pswire.names import printable

if TYPE_CHECKING:
    import structlog

LOG_FORMAT_VARIABLE: Final = "PS_LOG_FORMAT"
LOG_DIR_VARIABLE: Final = "PS_LOG_DIR"
FORMATS: Final = ("text", "json")

FILE_BYTES_MAX: Final = 8 << 20
FILE_COUNT: Final = 4
"""Files of one process, the one that it writes included: 32 MiB together."""

SUFFIX: Final = ".jsonl"

Field = str | int | None


class LogFolderError(ValueError):
    """Logs can't be kept where they are wanted; the text says why."""


@dataclass(slots=True)
class _Known:
    read: Callable[[], Field]
    thread_id: int
    last: Field


_known: Final[dict[str, _Known]] = {}


def know(**fields: Field | Callable[[], Field]) -> None:
    """From now on each line of this process has these fields.

    A function is asked when a line is written, in the thread that has given it; lines
    of other threads have what it returned last. None is no field.
    """
    for name, given in fields.items():
        read = given if callable(given) else lambda value=given: value
        _known[name] = _Known(read, threading.get_ident(), read())


def configure_logs(*, role: str, verbose: bool = False, name: str = "") -> None:
    """Sends all logs of this process where the variables of logs say.

    To stderr, as text on a terminal and as JSON elsewhere unless `PS_LOG_FORMAT` says
    which; and to a file if `PS_LOG_DIR` names a folder.

    Args:
        role: Of the process.
        verbose: Whether details are logged.
        name: What the file is called, without its ending.

    Raises:
        LogFolderError: The file can't be written.
    """
    know(role=role)
    root = logging.getLogger()
    root.handlers = handlers_of(name)
    root.setLevel(logging.DEBUG if verbose else logging.INFO)


def handlers_of(name: str, environ: Mapping[str, str] = os.environ) -> list[Handler]:
    """What writes lines where the variables of logs say.

    Args:
        name: What the file is called, without its ending.
        environ: Has the variables.

    Raises:
        LogFolderError: The file can't be written.
    """
    format = environ.get(LOG_FORMAT_VARIABLE)
    is_text = format == "text" if format in FORMATS else sys.stderr.isatty()
    to_stderr = _StderrHandler()
    to_stderr.setFormatter(formatter(is_text=is_text))
    folder = environ.get(LOG_DIR_VARIABLE)
    return [to_stderr, file_handler(Path(folder), name)] if folder else [to_stderr]


class _StderrHandler(logging.StreamHandler[TextIO]):
    """Writes to what `sys.stderr` is when a line comes: a notebook replaces it."""

    def __init__(self) -> None:
        Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr


def file_handler(folder: Path, name: str) -> Handler:
    """Writes JSON lines to a file that is begun anew when it is full.

    Raises:
        LogFolderError: It can't be written.
    """
    path = folder / f"{name}{SUFFIX}"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        handler = logging.handlers.RotatingFileHandler(
            path, maxBytes=FILE_BYTES_MAX, backupCount=FILE_COUNT - 1, encoding="utf-8"
        )
    except OSError as error:
        raise LogFolderError(
            f"can't write the log {path}: {error.strerror}; choose another --log-dir, "
            "or let the user that runs this process write there"
        ) from error
    handler.setFormatter(formatter(is_text=False))
    return handler


def formatter(*, is_text: bool) -> logging.Formatter:
    """Makes a line of a record: text for people, or JSON."""
    import structlog  # takes a while, and not every process has something to say

    processors = structlog.processors
    renderer: structlog.typing.Processor = (
        structlog.dev.ConsoleRenderer(
            colors=sys.stderr.isatty() and "NO_COLOR" not in os.environ,
            exception_formatter=_write_traceback,
        )
        if is_text
        else processors.JSONRenderer()
    )
    return structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=[
            structlog.stdlib.add_log_level,
            processors.TimeStamper(fmt="iso", utc=True),
            structlog.stdlib.PositionalArgumentsFormatter(),
            _add_known,
        ],
        processors=[
            structlog.stdlib.ProcessorFormatter.remove_processors_meta,
            _escape_event if is_text else processors.format_exc_info,
            renderer,
        ],
    )


def _write_traceback(stream: TextIO, error: "structlog.typing.ExcInfo") -> None:
    """As `_escape_event`: the text of an error may have names in it, too."""
    lines = "".join(traceback.format_exception(*error)).rstrip("\n").split("\n")
    stream.write("\n" + "\n".join(printable(line) for line in lines))


def _add_known(
    logger: object, method: str, event: "structlog.typing.EventDict"
) -> "structlog.typing.EventDict":
    for name, known in _known.items():
        if known.thread_id == threading.get_ident():
            known.last = known.read()
        if known.last is not None:
            event[name] = known.last
    return event


def _escape_event(
    logger: object, method: str, event: "structlog.typing.EventDict"
) -> "structlog.typing.EventDict":
    """Names in a line are data of whoever calls: on a terminal they begin no line."""
    event["event"] = printable(str(event["event"]))
    return event


def keep_library_logs(names: Iterable[str], handlers: Iterable[Handler]) -> None:
    """Gives the loggers of a library handlers of its own.

    To stderr only for as long as whoever uses the library has configured no logging.
    """
    for handler in handlers:
        if isinstance(handler, _StderrHandler):
            handler.addFilter(lambda record: not logging.getLogger().handlers)
        for name in names:
            logging.getLogger(name).addHandler(handler)
