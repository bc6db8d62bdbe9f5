"""What every reader of bytes from outside is held to.

An input is taken, and what was taken is written and read again the same; or it is
refused by an error that the reader declares. Nothing else may be raised, and neither
time nor memory may grow faster than the input.
"""

import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

SECONDS_MAX: Final = 5.0
"""Of this thread's processor, for one input of at most `INPUT_BYTES_MAX`."""

INPUT_BYTES_MAX: Final = 1 << 16

_BASE_BYTES: Final = 4 << 20
_FACTOR: Final = 1024
"""Memory that Python and numpy may take at once for each byte of an input. JSON makes
an object of some 200 bytes of three, and readers keep a second form of it."""

_TEXT_LENGTH_MAX: Final = 4096


@dataclass(frozen=True, slots=True)
class Target:
    """A reader of bytes from outside.

    Attributes:
        name: The folder of its corpus.
        take: Reads an input, and checks what was taken.
        refusals: What it may raise.
    """

    name: str
    take: Callable[[bytes], None]
    refusals: tuple[type[Exception], ...]


@contextmanager
def taken() -> Iterator[None]:
    """From here on nothing may be refused: the input was taken."""
    try:
        yield
    except Exception as error:
        raise AssertionError(f"taken, and then {error!r:.500}") from error


def same(first: object, second: object) -> bool:
    """Whether two values are equal; what is no number equals itself here."""
    if repr(first) == repr(second):
        return True
    try:
        return bool(first == second)
    except RuntimeError:  # tensors are not equal or other, but each element is
        return False


def check(target: Target, data: bytes) -> None:
    """Has a target read an input.

    Raises:
        AssertionError: It took too long, too much memory, or what it took is not read
            again the same.
        Exception: Whatever the target raises that it does not declare.
    """
    before, _ = tracemalloc.get_traced_memory()
    tracemalloc.reset_peak()
    start = time.thread_time()
    try:
        target.take(data)
    except target.refusals as error:
        text = str(error)
        text.encode()  # or no log takes it
        assert len(text) <= _TEXT_LENGTH_MAX, f"a text of {len(text)} characters"
    seconds = time.thread_time() - start
    assert seconds <= SECONDS_MAX, f"{seconds:.1f} s for {len(data)} bytes"
    _, peak = tracemalloc.get_traced_memory()
    byte_count = peak - before
    assert byte_count <= _BASE_BYTES + _FACTOR * len(data), (
        f"{byte_count} bytes of memory for {len(data)}"
    )
