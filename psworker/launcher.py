"""Starts the training processes of one machine and stays with them.

Threads and signals, no event loop: one thread waits for each process, one carries
each of its streams, and the main thread is free to hear signals. Processes run in
process groups of their own, so that a signal reaches each of them once, from here,
whether it came from a terminal or from a supervisor.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, BinaryIO

from pswire.exit_codes import exit_code_of_return_code

LINE_BYTES_MAX = 1 << 16
RESTART_DELAY_S = 1.0
DRAIN_TIMEOUT_S = 2.0
PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchPlan:
    """What to start.

    Attributes:
        command: Arguments of Python: a script or `-m` and a module, then its own.
        coordinator: `HOST:PORT`.
        process_count: Processes to start on this machine.
        restart_limit: How often each process that failed is started again.
        worker_id: Id of the worker; with several processes, what their ids begin
            with. None to have the coordinator choose.
        devices: CUDA devices to hand out, one to a process and round again.
        history: Where workers write their histories; empty for what they inherit.
    """

    command: tuple[str, ...]
    coordinator: str
    process_count: int = 1
    restart_limit: int = 0
    worker_id: str | None = None
    devices: tuple[str, ...] = ()
    history: str = ""

    def worker_id_of(self, index: int) -> str | None:
        """Id of the worker in process `index`, None if the coordinator chooses it."""
        if self.worker_id is None or self.process_count == 1:
            return self.worker_id
        return f"{self.worker_id}-{index}"

    def environment(self, index: int, inherited: Mapping[str, str]) -> dict[str, str]:
        """Environment of process `index`."""
        environment = dict(inherited)
        environment["PS_COORDINATOR"] = self.coordinator
        environment.pop("PS_WORKER_ID", None)
        if self.history:
            environment["PS_HISTORY"] = self.history
        worker_id = self.worker_id_of(index)
        if worker_id is not None:
            environment["PS_WORKER_ID"] = worker_id
        if self.process_count > 1:
            # Output goes through a pipe, which Python would fill before it shows.
            environment.setdefault("PYTHONUNBUFFERED", "1")
            # Each would take all cores for itself: on two cores, two processes trained
            # the digits in 25 s so, and in 11 s with one thread each.
            threads = max(1, _usable_core_count() // self.process_count)
            environment.setdefault("OMP_NUM_THREADS", str(threads))
            if self.devices:
                device = self.devices[index % len(self.devices)]
                environment["CUDA_VISIBLE_DEVICES"] = device
        return environment


def _usable_core_count() -> int:
    if hasattr(os, "sched_getaffinity"):  # Not on macOS.
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def visible_cuda_devices(
    environment: Mapping[str, str], device_folder: Path = Path("/dev")
) -> tuple[str, ...]:
    """CUDA devices of this machine that a process may use, without loading CUDA."""
    chosen = environment.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return tuple(name.strip() for name in chosen.split(",") if name.strip())
    # A container may hold only /dev/nvidia3, which CUDA there still calls 0.
    return tuple(
        str(index) for index, _ in enumerate(device_folder.glob("nvidia[0-9]*"))
    )


class Launcher:
    """Runs a plan, once."""

    def __init__(self, plan: LaunchPlan, *, log: Callable[[str], None]) -> None:
        self._plan = plan
        self._log = log
        # A single process may read the terminal (a debugger, say), so it stays in
        # the terminal's process group, and Ctrl-C reaches it without our help.
        self._shares_terminal = plan.process_count == 1 and sys.stdin.isatty()
        # Reentrant: a second signal may come while the first is being handled.
        self._lock = threading.RLock()
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self._first_failure = 0
        self.stopped_by: signal.Signals | None = None
        self.stopped = threading.Event()

    def install_signal_handlers(self) -> None:
        """Routes signals to `stop`. From the main thread."""
        for number in PASSED_ON:
            signal.signal(number, self._on_signal)

    def run(self) -> int:
        """Starts all processes and waits for them.

        Returns:
            Exit code of the first process that failed for good, else 0.
        """
        if self.stopped_by is not None:
            return 128 + self.stopped_by
        threads = [
            threading.Thread(target=self._keep, args=(index,), name=f"process-{index}")
            for index in range(self._plan.process_count)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return self._first_failure

    def stop(self, number: signal.Signals) -> None:
        """Passes a first signal on to every process; a second one kills them."""
        with self._lock:
            first = self.stopped_by is None
            if self.stopped_by is None:
                self.stopped_by = number
                self.stopped.set()
            for process in self._running.values():
                if not first:
                    self._kill(process)
                elif not (self._shares_terminal and number == signal.SIGINT):
                    process.send_signal(number)
        if self._running:
            self._log(
                f"{number.name}: stopping, once more to kill" if first else "killed"
            )

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.stop(signal.Signals(number))

    def _kill(self, process: subprocess.Popen[bytes]) -> None:
        if self._shares_terminal:
            process.kill()
            return
        # The group holds what the process has started, such as loader processes.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    def _keep(self, index: int) -> None:
        """Runs process `index`, again if it fails and may."""
        for restart_count in range(self._plan.restart_limit + 1):
            code = self._run_once(index)
            if code == 0 or self.stopped.is_set():
                break
            self._log(self._failure_text(index, code, restart_count))
            if restart_count < self._plan.restart_limit:
                self.stopped.wait(RESTART_DELAY_S)
        with self._lock:
            self._first_failure = self._first_failure or code

    def _failure_text(self, index: int, code: int, restart_count: int) -> str:
        worker_id = self._plan.worker_id_of(index)
        process = f"process {index}" + (f" (worker {worker_id})" if worker_id else "")
        limit = self._plan.restart_limit
        restarts = (
            f"restarts used: {restart_count} of {limit}"
            if limit
            else "not started again since --max-restarts is 0"
        )
        return f"{process} ended with {_exit_code_text(code)}, {restarts}"

    def _run_once(self, index: int) -> int:
        """Runs process `index` to its end and returns its exit code."""
        piped = subprocess.PIPE if self._plan.process_count > 1 else None
        with self._lock:
            if self.stopped_by is not None:
                return 128 + self.stopped_by
            process = subprocess.Popen(
                [sys.executable, *self._plan.command],
                env=self._plan.environment(index, os.environ),
                stdin=subprocess.DEVNULL if piped else None,
                stdout=piped,
                stderr=piped,
                process_group=None if self._shares_terminal else 0,
            )
            self._running[index] = process
        carriers = _carry_output(process, tag=f"[w{index}] ".encode())
        code = process.wait()
        with self._lock:
            del self._running[index]
        for carrier in carriers:
            # What the process started may hold its streams open: not waited for.
            carrier.join(DRAIN_TIMEOUT_S)
        return exit_code_of_return_code(code)


def _exit_code_text(code: int) -> str:
    """As in `exit code 1`, or `exit code 137 (SIGKILL)`."""
    try:
        return f"exit code {code} ({signal.Signals(code - 128).name})"
    except ValueError:  # Not that of a signal.
        return f"exit code {code}"


def _carry_output(
    process: subprocess.Popen[bytes], *, tag: bytes
) -> list[threading.Thread]:
    """Starts a thread for each of the process's streams that is a pipe."""
    streams = ((process.stdout, sys.stdout), (process.stderr, sys.stderr))
    carriers = [
        threading.Thread(target=carry_lines, args=(source, sink.buffer, tag))
        for source, sink in streams
        if source is not None
    ]
    for carrier in carriers:
        carrier.daemon = True
        carrier.start()
    return carriers


def carry_lines(source: IO[bytes], sink: BinaryIO, tag: bytes) -> None:
    """Copies lines, each behind `tag` and in one write. Splits a very long one."""
    with source:
        while line := source.readline(LINE_BYTES_MAX):
            ended = line if line.endswith(b"\n") else line + b"\n"
            try:
                sink.write(tag + ended)
                sink.flush()
            except (BrokenPipeError, ValueError):
                # Nobody reads any more. Closing our end tells the process so.
                return
