"""The commands as real processes, for tests of signals, exit codes and starts."""

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Self

from tests.doubles.children import Child, Nursery, kill, wait_until

LINE_TIMEOUT_S = 90.0
"""Longest wait for a line: a process that imports torch on a busy machine."""


class Processes:
    """Child processes. A context manager: leaving it kills them.

    When a test fails, what they wrote is part of the failure.
    """

    def __init__(
        self, folder: Path, nursery: Nursery | None = None, *, launches: bool = False
    ) -> None:
        """Starts nothing yet.

        Args:
            folder: For what they print and log.
            nursery: Forks them. Without one, each is a `python` that imports torch by
                itself: for tests of how a process starts, ends, and what memory it has.
            launches: Whether the nursery forks what they start, too.
        """
        self._folder = folder
        self._nursery = nursery
        self._launches = launches
        self._children: dict[str, Child] = {}
        self._line_counts: dict[str, int] = {}
        self._waiters: list[threading.Thread] = []

    def start(self, name: str, *arguments: str, **environment: str) -> None:
        """Starts `python` with these arguments."""
        self._line_counts[name] = 0
        if self._nursery is not None:
            self._children[name] = self._nursery.start(
                *(name, *arguments),
                folder=self._folder,
                environment=environment,
                launches=self._launches,
            )
            return
        kept = {k: v for k, v in os.environ.items() if not k.startswith("PS_")}
        kept |= {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        kept |= {"PS_ADMIN_LISTEN": "off", **environment}
        with (
            (self._folder / f"{name}.log").open("wb") as log,
            (self._folder / f"{name}.out").open("wb") as out,
        ):
            process = subprocess.Popen(
                [sys.executable, *arguments],
                env=kept,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=log,
            )
        child = self._children[name] = Child(name, process.pid, self._folder)
        waiter = threading.Thread(target=_wait, args=(process, child), daemon=True)
        self._waiters.append(waiter)
        waiter.start()

    def start_daemon(
        self, name: str, role: str, *arguments: str, **environment: str
    ) -> None:
        """Starts `psserver` with a state folder of its own."""
        state_dir = f"--state-dir={self._folder / f'{name}.state'}"
        self.start(name, "-m", "psserver", role, state_dir, *arguments, **environment)

    def line(self, name: str, timeout_s: float = LINE_TIMEOUT_S) -> str:
        """The next line that a process prints to its stdout."""
        child, count = self._children[name], self._line_counts[name]

        def has_printed() -> bool:
            has_ended = child.code is not None
            if len(child.lines()) > count:
                return True
            assert not has_ended, f"{name} has ended:\n{self.logs()}"
            return False

        wait_until(has_printed, f"a line of {name}", timeout_s)
        self._line_counts[name] += 1
        return child.lines()[count]

    def lines(self, name: str) -> list[str]:
        """All lines that a process has printed to its stdout."""
        return self._children[name].lines()

    def check_alive(self) -> None:
        """Fails if one has ended."""
        ended = {
            name: c.code for name, c in self._children.items() if c.code is not None
        }
        assert not ended, f"have ended: {ended}\n{self.logs()}"

    def rest(self, name: str) -> list[str]:
        """The lines of a process that has ended, but those that `line` has returned."""
        self.code(name)
        count, lines = self._line_counts[name], self._children[name].lines()
        self._line_counts[name] = len(lines)
        return lines[count:]

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
        return {name: child.pid for name, child in self._children.items()}

    def send(self, name: str, number: int) -> None:
        """Sends a signal."""
        self._children[name].send(number)

    def code(self, name: str, timeout_s: float = LINE_TIMEOUT_S) -> int:
        """The exit code of a process that ends by itself."""
        return self._children[name].wait_end(timeout_s)

    def log(self, name: str) -> str:
        """What a process has written to its stderr."""
        return self._children[name].log

    def logs(self) -> str:
        return "\n".join(f"--- {name}\n{self.log(name)}" for name in self._children)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: object, error: BaseException | None, trace: object
    ) -> None:
        for child in self._children.values():
            kill(child)
        for waiter in self._waiters:
            waiter.join()
        if error is not None:
            error.add_note(self.logs())


def _wait(process: "subprocess.Popen[bytes]", child: Child) -> None:
    child.code = process.wait()
