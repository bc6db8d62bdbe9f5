"""A folder for all that a command writes besides its result, gone at its end."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def scratch_folder(prefix: str) -> Iterator[Path]:
    """Makes the folder; with it go torch's caches, which would stay in /tmp."""
    with tempfile.TemporaryDirectory(prefix=prefix) as name:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.path.join(name, "torchinductor")
        yield Path(name)
