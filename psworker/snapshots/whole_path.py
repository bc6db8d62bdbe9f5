"""A file or a folder that appears whole, or not at all."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Yields where to write; what is there in the end is moved to the path.

    It is made durable first. A file at the path is replaced, a folder only if it is
    empty. On an error nothing is left.
    """
    # Beside the target, since a rename is atomic within one file system only.
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        yield partial
        # A folder last, after what is in it.
        for written in (*partial.rglob("*"), partial):
            _sync(written)
        partial.replace(path)
        _sync(path.absolute().parent)
    finally:
        if partial.is_dir():
            shutil.rmtree(partial)
        else:
            partial.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
