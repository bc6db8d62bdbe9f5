"""Exit codes of every command. A supervisor may decide by them what to do next.

The numbers above 2 are those of BSD's sysexits. A process that ended by signal
`n` is reported as `128 + n`, as shells do.
"""

from enum import IntEnum


class ExitCode(IntEnum):
    """How a command ended."""

    DONE = 0
    """It did what it was asked, or was asked to stop and stopped."""

    ERROR = 1
    """It failed; the text on stderr says why."""

    USAGE = 2
    """The command line is wrong, or its options contradict each other."""

    PEER_UNAVAILABLE = 69
    """Another process of the job can't be reached, or is lost."""

    INTERNAL = 70
    """A bug of paramserver."""

    TRY_AGAIN = 75
    """It failed for a reason that may pass. Starting it again may help."""

    INCOMPATIBLE_VERSION = 76
    """A peer speaks another version of the protocol."""

    BAD_CONFIGURATION = 78
    """The machine or the job does not allow it. Starting it again will not help."""


def exit_code_of_return_code(return_code: int) -> int:
    """The exit code for a child's `returncode`, which is `-n` after signal `n`."""
    return return_code if return_code >= 0 else 128 - return_code
