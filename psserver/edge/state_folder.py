"""A daemon's state folder: made when new, for its owner alone, and one process's."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class StateFolderError(Exception):
    """The state folder can't be used; the text says why and what to do."""


@contextmanager
def held_folder(folder: Path) -> Iterator[None]:
    """Makes a folder and holds it until the end.

    The lock is the kernel's and ends with the process, however it dies.

    Raises:
        StateFolderError: Another process holds it, or it can't be made.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise StateFolderError(
            f"state folder {folder} can't be used: {error.strerror}; choose another "
            "--state-dir"
        ) from error
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise StateFolderError(
                f"state folder {folder} is in use by another daemon; stop it, or "
                "choose another --state-dir"
            ) from error
        yield
    finally:
        os.close(lock)
