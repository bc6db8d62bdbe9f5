"""The commands as real processes, for tests of signals, exit codes and starts."""

import os
import queue
import subprocess
import sys
import threading
from pathlib import Path
from types import TracebackType
from typing import Self

LINE_TIMEOUT_S = 90.0
"""Longest wait for a line: a process that imports torch on a busy machine."""


class Processes:
    """Child processes. A context manager: leaving it kills them.

    When a test fails, what they wrote is part of the failure.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._running: dict[str, subprocess.Popen[str]] = {}
        self._lines: dict[str, queue.SimpleQueue[str | None]] = {}
        self._readers: list[threading.Thread] = []

    def start(self, name: str, *arguments: str, **environment: str) -> None:
        """Starts `python` with these arguments."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith("PS_")}
        kept |= {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **environment}
        with (self._folder / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, *arguments],
                env=kept,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._running[name], self._lines[name] = process, lines
        reader = threading.Thread(target=_read, args=(process, lines), daemon=True)
        self._readers.append(reader)
        reader.start()

    def start_daemon(
        self, name: str, role: str, *arguments: str, **environment: str
    ) -> None:
        """Starts `psserver` with a state folder of its own."""
        state_dir = f"--state-dir={self._folder / f'{name}.state'}"
        self.start(name, "-m", "psserver", role, state_dir, *arguments, **environment)

    def line(self, name: str, timeout_s: float = LINE_TIMEOUT_S) -> str:
        """The next line that a process prints to its stdout."""
        try:
            line = self._lines[name].get(timeout=timeout_s)
        except queue.Empty:
            raise AssertionError(f"{name} is silent:\n{self.logs()}") from None
        assert line is not None, f"{name} has ended:\n{self.logs()}"
        return line

    def rest(self, name: str) -> list[str]:
        """The lines that a process, which has ended, has printed and nobody has had."""
        found = []
        while (line := self._lines[name].get(timeout=LINE_TIMEOUT_S)) is not None:
            found.append(line)
        return found

    def last_line(self, name: str) -> str:
        """The last line that a process, which has ended, has printed."""
        return (self.rest(name) or [""])[-1]

    def address(self, name: str) -> str:
        """Where a daemon listens, from the one line that it prints."""
        line = self.line(name)
        assert line.startswith("psserver "), line
        return line.rsplit(" ", 1)[-1]

    def pids(self) -> dict[str, int]:
        """Process ids by name."""
        return {name: process.pid for name, process in self._running.items()}

    def send(self, name: str, number: int) -> None:
        """Sends a signal."""
        self._running[name].send_signal(number)

    def code(self, name: str, timeout_s: float = LINE_TIMEOUT_S) -> int:
        """The exit code of a process that ends by itself."""
        try:
            return self._running[name].wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{name} goes on:\n{self.logs()}") from None

    def log(self, name: str) -> str:
        """What a process has written to its stderr."""
        return (self._folder / f"{name}.log").read_text(errors="replace")

    def logs(self) -> str:
        return "\n".join(f"--- {name}\n{self.log(name)}" for name in self._running)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for process in self._running.values():
            process.kill()
            process.wait()
        for reader in self._readers:
            reader.join()
        if error is not None:
            error.add_note(self.logs())


def _read(
    process: "subprocess.Popen[str]", lines: "queue.SimpleQueue[str | None]"
) -> None:
    assert process.stdout is not None
    with process.stdout as stdout:
        for line in stdout:
            lines.put(line.rstrip("\n"))
    lines.put(None)
