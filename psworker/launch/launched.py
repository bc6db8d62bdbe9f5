"""What a training process tells the `psworker run` that has started it.

Whether it ever connected, by a file that the launcher names; that it can't go on, by
its exit code; and why it was refused, by a second file. A process that nobody launched
does none of this.
"""

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Final

from pswire.exit_codes import ExitCode
from psworker.errors import (
    REFUSALS,
    ClosedError,
    ConnectError,
    JobFailedError,
    VersionMismatchError,
)

MARK_VARIABLE: Final = "PS_LAUNCH_MARK"
"""Names the file whose being there says that the process has connected."""

REFUSED_CODES: Final = (ExitCode.INCOMPATIBLE_VERSION, ExitCode.BAD_CONFIGURATION)
"""How a process ends that would be refused again if it were started again."""

_is_noted = False
_has_hook = False


def refusal_file(mark: Path) -> Path:
    """Where a process that is refused for good says why, beside its mark."""
    return mark.with_name(f"{mark.name}.refusal")


def note_started(environ: Mapping[str, str] | None = None) -> None:
    """From now on an uncaught error ends the process as its launcher understands it.

    Raising `SystemExit` in the hook is how Python takes an exit code from it.
    """
    global _has_hook
    mark = _mark(environ)
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
        code = _exit_code_of(error)
        if code in REFUSED_CODES:
            _write(refusal_file(Path(mark)), str(error))
        if code is not None:
            raise SystemExit(int(code))

    sys.excepthook = show_and_end


def note_connected(environ: Mapping[str, str] | None = None) -> None:
    """Tells the launcher, if there is one, that the script has called `connect()`."""
    global _is_noted
    mark = _mark(environ)
    if mark and not _is_noted:
        _is_noted = True
        _write(Path(mark), "")


def _exit_code_of(error: BaseException) -> ExitCode | None:
    """The exit code of what a new start can't mend, `None` for what it may."""
    if isinstance(error, JobFailedError):
        return ExitCode.PEER_UNAVAILABLE
    if isinstance(error, VersionMismatchError):
        return ExitCode.INCOMPATIBLE_VERSION
    if isinstance(error, ConnectError | ClosedError):
        return None  # a coordinator may be there next time
    return ExitCode.BAD_CONFIGURATION if isinstance(error, REFUSALS) else None


def _mark(environ: Mapping[str, str] | None) -> str:
    return (os.environ if environ is None else environ).get(MARK_VARIABLE, "")


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        # The folder may be gone already: a process outlives its launcher.
        print(f"psworker: could not report to psworker run: {error}", file=sys.stderr)
