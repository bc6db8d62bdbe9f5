"""A process of a test: gone when the test is, however that ends."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def killed_at_end(process: subprocess.Popen[str]) -> Iterator[subprocess.Popen[str]]:
    """As `with process`, which waits: one that hangs would hang its test, too."""
    with process:
        try:
            yield process
        finally:
            process.kill()
