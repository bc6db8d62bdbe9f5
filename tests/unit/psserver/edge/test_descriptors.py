"""A daemon that runs out of descriptors says so, with numbers, and not all the time."""

import gc
import logging
import os
import resource
import subprocess
import sys

import pytest

from psserver.edge.descriptors import (
    CONNECTION_COUNT_MIN,
    KEPT_COUNT,
    REPEAT_S,
    DescriptorLog,
    descriptors,
    fitted,
)
from psserver.edge.limits import DEFAULT_LIMITS


def of_connections(limit: int) -> int:
    """How many of so many descriptors connections may take."""
    return fitted(DEFAULT_LIMITS, limit).connections


@pytest.mark.parametrize(
    ("count", "limit", "level"),
    [
        (100, 1024, None),
        (767, 1024, None),
        (768, 1024, logging.WARNING),
        (1023, 1024, logging.ERROR),
        (1024, 1024, logging.ERROR),
        (7, 40, None),
        (8, 40, logging.WARNING),
        (10_000, sys.maxsize, None),
    ],
)
def test_the_line_has_both_numbers(count: int, limit: int, level: int | None) -> None:
    found = DescriptorLog(of_connections(limit)).line(count, limit, 1.0)
    if level is None:
        assert found is None
        return
    assert found is not None
    assert found[0] == level
    assert f"{count} of {limit} are in use" in found[1]
    assert "LimitNOFILE=" in found[1]


def test_it_is_said_again_when_it_is_worse_when_it_lasts_and_when_it_is_over() -> None:
    said = DescriptorLog(of_connections(100))

    def level(count: int, now: float) -> int | None:
        found = said.line(count, 100, now)
        return found and found[0]

    assert level(30, 0.0) is None
    assert level(95, 2.0) == logging.WARNING
    assert level(95, 4.0) is None
    assert level(99, 6.0) == logging.ERROR
    assert level(95, 8.0) is None
    assert level(100, 10.0) is None
    assert level(100, 6.0 + REPEAT_S) == logging.ERROR
    assert level(30, 80.0) == logging.INFO
    assert level(30, 82.0) is None
    assert level(99, 84.0) == logging.ERROR


@pytest.mark.parametrize(
    ("limit", "most"),
    [
        (30, CONNECTION_COUNT_MIN),
        (KEPT_COUNT, CONNECTION_COUNT_MIN),
        (KEPT_COUNT + 20, 20),
        (256, 192),
        (1024, 768),
        (20_000, 15_000),
        (sys.maxsize, DEFAULT_LIMITS.connections),
    ],
)
def test_connections_get_a_part_of_the_descriptors(limit: int, most: int) -> None:
    assert of_connections(limit) == most


def test_descriptors_are_counted() -> None:
    gc.collect()  # files that other tests have left
    count, limit = descriptors()
    assert limit == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(5)]
    assert descriptors()[0] == count + 5
    for each in held:
        os.close(each)


def test_with_none_left_for_the_look_all_are_in_use() -> None:
    script = """
import os, resource
from psserver.edge.descriptors import descriptors
resource.setrlimit(resource.RLIMIT_NOFILE, (30, 30))
try:
    while True:
        os.open(os.devnull, os.O_RDONLY)
except OSError:
    print(descriptors())
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout == "(30, 30)\n"
