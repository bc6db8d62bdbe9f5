"""Where a command writes: its results, and a folder for everything else."""

import errno
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from psctl.failures import CommandError
from pswire.exit_codes import ExitCode
from pswire.names import printable
from psworker.snapshots.snapshot_path import refusal_text

_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def writing(out: Path) -> Iterator[None]:
    """Says of a place that takes nothing why, and what to do."""
    try:
        yield
    except OSError as error:
        cure = "name a place where this user can write files"
        if error.errno in _FULL:
            cure = "free some space, or name a place on another disk"
        raise CommandError(
            f"{printable(str(out))} can't be written: {error.strerror or error}; {cure}"
        ) from error


def made_folder(out: Path) -> Path:
    """A folder that the user has named, made if it is not there; absolute."""
    folder = placed(out)
    if folder.exists() and not folder.is_dir():
        raise CommandError(f"{folder} is a file; name a folder", ExitCode.USAGE)
    with writing(out):
        folder.mkdir(exist_ok=True)
    return folder


def new_folder(out: Path) -> Path:
    """A folder that the user has named and that is not there yet; absolute."""
    folder = placed_whole(out)
    if folder.exists():
        raise CommandError(
            f"{printable(str(out))} is there already: name a new folder",
            ExitCode.USAGE,
        )
    return folder


def writable_file(out: Path) -> Path:
    """Where a snapshot can be written, as the user has named it; absolute."""
    if text := refusal_text(out):
        raise CommandError(text, ExitCode.USAGE)
    if out.is_dir():
        raise CommandError(f"{out} is a folder; name a file in it", ExitCode.USAGE)
    return placed_whole(out)


def placed(out: Path) -> Path:
    path = out.absolute()
    if not path.parent.is_dir():
        raise CommandError(
            f"there is no folder {path.parent}; create it", ExitCode.USAGE
        )
    return path


def placed_whole(out: Path) -> Path:
    """Where something can appear whole that takes long to make; absolute."""
    path = placed(out)
    # A file beside it, which is gone at once: rights alone do not tell.
    with writing(out), tempfile.TemporaryFile(dir=path.parent):
        return path


def write_private(path: Path, content: bytes) -> None:
    """Writes a file whole or not at all, over one that is there, for its owner alone.

    A link is followed, so that it stays one.
    """
    path = path.resolve()
    with (
        writing(path),
        tempfile.NamedTemporaryFile(dir=path.parent, prefix=".", delete=False) as file,
    ):
        try:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
            os.rename(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise


@contextmanager
def scratch_folder(prefix: str) -> Iterator[Path]:
    """A temporary folder, also for torch's caches, which would stay in /tmp."""
    with tempfile.TemporaryDirectory(prefix=prefix) as name:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.path.join(name, "torchinductor")
        yield Path(name)
