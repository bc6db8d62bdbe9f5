"""A folder of commands to put on a shell's PATH, each of which is forked, not started.

A command asks the server of its folder for a process, gives it its streams, its
environment and its folder, passes signals on to it, and ends as it ends.
"""

import contextlib
import ctypes
import json
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NoReturn

from tests.doubles.children import Nursery, kill, wait_until
from tests.doubles.spare import ORDER_BYTES_MAX, PR_SET_PDEATHSIG, become

MODULES: Final = ("psserver", "psworker", "psctl")
COMMAND: Final = """#!{python} -IS
import json, os, signal, socket, sys

server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
server.connect({address!r})
order = {{
    "command": [*{first!r}, *sys.argv[1:]],
    "environment": dict(os.environ),
    "folder": os.getcwd(),
    "has_session": False,
    "group": -1,
    "streams": [0, 1, 2],
}}
socket.send_fds(server, [json.dumps(order).encode()], [0, 1, 2])
process_id = int(server.recv(64))
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, lambda number, _: os.kill(process_id, number))
code = int(server.recv(64))
if code < 0:
    signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
sys.exit(code)
"""


@contextlib.contextmanager
def forked_commands(nursery: Nursery) -> Iterator[Path]:
    """A folder of `python` and our commands. What they have started ends with it."""
    # Not a folder of pytest's, whose names are too long for the address of a socket.
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        address = str(folder / "server")
        for command, first in (
            ("python", []),
            *((module, ["-m", module]) for module in MODULES),
        ):
            text = COMMAND.format(python=sys.executable, address=address, first=first)
            (folder / command).write_text(text)
            (folder / command).chmod(0o755)
        server = nursery.start(
            *("commands", "-m", "tests.doubles.forked_commands", address),
            folder=folder,
            environment={},
        )
        try:
            wait_until(lambda: bool(server.lines()), "the server of the commands")
            yield folder
        finally:
            kill(server)


def serve(listener: socket.socket) -> NoReturn:
    """Gives each command a process to wait for its own."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how those end
    while True:
        command, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            attend(command)
        command.close()


def attend(command: socket.socket) -> NoReturn:
    """Forks what a command stands for, and tells it how that has ended."""
    die_with_parent()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    data, descriptors, _, _ = socket.recv_fds(command, ORDER_BYTES_MAX, 3)
    process_id = os.fork()
    if process_id == 0:
        from tests.doubles.nursery import launch  # as `python -m` has it, in the parent

        die_with_parent()
        order = json.loads(data)
        become(order, descriptors, command)
        launch(order["command"])
    for descriptor in descriptors:
        os.close(descriptor)
    _, status = os.waitpid(process_id, 0)
    with contextlib.suppress(BrokenPipeError):  # the command was killed
        command.send(str(os.waitstatus_to_exitcode(status)).encode())
    os._exit(0)


def die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(sys.argv[1])
        listening.listen()
        print("ready", flush=True)
        serve(listening)
