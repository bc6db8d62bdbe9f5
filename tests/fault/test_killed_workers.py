"""Workers that die at every moment of a step, in every mode."""

from pathlib import Path

import pytest

from tests.fault.conftest import MakeJob
from tests.fault.times import seconds_to_next_clock

MODES = {
    "bsp": ("--mode=bsp",),
    "ssp": ("--mode=ssp", "--staleness=2"),
    "asp": ("--mode=asp",),
    "bsp two-phase": ("--mode=bsp", "--step-atomicity=clock"),
    "ssp two-phase": ("--mode=ssp", "--staleness=2", "--step-atomicity=clock"),
}


@pytest.mark.parametrize(
    "mode",
    [
        *("bsp", "asp", "bsp two-phase"),
        pytest.param("ssp", marks=pytest.mark.repeat),
        pytest.param("ssp two-phase", marks=pytest.mark.repeat),
    ],
)
def test_workers_that_die_at_any_moment_of_a_step(mode: str, make_job: MakeJob) -> None:
    points = {
        "w1": "worker.chunk_sent=kill@35",
        "w2": "worker.in_barrier=kill@30",
        "w3": "worker.push_answered=kill@91",
        "w4": "worker.step=kill@60",
    }
    if "two-phase" in mode:
        points["w4"] = "worker.staged=kill@60"
    with make_job(*MODES[mode]) as job:
        job.start_workers("w0", *points, **points)
        for name in points:
            killed = job.expect_killed(name)
            job.wait_gone(name)
            job.wait_steps("w0", 3)
            if mode.startswith("bsp"):
                job.tally.kill_s.append(
                    seconds_to_next_clock(job.history, name, killed.ended_at_s)
                )


def test_a_worker_killed_from_outside_and_its_replacement(
    make_job: MakeJob, tmp_path: Path
) -> None:
    with make_job("--mode=bsp") as job:
        job.start_workers("w0", "w1")
        for turn in range(3):
            name = "w1" if not turn else f"w1-{turn}"
            job.wait_members("w1")
            job.wait_steps("w0", 5)
            killed = job.kill_worker(name)
            job.start_worker(f"w1-{turn + 1}", worker_id="w1")
            job.wait_steps("w0", 3)
            job.tally.kill_s.append(
                seconds_to_next_clock(job.history, "w1", killed.ended_at_s)
            )
        job.wait_members("w1")
        job.wait_steps("w1-3", 3)
