"""What a training process tells the `psworker run` that has started it.

Whether it ever connected, by a file that the launcher names; and that the job can't
go on, by its exit code. A process that nobody launched does neither.
"""

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Final

from pswire.exit_codes import ExitCode
from psworker.errors import JobFailedError

MARK_VARIABLE: Final = "PS_LAUNCH_MARK"
"""Names the file whose being there says that the process has connected."""

_is_noted = False


def note_connected(environ: Mapping[str, str] | None = None) -> None:
    """Tells the launcher, if there is one, that the script calls `connect()`."""
    global _is_noted
    mark = (os.environ if environ is None else environ).get(MARK_VARIABLE, "")
    if not mark or _is_noted:
        return
    _is_noted = True
    try:
        Path(mark).touch()
    except OSError as error:
        # It may be gone already: a process outlives its launcher.
        print(f"psworker: could not tell psworker run: {error}", file=sys.stderr)
    _end_with_code_of_loss()


def _end_with_code_of_loss() -> None:
    """Lets an uncaught failure of the job end the process as daemons end.

    Raising `SystemExit` in the hook is how Python takes an exit code from it.
    """
    show = sys.excepthook

    def show_and_end(
        kind: type[BaseException],
        error: BaseException,
        traceback: TracebackType | None,
    ) -> None:
        show(kind, error, traceback)
        if isinstance(error, JobFailedError):
            raise SystemExit(int(ExitCode.PEER_UNAVAILABLE))

    sys.excepthook = show_and_end
