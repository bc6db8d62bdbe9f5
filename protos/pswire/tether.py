"""Runs a command that a signal ends when the process dies that started it.

`python tether.py PARENT_PID SIGNAL COMMAND...` asks the kernel for the signal at the
parent's death and becomes the command: the request outlives `exec`. It is of the thread
that starts it, which has to live as long. Imports nothing of ours, to start in no time.
"""

import ctypes
import os
import sys

_PR_SET_PDEATHSIG = 1


def tethered(number: int) -> list[str]:
    """What a command of this process begins with to be so, by this signal."""
    return [sys.executable, "-I", __file__, str(os.getpid()), str(int(number))]


def main() -> None:
    parent_pid, number, *command = sys.argv[1:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(number))
        if os.getppid() != int(parent_pid):
            sys.exit(128 + int(number))  # It died before the kernel knew.
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
