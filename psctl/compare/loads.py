"""What disturbs the workers: how much longer than undisturbed each step takes.

Worker processes and the arithmetic draw the same numbers from the same seed.
"""

import random
from collections.abc import Iterator
from enum import StrEnum
from itertools import repeat
from typing import Final

HICCUP_PROBABILITY: Final = 0.1
HICCUP_FACTOR: Final = 5.0
STRAGGLER_FACTOR: Final = 3.0


class Load(StrEnum):
    """A kind of disturbance."""

    EVEN = "even"
    HICCUPS = "hiccups"
    STRAGGLER = "straggler"

    @property
    def description(self) -> str:
        return _DESCRIPTIONS[self]


_DESCRIPTIONS: Final = {
    Load.EVEN: "no step is disturbed",
    Load.HICCUPS: f"each step takes {HICCUP_FACTOR:g} times as long with probability "
    f"{HICCUP_PROBABILITY:g}",
    Load.STRAGGLER: f"one worker is always {STRAGGLER_FACTOR:g} times slower",
}


def parse_loads(text: str) -> tuple[Load, ...]:
    """Reads names that are separated by commas; ValueError where one is no load."""
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in list(Load):
            raise ValueError(f"{name!r} is no load; there are {', '.join(Load)}")
    if len(set(names)) < len(names):
        raise ValueError(f"{text!r} names a load twice")
    return tuple(map(Load, names))


def step_factors(
    load: Load, *, worker_index: int, worker_count: int, seed: int
) -> Iterator[float]:
    """How many times as long as undisturbed each step of a worker takes, for ever."""
    drawn = random.Random(f"{seed}/{worker_index}")
    if load is Load.HICCUPS:
        while True:
            is_hiccup = drawn.random() < HICCUP_PROBABILITY
            yield HICCUP_FACTOR if is_hiccup else 1.0
    is_slow = load is Load.STRAGGLER and worker_index == worker_count - 1
    yield from repeat(STRAGGLER_FACTOR if is_slow else 1.0)
