"""A daemon's state folder: made when new, for its owner alone, and one process's."""

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

_HOLDER_LENGTH_MAX: Final = 200


class StateFolderError(Exception):
    """The state folder can't be used; the text says why and what to do."""


@contextmanager
def held_folder(folder: Path) -> Iterator[None]:
    """Makes a folder of state and holds it until the end.

    Raises:
        StateFolderError: Another process holds it, or it can't be made.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = _opened(folder)
    except OSError as error:
        raise StateFolderError(
            f"state folder {folder} can't be used: {error.strerror}; choose another "
            "--state-dir"
        ) from error
    with _locked(lock) as holder:
        if holder is not None:
            raise StateFolderError(
                f"state folder {folder} is in use by {holder}: if that is the job you "
                "want, it runs already; else stop it, or choose another --state-dir"
            )
        yield


@contextmanager
def held_checkpoints(url: str) -> Iterator[None]:
    """Holds a folder of checkpoints until the end; another kind of store is not held.

    Nor is it against another machine: the lock of one that is gone may stay for long,
    and a coordinator that was moved has to go on. There `owner.json` decides.

    Raises:
        StateFolderError: Another process of this machine holds it.
    """
    if not url or "://" in url:
        yield
        return
    try:
        Path(url).mkdir(parents=True, exist_ok=True)
        lock = _opened(Path(url))
    except OSError:  # which whoever writes there reports
        yield
        return
    with _locked(lock) as holder:
        if holder is not None and holder.endswith(f" on {socket.gethostname()}"):
            raise StateFolderError(
                f"{holder} makes checkpoints in {url}: if that is the job you want, it "
                "runs already; else stop it, or choose another --checkpoint-dir"
            )
        yield


def _opened(folder: Path) -> int:
    return os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


@contextmanager
def _locked(lock: int) -> Iterator[str | None]:
    """Takes the lock in a file, which is closed at the end; who has it, if another.

    The lock is the kernel's and ends with the process, however it dies.
    """
    with os.fdopen(lock, "r+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield file.read(_HOLDER_LENGTH_MAX).strip() or "another process"
            return
        file.truncate()
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        yield None
