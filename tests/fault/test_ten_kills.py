"""Ten kills in one run, one after the other: shards, workers and the coordinator.

More seeds: `PS_KILL_SEEDS=20 pytest -m repeat tests/fault/test_ten_kills.py`.
"""

import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from tests.doubles.children import Nursery
from tests.fault.test_killed_whole_jobs import WORKERS, WholeJob

EPOCHS: Final = 8
SEEDS: Final = range(int(os.environ.get("PS_KILL_SEEDS", "2")))

KILLS: Final = (
    *(2 * ("shard-0", "shard-1")),
    *(2 * ("coordinator",)),
    *(2 * ("w0", "w1")),
)
"""At least; two more are drawn."""

UNDISTURBED: Final[list[list[dict[str, Any]]]] = []


def job_of(nursery: Nursery, folder: Path) -> WholeJob:
    return WholeJob(
        nursery, folder, "--on-worker-loss=wait", every_steps=6, epochs=EPOCHS
    )


@pytest.fixture
def expected(nursery: Nursery, tmp_path: Path) -> list[dict[str, Any]]:
    if not UNDISTURBED:
        with job_of(nursery, tmp_path / "undisturbed") as job:
            job.start()
            UNDISTURBED.append(job.ends())
    return UNDISTURBED[0]


def drawn_kills(seed: int) -> Iterator[tuple[str, int]]:
    """Who is killed, and how many steps after the one before; 0 for at once."""
    draws = random.Random(seed)
    kills = [*KILLS, *draws.choices(KILLS, k=2)]
    draws.shuffle(kills)
    for name in kills:
        yield name, draws.choice((0, 1, 1, 2, 3))


def step_count(job: WholeJob) -> int:
    """Steps of all workers, also of those that were killed."""
    killed = [child for name, child in job.killed if name in WORKERS]
    return sum(len(each.events("step")) for each in killed) + len(job.steps(-1))


@pytest.mark.repeat
@pytest.mark.parametrize("seed", SEEDS)
def test_a_job_ends_as_if_nothing_had_happened(
    seed: int, nursery: Nursery, tmp_path: Path, expected: list[dict[str, Any]]
) -> None:
    with job_of(nursery, tmp_path / "killed") as job:
        job.start()
        job.wait_checkpoint()
        for number, (name, pause) in enumerate(drawn_kills(seed)):
            until = step_count(job) + len(WORKERS) * pause
            job.wait(lambda until=until: step_count(job) >= until, f"step {until}")
            job.replace(name, f"-{number}")
        assert job.ends() == expected
        logs = [each.log for _, each in (*job.killed, *job.lives[-1].items())]
    told = [
        line.partition("epoch ")[2]
        for log in logs
        for line in log.splitlines()
        if "of 'loader' is over" in line
    ]
    assert [each for each in told if "of 48 positions 48 seen once" not in each] == []
    assert {int(each.split()[0]) for each in told} == set(range(EPOCHS))
