"""Starts processes of a job by fork, from a process that has imported everything.

Importing torch costs a process two seconds; a fork costs it some milliseconds, which
is what lets many jobs start in one run. What is forked is a process of its own, with a
command line of its own, as `python` takes it: `-m` and a module, or a script.

Orders come as JSON lines on stdin, what happened goes out as JSON lines on stdout. At
the word "end", and at the end of stdin, all children are killed. Arguments name what
to import besides.
"""

import atexit
import contextlib
import ctypes
import gc
import importlib
import importlib.util
import json
import os
import random
import runpy
import selectors
import signal
import sys
import tempfile
import threading
import time
import types
import warnings
import weakref
from typing import Any, Final, NoReturn

import typer

from tests.doubles.spare import Becomes, Spare

PR_SET_PDEATHSIG: Final = 1
END: Final = "end"
IMPORTED: Final = (
    "psserver.__main__",
    "psserver.coordinator.daemon",
    "psserver.edge.ending",
    "psserver.shard.daemon",
    "psworker.connecting",
    "sklearn.datasets",
    "tests.fault.training",
    "uvloop",
)


def tell(event: str, **values: object) -> None:
    line = json.dumps({"event": event, "at_s": time.monotonic(), **values}) + "\n"
    os.write(1, line.encode())


def load() -> None:
    """Imports what children need. Nothing here may start a thread or a channel."""
    for name in (*IMPORTED, *sys.argv[1:]):
        importlib.import_module(name)
    # Not at the top: the process of the tests reads this module before it has set how
    # many threads torch has.
    from psserver.shard.tensors.supported_optimizers import load_optimizers

    load_optimizers()
    # Imports a good deal, which a command line leaves until it is read.
    typer.main.get_command(sys.modules["psserver.__main__"].app)
    # Torch's modules clean up at the end of a process, for 50 ms in each child.
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False
    # Else the first collection in each child would copy every page that holds objects.
    gc.collect()
    gc.freeze()


def child(order: dict[str, Any]) -> NoReturn:
    """Becomes the wanted process."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    os.setsid()
    if sys.platform == "linux":  # nothing may outlive a nursery that is killed
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    random.seed()
    tempfile.tempdir = None
    files = (("/dev/null", os.O_RDONLY), (order["out"], None), (order["log"], None))
    for descriptor, (path, flags) in enumerate(files):
        writing = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        opened = os.open(path, writing if flags is None else flags, 0o644)
        os.dup2(opened, descriptor)
        os.close(opened)
    for name in [name for name in os.environ if name.startswith("PS_")]:
        del os.environ[name]
    os.environ["PS_ADMIN_LISTEN"] = "off"
    os.environ.update(order["environment"])
    os.chdir(order["working"])
    (launch if order["launches"] else live)(order["command"])


def launch(command: list[str]) -> NoReturn:
    """Runs a command whose processes are forked, and theirs."""
    Spare(launch)
    live(command)


def live(command: list[str]) -> NoReturn:
    """Runs a command and ends as `python` would, given these arguments."""
    code = 70
    try:
        try:
            code = run(command)
        except SystemExit:
            raise
        except BaseException:
            sys.excepthook(*sys.exc_info())
            code = 1
    except SystemExit as error:  # or the hook's
        code = error.code if isinstance(error.code, int) else int(bool(error.code))
    finally:
        with contextlib.suppress(Exception):
            # What Python does at the end of a process that it has had from the start.
            threading._shutdown()  # type: ignore[attr-defined]
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def run(command: list[str]) -> int:
    """Runs a command, and what it becomes in its place."""
    # Python's default hides what a daemon does at the end of its input.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    while command[0] in ("-I", "-P", "-W"):  # of the first two: all modules are found
        if command.pop(0) == "-W":
            warnings.simplefilter(command.pop(0))  # type: ignore[arg-type]
    try:
        if command[0] == "-m":
            run_module(*command[1:])
        elif command[0] == "-c":
            run_text(*command[1:])
        else:
            sys.argv = command
            runpy.run_path(command[0], run_name="__main__")
    except Becomes as other:
        return run(other.command)
    return 0


def run_module(module: str, *arguments: str) -> None:
    sys.argv = [module, *arguments]
    spec = importlib.util.find_spec(module)
    is_package = spec is not None and spec.submodule_search_locations is not None
    # One that was imported here would be warned of.
    sys.modules.pop(f"{module}.__main__" if is_package else module, None)
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def run_text(program: str, *arguments: str) -> None:
    sys.argv = ["-c", *arguments]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    exec(compile(program, "<string>", "exec"), main.__dict__)


class Nursery:
    """The parent: forks, reaps, tells."""

    def __init__(self) -> None:
        self._names: dict[int, str] = {}
        self._input = b""

    def serve(self) -> None:
        reading, writing = os.pipe()
        os.set_blocking(reading, False)
        os.set_blocking(writing, False)
        signal.set_wakeup_fd(writing)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)  # it ends with its stdin
        tell("ready")
        with selectors.DefaultSelector() as selector:
            selector.register(0, selectors.EVENT_READ)
            selector.register(reading, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    if key.fd == reading:
                        with contextlib.suppress(BlockingIOError):
                            os.read(reading, 1 << 12)
                        self.reap()
                    elif not self.take_orders():
                        self.end()
                        return

    def take_orders(self) -> bool:
        """Whether there may be more."""
        data = os.read(0, 1 << 16)
        *lines, self._input = (self._input + data).split(b"\n")
        for line in lines:
            if line == END.encode():
                return False
            order = json.loads(line)
            process_id = os.fork()
            if process_id == 0:
                child(order)
            self._names[process_id] = order["name"]
            tell("started", name=order["name"], pid=process_id)
        return bool(data)

    def reap(self) -> None:
        while self._names:
            process_id, status = os.waitpid(
                -1, os.WNOHANG | os.WUNTRACED | os.WCONTINUED
            )
            if not process_id:
                return
            name = self._names[process_id]
            if os.WIFSTOPPED(status):
                tell("stopped", name=name, pid=process_id)
            elif os.WIFCONTINUED(status):
                tell("continued", name=name, pid=process_id)
            else:
                del self._names[process_id]
                code = os.waitstatus_to_exitcode(status)
                tell("ended", name=name, pid=process_id, code=code)

    def end(self) -> None:
        for process_id in self._names:
            os.kill(process_id, signal.SIGKILL)
        while self._names:
            process_id, _ = os.waitpid(-1, 0)
            self._names.pop(process_id, None)
        os._exit(0)  # torch takes seconds to end in order


if __name__ == "__main__":
    load()
    Nursery().serve()
