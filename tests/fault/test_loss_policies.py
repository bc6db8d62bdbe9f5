"""Losses below the floor, replacements, and jobs that change while they suffer."""

import signal
from collections.abc import Callable

import pytest

from pswire.status_document import Document
from psworker import SnapshotReader
from tests.fault.conftest import MakeJob
from tests.fault.fault_job import FaultJob, members_of
from tests.fault.test_killed_workers import MODES
from tests.fault.test_stopped_processes import wait_rejoined
from tests.fault.times import seconds_to_next_clock


def waits_for(name: str) -> Callable[[Document], bool]:
    return lambda status: name in (status["waiting_for"] or "")


def assert_stands_still(job: FaultJob, name: str, why: str) -> None:
    """The job waits for somebody, says so, and closes no clock meanwhile."""
    job.wait_status(waits_for(why), f"the status to name {why}")
    count = len(job.workers[name].events("step"))
    status = job.wait_status(
        lambda status: any(w["state"] == "lost" for w in status["workers"]),
        "a lost worker",
    )
    assert why in {w["worker_id"] for w in status["workers"] if w["state"] == "lost"}
    # One that was answered and not told yet, and one whose clock the lost one was in.
    assert len(job.workers[name].events("step")) <= count + 2


@pytest.mark.parametrize("mode", ["bsp", pytest.param("ssp", marks=pytest.mark.repeat)])
def test_survivors_below_the_floor_wait_and_a_newcomer_frees_them(
    mode: str, make_job: MakeJob
) -> None:
    """Source: horovod#3494, where the old ones and the new one wait for each other."""
    with make_job(*MODES[mode], "--min-workers=2") as job:
        job.start_workers("w0", "w1")
        job.wait_members("w0", "w1")
        job.wait_steps("w0", 3)
        job.kill_worker("w1")
        assert_stands_still(job, "w0", "w1")
        job.start_worker("w2")
        job.wait_members("w0", "w2")
        job.wait_gone("w1")
        job.wait_steps("w0", 3)
        job.wait_steps("w2", 3)
        job.kill_worker("w0")
        assert_stands_still(job, "w2", "w0")
        job.start_worker("w3")
        job.wait_gone("w0")
        job.wait_steps("w2", 3)


@pytest.mark.parametrize(
    "point",
    ["worker.chunk_sent=kill@35", "worker.in_barrier=kill@5", "worker.staged=kill@5"],
)
def test_a_replacement_takes_over_the_open_clock(point: str, make_job: MakeJob) -> None:
    with make_job("--mode=bsp", "--on-worker-loss=wait", "--min-workers=3") as job:
        job.start_workers("w0", "w1", "w2", w1=point)
        killed = job.expect_killed("w1")
        if "staged" not in point:  # there the others may still finish the clock
            assert_stands_still(job, "w0", "w1")
        job.start_worker("w1-again", worker_id="w1")
        job.wait_steps("w1-again", 3)
        job.wait_steps("w0", 3)
        status = job.status()
        assert members_of(status).keys() == {"w0", "w1", "w2"}
        assert killed.code == -signal.SIGKILL


def test_with_wait_one_that_stood_still_comes_back_to_its_place(
    make_job: MakeJob,
) -> None:
    with make_job("--mode=bsp", "--on-worker-loss=wait", "--min-workers=2") as job:
        job.start_workers("w0", "w1", w1="worker.in_barrier=stop@10")
        job.expect_stopped("w1")
        assert_stands_still(job, "w0", "w1")
        job.workers["w1"].send(signal.SIGCONT)
        job.wait_steps("w1", 5)
        job.wait_steps("w0", 5)
        assert job.status()["evicted_count"] == 0


def test_all_die_at_once_and_others_take_over(make_job: MakeJob) -> None:
    with make_job("--mode=bsp") as job:
        names = ("w0", "w1", "w2")
        job.start_workers(*names)
        job.wait_members(*names)
        job.wait_steps("w0", 3)
        for name in names:
            job.workers[name].send(signal.SIGKILL)
        for name in names:
            job.expect_killed(name)
        job.start_workers("w3", "w4")
        job.wait_members("w3", "w4")
        job.wait_gone(*names)
        job.wait_steps("w3", 5)


def test_backup_workers_are_done_without(make_job: MakeJob) -> None:
    with make_job("--mode=bsp", "--backup-workers=1") as job:
        job.start_workers("w0", "w1", "w2", w2="worker.in_barrier=stop@20")
        job.start_worker("w3", failpoint="worker.staged=kill@30")
        job.expect_stopped("w2")
        job.wait_steps("w0", 3)  # at once: nobody needs the one that stands still
        job.expect_killed("w3")
        job.wait_gone("w2", "w3")
        job.wait_steps("w0", 3)
        job.workers["w2"].send(signal.SIGCONT)
        wait_rejoined(job, "w2")
        job.wait_steps("w2", 3)


def test_the_mode_changes_while_workers_and_the_coordinator_die(
    make_job: MakeJob,
) -> None:
    with make_job("--mode=asp") as job:
        job.start_workers("w0", "w1", "w2", "w3")
        job.start_worker("slow", step_s=0.1)
        job.wait_members("w0", "w1", "w2", "w3", "slow")
        job.wait_steps("slow", 3)  # by now clocks are far apart
        job.set_mode("bsp")
        job.wait_steps("w0", 3)
        job.kill_worker("w1")
        job.set_mode("ssp", 1)
        job.wait_gone("w1")
        job.wait_steps("w0", 3)
        job.coordinator.send(signal.SIGKILL)
        job.expect_coordinator_killed()
        job.start_coordinator()
        job.wait_status(lambda status: status["mode"] == "ssp", "the job to go on")
        job.set_mode("asp")
        job.wait_steps("w0", 3)
        killed = job.kill_worker("w2")
        job.set_mode("bsp")
        job.wait_gone("w2")
        job.wait_steps("w0", 3)
        assert killed.code == -signal.SIGKILL


@pytest.mark.parametrize(
    "mode", ["bsp", "asp", pytest.param("ssp", marks=pytest.mark.repeat)]
)
def test_churn_while_snapshots_are_cut(mode: str, make_job: MakeJob) -> None:
    """Joins, kills and cuts at once, each in the fence of another."""
    with make_job(*MODES[mode]) as job:
        job.start_workers("w0", "w1")
        job.wait_members("w0", "w1")
        version = -1
        with SnapshotReader(str(job.address)) as reader:
            for number in range(2, 6):
                job.start_worker(f"w{number}")
                version = reader.wait_newer(max(version, 0), timeout=20).version
                killed = job.kill_worker(f"w{number - 1}")
                version = reader.wait_newer(version, timeout=20).version
                job.wait_members(f"w{number}")
                job.wait_steps(f"w{number}", 2)
                if mode == "bsp":
                    job.tally.kill_s.append(
                        seconds_to_next_clock(
                            job.history, f"w{number - 1}", killed.ended_at_s
                        )
                    )
