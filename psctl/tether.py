"""Runs a command that dies with the process that started it.

`python tether.py PARENT_PID COMMAND...` asks the kernel for SIGKILL at the parent's
death and becomes the command: the request outlives `exec`. So no process of a demo
survives it, however it ends. Imports nothing of ours, to start in no time.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    parent_pid, *command = sys.argv[1:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != int(parent_pid):
            sys.exit(128 + signal.SIGKILL)  # It died before the kernel knew.
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
