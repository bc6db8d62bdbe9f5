"""A training process and the `psworker run` that has started it.

By variables the process knows its number, and its group if all push as one. It reports
whether it ever connected, by a file that the launcher names; that it can't go on, by
its exit code; and why it was refused, by a second file.
"""

import logging
import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from logging.handlers import RotatingFileHandler
from pathlib import Path
from types import TracebackType
from typing import Final
from urllib.parse import quote

from pswire.exit_codes import ExitCode
from pswire.logs import (
    LOG_DIR_VARIABLE,
    LOG_FORMAT_VARIABLE,
    LogFolderError,
    handlers_of,
    keep_library_logs,
    know,
)
from pswire.names import printable
from psworker.errors import (
    REFUSALS,
    ClosedError,
    ConfigurationError,
    ConnectError,
    JobFailedError,
    VersionMismatchError,
)

GROUP_VARIABLE: Final = "PS_HOST_GROUP"
"""Names the group whose processes push as one, on this machine; else not set."""

COUNT_VARIABLE: Final = "PS_LOCAL_SIZE"
INDEX_VARIABLE: Final = "PS_LOCAL_RANK"
RESTARTS_VARIABLE: Final = "PS_RESTART_COUNT"
PROCESS_COUNT_MAX: Final = 256
"""Processes of a group: each listens under its number, which others try."""

MARK_VARIABLE: Final = "PS_LAUNCH_MARK"
"""Names the file whose being there says that the process has connected."""

REFUSED_CODES: Final = (ExitCode.INCOMPATIBLE_VERSION, ExitCode.BAD_CONFIGURATION)
"""How a process ends that would be refused again if it were started again."""

_is_noted = False
_has_hook = False
_keeps_logs = False


@dataclass(frozen=True, slots=True)
class HostPlace:
    """One process of a group.

    Attributes:
        group: Names the group of this job on this machine.
        index: Number of the process, from 0.
        count: Processes of the group.
        is_restart: Whether this one was in it before, so that the others are there by
            now, or done.
    """

    group: str
    index: int
    count: int
    is_restart: bool = False


def find_host_place(environ: Mapping[str, str] | None = None) -> HostPlace | None:
    """This process's place in a host group; `None` if it is in none.

    Raises:
        ConfigurationError: The variables do not go together.
    """
    variables = os.environ if environ is None else environ
    group = variables.get(GROUP_VARIABLE, "")
    if not group:
        return None
    numbers = [variables.get(name, "") for name in (INDEX_VARIABLE, COUNT_VARIABLE)]
    if not all(number.isdecimal() and len(number) < 10 for number in numbers):
        raise ConfigurationError(
            f"{GROUP_VARIABLE}={printable(group)[:64]} needs {INDEX_VARIABLE}, the "
            "number of this "
            f"process from 0, and {COUNT_VARIABLE}, how many there are: set both, or "
            "start the processes with `psworker run --one-push-per-host`"
        )
    index, count = map(int, numbers)
    if not index < count <= PROCESS_COUNT_MAX:
        raise ConfigurationError(
            f"{INDEX_VARIABLE}={index} and {COUNT_VARIABLE}={count} do not go "
            f"together: numbers are 0 to {COUNT_VARIABLE} - 1, of at most "
            f"{PROCESS_COUNT_MAX} processes"
        )
    restarts = variables.get(RESTARTS_VARIABLE, "")
    return HostPlace(group, index, count, restarts not in ("", "0"))


def refusal_file(mark: Path) -> Path:
    """Where a process that is refused for good says why, beside its mark."""
    return mark.with_name(f"{mark.name}.refusal")


def note_started() -> None:
    """From now on an uncaught error ends the process as its launcher understands it.

    Raising `SystemExit` in the hook is how Python takes an exit code from it.
    """
    global _has_hook
    mark = os.environ.get(MARK_VARIABLE, "")
    if not mark or _has_hook:
        return
    _has_hook = True
    show = sys.excepthook

    def show_and_end(
        kind: type[BaseException],
        error: BaseException,
        traceback: TracebackType | None,
    ) -> None:
        show(kind, error, traceback)
        for handler in logging.getLogger("psworker").handlers:
            if isinstance(handler, RotatingFileHandler):  # stderr has it
                handler.handle(_record_of(error))
        code = _exit_code_of(error)
        if code in REFUSED_CODES:
            _write(refusal_file(Path(mark)), str(error))
        if code is not None:
            raise SystemExit(int(code))

    sys.excepthook = show_and_end


def keep_logs(environ: Mapping[str, str]) -> None:
    """Has this library's lines written with the job, the worker and the clock.

    To stderr as long as the script configures no logging, and to a file of this process
    if `psworker run` was told where.

    Args:
        environ: Has the variables of logs.

    Raises:
        ConfigurationError: The file can't be written.
    """
    global _keeps_logs
    if _keeps_logs:
        return
    _keeps_logs = True
    index = environ.get(INDEX_VARIABLE, "")
    # Beside what the script prints text is easier to read, wherever it goes.
    chosen = {LOG_FORMAT_VARIABLE: "text", **environ}
    if not index:  # a file of which nobody knows that it is this process's alone
        chosen.pop(LOG_DIR_VARIABLE, None)
    try:
        handlers = handlers_of(log_name("worker", index), chosen)
    except LogFolderError as error:
        raise ConfigurationError(str(error)) from None
    keep_library_logs(("psworker", "pswire"), handlers)
    know(role="worker")


def log_name(role: str, index: str = "") -> str:
    """What the log of a process on this machine is called: folders may be shared."""
    host = quote(socket.gethostname(), safe="")
    return "-".join(filter(None, (role, host, index)))


def note_connected() -> None:
    """Reports to the launcher, if there is one, that the script has connected."""
    global _is_noted
    mark = os.environ.get(MARK_VARIABLE, "")
    if mark and not _is_noted:
        _is_noted = True
        _write(Path(mark), "")


def _record_of(error: BaseException) -> logging.LogRecord:
    return logging.LogRecord(
        "psworker",
        logging.CRITICAL,
        __file__,
        0,
        "the script ended by an error: %s",
        (printable(repr(error)),),
        (type(error), error, error.__traceback__),
    )


def _exit_code_of(error: BaseException) -> ExitCode | None:
    """The exit code of what a new start can't mend, `None` for what it may."""
    if isinstance(error, JobFailedError):
        return ExitCode.PEER_UNAVAILABLE
    if isinstance(error, VersionMismatchError):
        return ExitCode.INCOMPATIBLE_VERSION
    if isinstance(error, ConnectError | ClosedError):
        return None  # a coordinator may be there next time
    return ExitCode.BAD_CONFIGURATION if isinstance(error, REFUSALS) else None


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        # The folder may be gone already: a process outlives its launcher.
        print(f"psworker: could not report to psworker run: {error}", file=sys.stderr)
