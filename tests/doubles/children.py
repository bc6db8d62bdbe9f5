"""Processes that the nursery starts, as a test sees them."""

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, Self

from tests.doubles.nursery import END

REPOSITORY: Final = Path(__file__).resolve().parents[2]
WAIT_TIMEOUT_S: Final = 90.0
IMPORT_TIMEOUT_S: Final = 240.0
"""For the nursery to import torch and all of ours, on a machine that is busy."""
POLL_S: Final = 0.01

Event = dict[str, Any]
Completed = subprocess.CompletedProcess[str]


def wait_until(is_over: Callable[[], bool], what: str, timeout_s: float = 0.0) -> None:
    """Returns once something is so; fails with its name when it does not come."""
    deadline = time.monotonic() + (timeout_s or WAIT_TIMEOUT_S)
    while not is_over():
        assert time.monotonic() < deadline, f"did not come: {what}"
        time.sleep(POLL_S)


class Child:
    """One process.

    Attributes:
        name: Of its files.
        pid: Its process id.
        code: Exit code, negative for a signal; None while it lives.
        ended_at_s: When its parent saw its end, on the monotonic clock.
        stopped_at_s: When its parent saw it stop, None while it runs.
    """

    def __init__(self, name: str, pid: int, folder: Path) -> None:
        self.name = name
        self.pid = pid
        self.code: int | None = None
        self.ended_at_s = 0.0
        self.stopped_at_s: float | None = None
        self._out = folder / f"{name}.out"
        self._log = folder / f"{name}.log"
        self._read_bytes = 0
        self._lines: list[str] = []
        self._events: list[Event] = []

    @property
    def log(self) -> str:
        """What it wrote to its stderr."""
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    @property
    def out(self) -> str:
        """What it has printed."""
        return self._out.read_text(errors="replace") if self._out.exists() else ""

    def lines(self) -> list[str]:
        """What it printed, whole lines only."""
        if self._out.exists():
            with self._out.open("rb") as out:
                out.seek(self._read_bytes)
                data = out.read()
            data = data[: data.rfind(b"\n") + 1]
            self._read_bytes += len(data)
            self._lines += data.decode().splitlines()
        return self._lines

    def events(self, kind: str) -> list[Event]:
        """What it told of one kind."""
        lines = self.lines()
        self._events += [json.loads(line) for line in lines[len(self._events) :]]
        return [event for event in self._events if event["event"] == kind]

    def send(self, number: int) -> float:
        """Sends a signal; when."""
        at_s = time.monotonic()
        os.kill(self.pid, number)
        return at_s

    def wait_end(self, timeout_s: float = WAIT_TIMEOUT_S) -> int:
        """Its exit code, once it has one."""
        wait_until(lambda: self.code is not None, f"the end of {self.name}", timeout_s)
        assert self.code is not None
        return self.code

    def wait_stopped(self) -> float:
        """Returns once it stands still; since when."""
        wait_until(
            lambda: self.stopped_at_s is not None or self.code is not None,
            f"{self.name} standing still",
        )
        assert self.stopped_at_s is not None, f"{self.name} ended with {self.code}"
        return self.stopped_at_s


class Nursery:
    """The process that starts the others. A context manager: leaving it ends all."""

    def __init__(self, *modules: str) -> None:
        """Starts it.

        Args:
            modules: What it shall import for its children, besides what is ours.
        """
        self._children: dict[int, Child] = {}
        self._started: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._starting = threading.Lock()
        self._lock = threading.Lock()
        kept = {k: v for k, v in os.environ.items() if not k.startswith("PS_")}
        kept["PS_ADMIN_LISTEN"] = "off"
        kept |= {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.doubles.nursery", *modules],
            cwd=REPOSITORY,
            env=kept,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, name="nursery")
        self._reader.start()

    def __enter__(self) -> Self:
        try:
            assert self._started.get(timeout=IMPORT_TIMEOUT_S)["event"] == "ready"
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        try:
            # By a word, since a process that was forked here may hold the pipe open.
            self._process.stdin.write(END + "\n")
            self._process.stdin.close()
            self._process.wait(WAIT_TIMEOUT_S)
        finally:
            self._end()

    def _end(self) -> None:
        self._process.kill()  # else the thread below keeps all from ending
        self._reader.join()

    def start(
        self,
        name: str,
        *command: str,
        folder: Path,
        environment: Mapping[str, str],
        working: Path = REPOSITORY,
        launches: bool = False,
    ) -> Child:
        """Starts `python` with a command; its streams go to files of the name.

        Args:
            name: Of its files.
            command: What `python` would be given.
            folder: Of its files.
            environment: Added to the nursery's.
            working: The folder that it runs in.
            launches: Whether processes that it starts are forked, too.
        """
        order = {
            "name": name,
            "command": command,
            "environment": dict(environment),
            "out": str(folder / f"{name}.out"),
            "log": str(folder / f"{name}.log"),
            "working": str(working),
            "launches": launches,
        }
        assert self._process.stdin is not None
        with self._starting:  # so that each gets the answer to its own order
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
            event = self._started.get(timeout=WAIT_TIMEOUT_S)
        child = Child(name, event["pid"], folder)
        with self._lock:
            self._children[child.pid] = child
            for known in event.get("since", ()):
                self._take(known)
        return child

    def run(
        self,
        *command: str,
        environment: Mapping[str, str],
        working: Path = REPOSITORY,
        launches: bool = False,
        timeout_s: float = WAIT_TIMEOUT_S,
    ) -> Completed:
        """Starts `python` as `start` does, and waits for its end."""
        with tempfile.TemporaryDirectory() as folder:
            child = self.start(
                *("command", *command),
                folder=Path(folder),
                environment=environment,
                working=working,
                launches=launches,
            )
            try:
                code = child.wait_end(timeout_s)
            finally:
                kill(child)
            return Completed(command, code, child.out, child.log)

    def _read(self) -> None:
        assert self._process.stdout is not None
        early: dict[int, Event] = {}
        with self._process.stdout as stdout:
            for line in stdout:
                event = json.loads(line)
                if event["event"] in ("ready", "started"):
                    early[event.get("pid", 0)] = event
                    self._started.put(event)
                    continue
                with self._lock:
                    if event["pid"] in self._children:
                        self._take(event)
                    else:  # it was quicker than `start`
                        early[event["pid"]].setdefault("since", []).append(event)

    def _take(self, event: Event) -> None:
        child = self._children[event["pid"]]
        match event["event"]:
            case "ended":
                child.ended_at_s, child.code = event["at_s"], event["code"]
            case "stopped":
                child.stopped_at_s = event["at_s"]
            case "continued":
                child.stopped_at_s = None


def kill(child: Child) -> None:
    """Kills a process, if it lives."""
    if child.code is None:
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            child.send(signal.SIGKILL)
        child.wait_end()
