"""Starts the training processes of one machine and stays with them.

Threads and signals, no event loop: one thread waits for each process, one copies each
of its streams, and the main thread is free for signals. Processes run in process groups
of their own, so that a signal reaches each of them once, from here, whether a terminal
or a supervisor has sent it.
"""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Final

from pswire.end_signals import EndWish, Heard
from pswire.exit_codes import ExitCode, exit_code_of_return_code
from pswire.tether import tethered
from psworker.launch.launch_plan import (
    STEADY_S,
    LaunchPlan,
    restart_delay_s,
)
from psworker.launch.launched import (
    MARK_VARIABLE,
    REFUSED_CODES,
    RESTARTS_VARIABLE,
    refusal_file,
)
from psworker.launch.process_output import carry_output

DRAIN_TIMEOUT_S: Final = 2.0
END_TIMEOUT_S: Final = 10.0
"""How long processes have to end when another one was refused."""

PASSED_ON: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Launcher:
    """Runs a plan, once."""

    def __init__(
        self,
        plan: LaunchPlan,
        *,
        log: Callable[[str], None],
        wish: EndWish | None = None,
    ) -> None:
        self._plan = plan
        self._wish = wish or EndWish()
        self._log = log
        # A single process may read the terminal (a debugger, say), so it stays in
        # the terminal's process group, and Ctrl-C reaches it without our help.
        self._shares_terminal = plan.process_count == 1 and sys.stdin.isatty()
        # Reentrant: a second signal may arrive while the first is being handled.
        self._lock = threading.RLock()
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self._first_failure = 0
        self._killer: threading.Timer | None = None
        self.stopped_by: signal.Signals | None = None
        self.stopped = threading.Event()

    def install_signal_handlers(self) -> None:
        """Routes signals to `stop`. From the main thread."""
        for number in PASSED_ON:
            signal.signal(number, self._on_signal)

    def run(self) -> int:
        """Starts all processes and waits for them.

        Returns:
            Exit code of the process that was refused, else of the first one that
            failed for good, else 0.
        """
        if self.stopped_by is not None:
            return 128 + self.stopped_by
        with tempfile.TemporaryDirectory(prefix="psworker-") as folder:
            threads = [
                threading.Thread(
                    target=self._keep,
                    args=(index, Path(folder, f"connected-{index}")),
                    name=f"process-{index}",
                )
                for index in range(self._plan.process_count)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        if self._killer is not None:
            self._killer.cancel()
        return self._first_failure

    def stop(self, number: signal.Signals) -> None:
        """Passes a first signal on to every process; a second one kills them.

        One in the same moment as the first is the same.
        """
        with self._lock:
            heard = self._wish.hear()
            if heard is Heard.SAME:
                return
            first = heard is Heard.FIRST
            if first:
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

    def _keep(self, index: int, mark: Path) -> None:
        """Runs process `index`, again if it fails and may."""
        quick_failure_count = 0
        for restart_count in range(self._plan.restart_limit + 1):
            began = time.monotonic()
            code = self._run_once(index, mark, restart_count)
            if code in REFUSED_CODES:
                self._end_others(index, code, refusal_file(mark))
            if code == 0 and not mark.exists():
                self._log(self._unconnected_text(index))
            if code == 0 or self.stopped.is_set():
                break
            is_steady = time.monotonic() - began >= STEADY_S
            quick_failure_count = 1 if is_steady else quick_failure_count + 1
            delay_s = None
            if (
                code != ExitCode.PEER_UNAVAILABLE
                and restart_count < self._plan.restart_limit
            ):
                delay_s = restart_delay_s(quick_failure_count)
            self._log(self._failure_text(index, code, restart_count, delay_s))
            if delay_s is None:
                break
            self.stopped.wait(delay_s)
        with self._lock:
            self._first_failure = self._first_failure or code

    def _end_others(self, index: int, code: int, refusal: Path) -> None:
        """Ends all since process `index` was refused, and would be again.

        In a job that needs so many workers the others would wait for it for ever.
        """
        with self._lock:
            if self.stopped.is_set():
                return
            self._first_failure = code
            self.stopped.set()  # so that nothing starts again
            others = list(self._running.values())
            for process in others:
                process.send_signal(signal.SIGTERM)
        text = (
            f"{self._name(index)} was refused with {_exit_code_text(code)}, which a "
            "new start would not mend"
        )
        if others:
            text += ", and the other processes are ended"
        if others and refusal.exists():
            text += f": {refusal.read_text()}"  # its own output may be far above
        self._log(text)
        self._killer = threading.Timer(END_TIMEOUT_S, self._kill_all)
        self._killer.start()

    def _kill_all(self) -> None:
        with self._lock:
            for process in self._running.values():
                self._kill(process)

    def _failure_text(
        self, index: int, code: int, restart_count: int, delay_s: float | None
    ) -> str:
        limit = self._plan.restart_limit
        if delay_s is not None:
            what_next = (
                f"starts again in {delay_s:g} s, restarts used: {restart_count} of "
                f"{limit}"
            )
        elif code == ExitCode.PEER_UNAVAILABLE:
            what_next = "not started again: a process of the job that it needs is lost"
        elif limit:
            what_next = f"restarts used: {restart_count} of {limit}"
        else:
            what_next = "not started again since --max-restarts is 0"
        return f"{self._name(index)} ended with {_exit_code_text(code)}, {what_next}"

    def _unconnected_text(self, index: int) -> str:
        return (
            f"{self._name(index)}: {self._plan.script} ended without ever connecting, "
            "so the job has nothing of it: call psworker.connect() and prepare() in it"
        )

    def _name(self, index: int) -> str:
        worker_id = self._plan.worker_id_of(index)
        return f"process {index}" + (f" (worker {worker_id})" if worker_id else "")

    def _run_once(self, index: int, mark: Path, restart_count: int) -> int:
        """Runs process `index` to its end and returns its exit code."""
        piped = subprocess.PIPE if self._plan.process_count > 1 else None
        environment = self._plan.environment(index, os.environ)
        environment[RESTARTS_VARIABLE] = str(restart_count)
        with self._lock:
            if self.stopped.is_set():
                return 128 + (self.stopped_by or signal.SIGTERM)
            process = subprocess.Popen(
                [
                    # Or it would train on for a launcher that nobody can stop any more.
                    *tethered(signal.SIGTERM),
                    *(sys.executable, *self._plan.command),
                ],
                env={**environment, MARK_VARIABLE: str(mark)},
                stdin=subprocess.DEVNULL if piped else None,
                stdout=piped,
                stderr=piped,
                process_group=None if self._shares_terminal else 0,
            )
            self._running[index] = process
        carriers = carry_output(process, index=index)
        code = process.wait()
        with self._lock:
            del self._running[index]
        for carrier in carriers:
            # Processes that it has started may hold its streams open: not waited for.
            carrier.join(DRAIN_TIMEOUT_S)
        return exit_code_of_return_code(code)


def _exit_code_text(code: int) -> str:
    """As in `exit code 1`, or `exit code 137 (SIGKILL)`."""
    try:
        return f"exit code {code} ({signal.Signals(code - 128).name})"
    except ValueError:  # Not that of a signal.
        return f"exit code {code}"
