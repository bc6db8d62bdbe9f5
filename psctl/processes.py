"""Child processes of a command, which end with it.

Each is in a process group of its own, so that Ctrl-C in a terminal reaches this
process alone and it decides in which order they end.
"""

import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, Final, Self

from psctl.failures import CommandError
from pswire.config_file import CONFIG_VARIABLE
from pswire.tether import tethered

STOP_TIMEOUT_S: Final = 2.0
"""What a child gets to end by itself, after which it's killed."""

_LOG_TAIL_LINES: Final = 15
_POLL_S: Final = 0.1


@dataclass(frozen=True, slots=True)
class Line:
    """A line that a child wrote to its stdout, or with `None` the end of it."""

    child: str
    text: str | None


_INTERRUPTS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def signals_interrupt() -> Iterator[None]:
    """Makes SIGTERM and SIGHUP end a command and its children, as Ctrl-C does."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    with _handled_by(interrupt):
        yield


@contextmanager
def _interrupts_deferred() -> Iterator[None]:
    """Holds a KeyboardInterrupt back.

    One that came between a fork and the note of its process id would leave a process
    that nobody ends, and one in the middle of the ending would do the same.
    """
    arrived: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    with _handled_by(lambda number, frame: arrived.append(number)):
        yield
    if arrived:
        raise KeyboardInterrupt


@contextmanager
def _handled_by(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    saved = [signal.signal(number, handler) for number in _INTERRUPTS]
    try:
        yield
    finally:
        for number, former in zip(_INTERRUPTS, saved, strict=True):
            signal.signal(number, former)


class Children:
    """Child processes, ended for sure at the end of a `with` block.

    Attributes:
        lines: Their stdout, line by line, in the order of arrival.
    """

    def __init__(self, scratch: Path, *, prefix: Sequence[str] = ()) -> None:
        """Starts nothing.

        Args:
            scratch: Where the stderr of each and its temporary files are kept.
            prefix: A command, by its path, that becomes the one that follows it, such
                as `ip netns exec`.
        """
        self._scratch = scratch
        self._prefix = prefix
        self._processes: dict[str, subprocess.Popen[str]] = {}
        self._commands: dict[str, tuple[Sequence[str], Mapping[str, str]]] = {}
        self._may_be_killed: set[str] = set()
        self._readers: list[threading.Thread] = []
        self._logs: list[IO[bytes]] = []
        self.lines: queue.Queue[Line] = queue.Queue()

    @_interrupts_deferred()
    def start(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Starts a Python command, `python -m` and the rest, under a name.

        The environment is added to that of this process.
        """
        environment = environment or {}
        self._commands[name] = (command, environment)
        # Of all starts under this name, one after the other.
        log = self._log_path(name).open("ab")
        self._logs.append(log)
        process = subprocess.Popen(
            [
                *tethered(signal.SIGKILL),
                *self._prefix,
                # -P: what lies in the current folder must not shadow a package.
                *(sys.executable, "-P", "-m", *command),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            env={
                **os.environ,
                # Of another job: a command that starts one says all of it.
                CONFIG_VARIABLE: "",
                "TMPDIR": str(self._scratch),
                **environment,
            },
            text=True,
            encoding="utf-8",
            start_new_session=True,
        )
        self._processes[name] = process
        reader = threading.Thread(
            target=self._read, args=(name, process), name=f"read-{name}", daemon=True
        )
        self._readers.append(reader)
        reader.start()

    def restart(self, name: str, *options: str) -> None:
        """Starts a command that has ended again, with more options after its own."""
        command, environment = self._commands[name]
        self.start(name, [*command, *options], environment)

    def next_line(self, timeout_s: float) -> Line | None:
        """The next line of any child, `None` if there is none in time."""
        try:
            return self.lines.get(timeout=max(timeout_s, 0))
        except queue.Empty:
            return None

    def line_of(
        self, name: str, timeout_s: float, wanted: re.Pattern[str]
    ) -> re.Match[str] | None:
        """The next line of a child that has a pattern, `None` if there is none in time.

        Lines of others are dropped.
        """
        deadline = time.monotonic() + timeout_s
        while (left_s := deadline - time.monotonic()) > 0:
            line = self.next_line(min(left_s, _POLL_S))
            self.check(names=())
            if line is not None and line.child == name and line.text is not None:
                found = wanted.search(line.text)
                if found is not None:
                    return found
        return None

    def check(self, names: Iterable[str] | None = None) -> None:
        """Checks that none has failed, and that those named, by default all, still run.

        The error has the end of the log.
        """
        must_run = set(self._processes if names is None else names)
        for name, process in self._processes.items():
            code = process.poll()
            if code is None or (code == 0 and name not in must_run):
                continue
            if code == -signal.SIGKILL and name in self._may_be_killed:
                continue
            raise CommandError(
                f"{name} ended with exit code {code}; the end of its log:\n"
                f"{self.log_tail(name)}"
            )

    @_interrupts_deferred()
    def kill(self, name: str) -> None:
        """Ends a process by SIGKILL; it has ended on return."""
        _signal(self._processes[name], signal.SIGKILL)
        self._processes[name].wait()

    def allow_kill(self, name: str) -> None:
        """Lets a process end by SIGKILL without that being a failure."""
        self._may_be_killed.add(name)

    def was_killed(self, name: str) -> bool:
        """Whether a process ended by SIGKILL, once it has closed its stdout."""
        return self.wait_ended(name, STOP_TIMEOUT_S) and (
            self._processes[name].returncode == -signal.SIGKILL
        )

    def wait_ended(self, name: str, timeout_s: float) -> bool:
        """Waits for a process to end; whether it has."""
        with suppress(subprocess.TimeoutExpired):
            self._processes[name].wait(timeout_s)
            return True
        return False

    def is_running(self, name: str) -> bool:
        return self._processes[name].poll() is None

    def process_id(self, name: str) -> int:
        return self._processes[name].pid

    @_interrupts_deferred()
    def stop(self) -> None:
        """Ends all of them: by SIGTERM first, and by SIGKILL if they don't end."""
        for process in self._processes.values():
            _signal(process, signal.SIGTERM)
        deadline = time.monotonic() + STOP_TIMEOUT_S
        for process in self._processes.values():
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        for process in self._processes.values():
            # The whole group, also where its leader is gone already.
            _signal(process, signal.SIGKILL)
            process.wait()
        for reader in self._readers:
            reader.join()
        for log in self._logs:
            log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *unused: object) -> None:
        self.stop()

    def _read(self, name: str, process: "subprocess.Popen[str]") -> None:
        assert process.stdout is not None
        with process.stdout as lines:
            for text in lines:
                self.lines.put(Line(name, text.rstrip("\n")))
        self.lines.put(Line(name, None))

    def _log_path(self, name: str) -> Path:
        return self._scratch / f"{name}.log"

    def log_tail(self, name: str) -> str:
        """The last lines of its stderr."""
        text = self._log_path(name).read_text(errors="replace")
        return "\n".join(text.splitlines()[-_LOG_TAIL_LINES:]) or "(empty)"


def _signal(process: "subprocess.Popen[str]", number: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)
