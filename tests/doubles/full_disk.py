"""A disk without room, for files of this process, by the kernel's own limit."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def file_size_limit(byte_count: int) -> Iterator[None]:
    """No file of this process can grow beyond a size within: EFBIG by the kernel."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (byte_count, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextmanager
def full_disk() -> Iterator[None]:
    """No byte can be written to any file within."""
    with file_size_limit(0):
        yield
