"""The rest of a data-parallel group when the process that speaks for it is killed."""

import time
from pathlib import Path
from typing import Final

import pytest

from tests.doubles.children import Nursery
from tests.integration.group_pair import start_pair
from tests.integration.job import Job
from tests.integration.processes import Processes

END_S: Final = 50.0
"""Longest time that a follower goes on for; its own time-outs are longer."""


@pytest.mark.parametrize(
    "failpoint",
    [
        *("worker.joined=kill", "worker.step=kill@3"),
        pytest.param("worker.in_barrier=kill@2", marks=pytest.mark.repeat),
    ],
)
def test_a_follower_ends_with_an_error_that_names_the_leader(
    tmp_path: Path, nursery: Nursery, failpoint: str
) -> None:
    with (
        Job(tmp_path / "job", shard_count=2, sockets=True) as job,
        Processes(tmp_path, nursery) as processes,
    ):
        start_pair(processes, "lose", tmp_path, job, PS_FAILPOINT=failpoint)
        for rank in range(2):
            assert processes.line(f"rank-{rank}") == "connected"
        assert processes.code("rank-0") == -9
        killed_s = time.monotonic()
        assert processes.code("rank-1", END_S) == 1
        print(f"{failpoint}: ended {time.monotonic() - killed_s:.1f} s later")
        assert (
            "psworker.errors.UnavailableError: rank 0 of this process group, which "
            "speaks to the job for all of it, did not answer: it or another process of "
            "the group has ended or is silent"
        ) in processes.log("rank-1")
