"""Readers of bytes from outside take or refuse the corpus, and what is drawn of it.

An hour of this, guided by coverage, is `make fuzz`, which `make soak` runs too.
"""

import random
import resource
import sys
import tracemalloc
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.doubles.garbled_messages import CHANGE_KINDS, mutated
from tests.fuzz.target import check
from tests.fuzz.targets import TARGETS, load

CORPUS: Final = Path(__file__).with_name("corpus")
DRAWN_COUNT: Final = 150
"""Changed inputs of each target, the same in each run. Time does not decide."""

MEMORY_MAX: Final = 1 << 30
"""Of the address space, beside what is mapped: torch counts nothing by itself."""

INTERESTING: Final = (
    *(b"\0", b"\xff", b"\x80" * 10 + b"\1", b"\xff" * 8, b"\x7f" + b"\xff" * 7),
    *(b"9" * 5000, b"-1", b"1e999", b"NaN", b"null", b"[]", b"{}", b"[" * 3000),
    *(b'"\\ud800"', b"\xed\xa0\x80", b'{"":' * 1500, b"true", b'""', b"1" + b"0" * 19),
)
"""Beginnings, ends and depths of numbers and texts."""


@pytest.fixture(scope="module", autouse=True)
def bounded() -> Iterator[None]:
    """Memory is counted, and one that is far too much can't be had."""
    load()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    mapped = pages * resource.getpagesize()
    tracemalloc.start()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + MEMORY_MAX, hard))
    yield
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    tracemalloc.stop()


def inputs_of(name: str) -> list[bytes]:
    return [file.read_bytes() for file in sorted((CORPUS / name).iterdir())]


@pytest.mark.parametrize("name", TARGETS)
def test_the_corpus_is_taken_or_refused(name: str) -> None:
    for file in sorted((CORPUS / name).iterdir()):
        try:
            check(TARGETS[name], file.read_bytes())
        except BaseException:
            print(f"the input is {file}", file=sys.stderr)
            raise


@pytest.mark.parametrize("name", TARGETS)
def test_some_real_input_is_taken(name: str) -> None:
    """Else nothing of what follows would look further than the first check."""
    target, count = TARGETS[name], 0
    for file in (CORPUS / name).glob("seed-*"):
        try:
            target.take(file.read_bytes())
        except target.refusals:
            continue
        count += 1
    assert count


@pytest.mark.parametrize("name", TARGETS)
def test_what_is_drawn_is_taken_or_refused(name: str) -> None:
    draw = random.Random(zlib.crc32(name.encode()))
    inputs = inputs_of(name)
    for _ in range(DRAWN_COUNT):
        data = drawn(draw, inputs)
        try:
            check(TARGETS[name], data)
        except BaseException:
            print(f"the input is {data!r}", file=sys.stderr)
            raise


def drawn(draw: random.Random, inputs: list[bytes]) -> bytes:
    """An input that is changed in up to four places, by a count or by other bytes."""
    data = draw.choice(inputs)
    for _ in range(draw.randint(1, 4)):
        noise = draw.choice(
            (draw.randbytes(draw.randint(1, 8)), draw.choice(INTERESTING))
        )
        other = draw.choice(inputs)
        if draw.random() < 0.2 and other:
            start = draw.randrange(len(other))
            noise = other[start : start + draw.randint(1, 64)]
        change = (draw.choice(CHANGE_KINDS), draw.randint(0, 256))
        data = mutated(data, [(*change, draw.randint(0, 5), noise)])[: 1 << 16]
    return data
