"""What a failed command says, and its exit code."""

import sys
import traceback
from typing import Final

from pswire.checkpoint.errors import CheckpointError, FormatError, StorageError
from pswire.exit_codes import ExitCode
from pswire.reasons import ErrorReason
from pswire.security.credentials import CredentialsError
from psworker.errors import (
    AuthenticationError,
    ConfigurationError,
    ConnectError,
    PermissionDeniedError,
    ProtocolError,
    PsError,
    ServerError,
    ShardLostError,
    SnapshotError,
    UnavailableError,
    VersionMismatchError,
    WaitTimeoutError,
)

_TEXT_LENGTH_MAX: Final = 2_000
"""About one screen. The whole text is there with --debug."""

_MAY_PASS: Final = (
    ErrorReason.NOT_STARTED,
    ErrorReason.RECOVERING,
    ErrorReason.DRAINING,
)
"""Reasons of a peer that answers and can't serve yet: commands that wait end by their
time, others at once, with one exit code."""

_EXIT_CODES: Final[tuple[tuple[type[Exception], ExitCode], ...]] = (
    # The first class that fits counts, so subclasses come first.
    (FormatError, ExitCode.INCOMPATIBLE_VERSION),
    (StorageError, ExitCode.TRY_AGAIN),
    (CheckpointError, ExitCode.ERROR),
    (VersionMismatchError, ExitCode.INCOMPATIBLE_VERSION),
    (ConfigurationError, ExitCode.BAD_CONFIGURATION),
    (PermissionDeniedError, ExitCode.BAD_CONFIGURATION),
    (AuthenticationError, ExitCode.BAD_CONFIGURATION),
    (CredentialsError, ExitCode.BAD_CONFIGURATION),
    (ConnectError, ExitCode.PEER_UNAVAILABLE),
    (UnavailableError, ExitCode.PEER_UNAVAILABLE),
    (ShardLostError, ExitCode.PEER_UNAVAILABLE),
    (WaitTimeoutError, ExitCode.TRY_AGAIN),
    (SnapshotError, ExitCode.TRY_AGAIN),
    (ProtocolError, ExitCode.INTERNAL),
    (ServerError, ExitCode.INTERNAL),
)


class CommandError(Exception):
    """A command that failed for a reason of its own; the text says what to do.

    Any function of psctl may raise it, and docstrings here name other errors alone. Nor
    do they name `PsError`, which the calls of psworker raise.
    """

    def __init__(self, text: str, exit_code: ExitCode = ExitCode.ERROR) -> None:
        super().__init__(text)
        self.exit_code = exit_code


def exit_code_of(error: BaseException) -> ExitCode:
    if isinstance(error, CommandError):
        return error.exit_code
    if isinstance(error, PsError) and error.reason in _MAY_PASS:
        return ExitCode.TRY_AGAIN
    for kind, code in _EXIT_CODES:
        if isinstance(error, kind):
            return code
    if isinstance(error, PsError | OSError):
        return ExitCode.ERROR
    return ExitCode.INTERNAL


def report(error: Exception, *, debug: bool) -> ExitCode:
    """Says on stderr what failed; the exit code."""
    code = exit_code_of(error)
    if debug:
        traceback.print_exception(error, file=sys.stderr)
    elif code == ExitCode.INTERNAL and not isinstance(error, PsError | CommandError):
        print(
            f"psctl: {type(error).__name__}: {_shortened(str(error))}\n"
            "This is a bug of paramserver. Run the command again with --debug for the "
            "traceback, and please report it.",
            file=sys.stderr,
        )
    else:
        print(f"psctl: {_shortened(str(error))}", file=sys.stderr)
    return code


def _shortened(text: str) -> str:
    if len(text) <= _TEXT_LENGTH_MAX:
        return text
    return f"{text[:_TEXT_LENGTH_MAX]} ... (the rest with --debug)"
