"""Forks what a forked process starts: its `python` commands, as `subprocess` has them.

A process that has threads can't fork safely. So a process that will start others forks
a spare before it has any, and the spare, which stays as it is, forks them. Each child
of the spare is made an orphan, which the process adopts, as its subreaper: so it is the
parent, waits for it and signals it as for any process that it starts.
"""

import ctypes
import inspect
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final, NoReturn

PR_SET_PDEATHSIG: Final = 1
PR_SET_CHILD_SUBREAPER: Final = 36
ORDER_BYTES_MAX: Final = 1 << 17
READ_AT_START: Final = ("PYTHON", "OMP_", "MKL_", "ONEDNN_", "ATEN_", "LD_")
"""Beginnings of the variables that Python and torch have read before the fork."""
UNLIKE_A_FORK: Final = (
    *("executable", "shell", "preexec_fn", "pass_fds"),
    *("uid", "gid", "gids"),
)
"""Options of `Popen` that the spare does not know."""
SIGNATURE: Final = inspect.signature(subprocess.Popen._execute_child)  # type: ignore[attr-defined]

Run = Callable[[list[str]], NoReturn]
Order = dict[str, Any]


class Becomes(BaseException):
    """The process goes on as another command of `python`."""

    def __init__(self, command: Sequence[str]) -> None:
        super().__init__()
        self.command = list(command)


class Spare:
    """A process's connection to its spare."""

    def __init__(self, run: Run) -> None:
        """Forks it. What `subprocess` starts from now on comes from it, where it can.

        Args:
            run: What a child does with its command: `python` without `python`.
        """
        self._lock = threading.Lock()
        self._at_start = dict(os.environ)
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
        if os.fork() == 0:
            self._socket.close()
            serve(theirs, run)
        theirs.close()
        become = os.execv

        def execv(path: Any, arguments: Any) -> NoReturn:  # noqa: ANN401
            if path == sys.executable:
                raise Becomes(arguments[1:])
            become(path, arguments)

        os.execv = execv
        subprocess.Popen = popen_of(self)  # type: ignore[assignment,misc]

    def can_start(self, options: dict[str, Any]) -> bool:
        """Whether a fork is what a start with these options of `Popen` would be."""
        args, environment = options["args"], options["env"]
        return (
            not isinstance(args, str | bytes | os.PathLike)
            and args[0] == sys.executable
            and not any(options[name] for name in UNLIKE_A_FORK)
            and self._read_at_start(self._at_start)
            == self._read_at_start(os.environ if environment is None else environment)
        )

    def start(self, options: dict[str, Any]) -> int:
        """Starts a process; its id."""
        streams = [options[name] for name in ("p2cread", "c2pwrite", "errwrite")]
        environment = options["env"]
        order = {
            "command": [os.fspath(word) for word in options["args"][1:]],
            "environment": dict(os.environ if environment is None else environment),
            "folder": os.fspath(options["cwd"] or os.getcwd()),
            "has_session": options["start_new_session"],
            "group": options["process_group"],
            "streams": [number for number, given in enumerate(streams) if given != -1],
        }
        with self._lock:
            socket.send_fds(
                self._socket,
                [json.dumps(order).encode()],
                [given for given in streams if given != -1],
            )
            return int(self._socket.recv(ORDER_BYTES_MAX))

    def _read_at_start(self, environment: Any) -> dict[str, str]:  # noqa: ANN401
        return {k: v for k, v in environment.items() if k.startswith(READ_AT_START)}


def popen_of(spare: Spare) -> type["subprocess.Popen[Any]"]:
    class Popen(subprocess.Popen[Any]):
        def _execute_child(self, *values: object) -> None:
            options = SIGNATURE.bind(self, *values).arguments
            if not spare.can_start(options):
                super()._execute_child(*values)  # type: ignore[misc]
                return
            self.pid = spare.start(options)
            self._child_created = True
            ends = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
            self._close_pipe_fds(*(options[end] for end in ends))  # type: ignore[attr-defined]

    return Popen


def serve(orders: socket.socket, run: Run) -> NoReturn:
    """The spare: forks until its process has ended."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # it ends with its process
    os.chdir("/")  # where nobody looks for what a command has left
    while True:
        data, descriptors, _, _ = socket.recv_fds(orders, ORDER_BYTES_MAX, 3)
        if not data:
            os._exit(0)
        is_orphan, still_a_child = os.pipe()
        between = os.fork()
        if between == 0:
            if os.fork() == 0:
                os.close(still_a_child)
                os.read(is_orphan, 1)
                os.close(is_orphan)
                become(json.loads(data), descriptors, orders)
                run(json.loads(data)["command"])
            os._exit(0)
        os.waitpid(between, 0)
        for descriptor in (is_orphan, still_a_child, *descriptors):
            os.close(descriptor)


def become(
    order: dict[str, Any], descriptors: list[int], orders: socket.socket
) -> None:
    """Takes the streams, the environment and the place that the process is to have."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    for stream, descriptor in zip(order["streams"], descriptors, strict=True):
        os.dup2(descriptor, stream)
    for descriptor in set(descriptors):
        os.close(descriptor)
    if order["has_session"]:
        os.setsid()
    elif order["group"] != -1:
        os.setpgid(0, order["group"])
    os.environ.clear()
    os.environ.update(order["environment"])
    os.chdir(order["folder"])
    orders.send(str(os.getpid()).encode())
    orders.close()
