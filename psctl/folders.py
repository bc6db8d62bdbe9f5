"""Folders of a command: that of its results, and one for all that it writes besides."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from psctl.failures import CommandError
from pswire.exit_codes import ExitCode


def made_folder(out: Path) -> Path:
    """A folder that the user has named, made if it is not there; absolute.

    Raises:
        CommandError: There is no place for it, or it is a file.
    """
    folder = out.absolute()
    if not folder.parent.is_dir():
        raise CommandError(
            f"there is no folder {folder.parent}; create it", ExitCode.USAGE
        )
    try:
        folder.mkdir(exist_ok=True)
    except FileExistsError:
        raise CommandError(
            f"{folder} is a file; name a folder", ExitCode.USAGE
        ) from None
    return folder


@contextmanager
def scratch_folder(prefix: str) -> Iterator[Path]:
    """Makes the folder; with it go torch's caches, which would stay in /tmp."""
    with tempfile.TemporaryDirectory(prefix=prefix) as name:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.path.join(name, "torchinductor")
        yield Path(name)
