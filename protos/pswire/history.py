"""What a process did and received, one JSON object a line, for an offline check.

Every process of a job can keep one (`--history`, `PS_HISTORY`), and `psctl
check-history` finds out from all of them together whether the job's promises were
kept. `docs/history.md` describes the lines.

A line is written before what it says has any effect outside of the process: an
answer leaves after its line. Lines go straight to the operating system, so what a
process has written survives its SIGKILL (a machine that loses power may lose some).
"""

import json
import logging
import os
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final
from urllib.parse import quote

if sys.platform != "win32":
    import fcntl

HISTORY_VARIABLE: Final = "PS_HISTORY"
HISTORY_FORMAT: Final = 1
PROCESS_PLACEHOLDER: Final = "{process}"
SUFFIX: Final = ".jsonl"

log = logging.getLogger("pswire.history")

_open_files: "set[HistoryFile]" = set()


class HistoryPathError(ValueError):
    """A history can't be kept where it is wanted; the text says why."""


def history_path(wanted: str, process: str) -> Path:
    """The file of one process.

    Args:
        wanted: What the user gave: a file; a name with `{process}` in it; or a folder,
            which is there or ends with a slash.
        process: Name of the process, whatever characters it has.
    """
    name = quote(process, safe="")
    if PROCESS_PLACEHOLDER in wanted:
        return Path(wanted.replace(PROCESS_PLACEHOLDER, name))
    if is_for_many(wanted):
        return Path(wanted) / (name + SUFFIX)
    return Path(wanted)


def is_for_many(wanted: str) -> bool:
    """Whether several processes may be given the same wanted path."""
    return (
        PROCESS_PLACEHOLDER in wanted
        or wanted.endswith("/")
        # Unlike `Path.is_dir` it raises nothing for a name that no file can have:
        # the text that says so comes with the attempt to write it.
        or os.path.isdir(wanted)
    )


class HistoryFile:
    """One process's history. Any thread may write; a line is one system call.

    The file is appended to, so that a process that starts again goes on with it, each
    time with a first line of its own.
    """

    def __init__(
        self, wanted: str, *, process: str, job_id: str, facts: Mapping[str, object]
    ) -> None:
        """Opens the file and writes the first line.

        Args:
            wanted: See `history_path`.
            process: Name of the process in the job, such as `shard-0`.
            job_id: The job.
            facts: More for the first line.

        Raises:
            HistoryPathError: The file can't be written, or another process has it.
        """
        self.path = history_path(wanted, process)
        self._lock = threading.Lock()
        self._descriptor = _opened(self.path)
        _open_files.add(self)
        self.write(
            "begin",
            format=HISTORY_FORMAT,
            job=job_id,
            process=process,
            pid=os.getpid(),
            wall_time_s=round(time.time(), 3),
            **facts,
        )

    def write(self, kind: str, /, **values: object) -> None:
        """Writes one line.

        A disk that is full ends the history, with a word in the log, and not the
        process: the check then finds what is missing.
        """
        line = {"type": kind, "t_ms": time.monotonic_ns() // 1_000_000, **values}
        data = json.dumps(line, separators=(",", ":")).encode() + b"\n"
        with self._lock:
            if self._descriptor < 0:
                return
            try:
                written = os.write(self._descriptor, data)
                if written < len(data):
                    raise OSError(f"{written} of {len(data)} bytes were written")
            except OSError as error:
                self._end()
                log.error(
                    "the history %s ends here, training goes on: %s", self.path, error
                )

    def close(self) -> None:
        """Ends the file; later lines are nobody's."""
        with self._lock:
            self._end()

    def _end(self) -> None:
        if self._descriptor >= 0:
            _unlock(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = -1
        _open_files.discard(self)


def _opened(path: Path) -> int:
    """A descriptor that appends to a file that is this process's alone.

    Only its owner reads the file, and a folder that is made for it: it tells of workers
    and of data.
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(
            path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600
        )
    except OSError as error:
        raise HistoryPathError(
            f"no history can be written to {path}: {error.strerror}; choose another "
            "path, or a folder"
        ) from error
    try:
        _lock(descriptor)
        # The end of a process may have cut its last line short.
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            os.write(descriptor, b"\n")
    except OSError as error:
        os.close(descriptor)
        raise HistoryPathError(
            f"{path} is the history of another process: give a folder, or a name with "
            f"{PROCESS_PLACEHOLDER} in it, so that each process has a file of its own"
        ) from error
    return descriptor


def _lock(descriptor: int) -> None:
    if sys.platform != "win32":
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _unlock(descriptor: int) -> None:
    """Frees the file even while a child that was just forked still has it open."""
    if sys.platform != "win32":
        fcntl.flock(descriptor, fcntl.LOCK_UN)


def _close_in_child() -> None:
    """A forked child writes nothing, and must not keep the file locked."""
    for file in list(_open_files):
        os.close(file._descriptor)
        file._descriptor = -1
    _open_files.clear()


if sys.platform != "win32":
    os.register_at_fork(after_in_child=_close_in_child)
