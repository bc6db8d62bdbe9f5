"""Processes that stand still, shorter and longer than their lease."""

import signal
import time
from typing import Final

import pytest

from tests.doubles.children import Child, wait_until
from tests.fault.conftest import MakeJob
from tests.fault.fault_job import FaultJob, members_of
from tests.fault.test_killed_workers import MODES
from tests.fault.times import seconds_to_next_clock

LONGER_LEASE_S: Final = 5.0
"""For whoever must keep its place: a coordinator gives up who is silent for a third of
a lease, and for that of a shorter one a busy machine may give a process no time."""

SHORT_S: Final = 0.5
"""A third of a ping's time-out, so that it is still short of it and of the grace to
reconnect if all machines of the job stand still as well, for less than that time-out:
of more the coordinator knows."""


def wait_rejoined(job: FaultJob, name: str) -> None:
    """Returns once a worker that was evicted has found its way back."""
    worker = job.workers[name]
    wait_until(
        lambda: any(step["rejoined"] for step in worker.events("step")),
        f"{name} to join again",
    )
    job.wait_members(name)


@pytest.mark.parametrize(
    "mode",
    [
        *("bsp", "asp"),
        pytest.param("ssp", marks=pytest.mark.repeat),
        pytest.param("bsp two-phase", marks=pytest.mark.repeat),
    ],
)
def test_workers_that_stand_still_at_any_moment_of_a_step(
    mode: str, make_job: MakeJob
) -> None:
    """They are taken out, and come back by themselves; what they still had under way
    comes late, from an incarnation that is over."""
    points = {
        "w1": "worker.chunk_sent=stop@35",
        "w2": "worker.in_barrier=stop@20",
        "w3": "worker.step=stop@25",
    }
    with make_job(*MODES[mode]) as job:
        job.start_workers("w0", *points, **points)
        for name in points:
            stopped_at_s = job.expect_stopped(name).stopped_at_s
            assert stopped_at_s is not None
        job.wait_gone(*points)
        job.wait_steps("w0", 3)
        if mode.startswith("bsp"):
            for name in points:
                since_s = job.workers[name].stopped_at_s
                assert since_s is not None
                job.tally.stop_s.append(
                    seconds_to_next_clock(job.history, name, since_s)
                )
        for name in points:
            job.workers[name].send(signal.SIGCONT)
            wait_rejoined(job, name)
            job.fault("push of an evicted start")
            job.wait_steps(name, 3)


def test_whoever_stands_still_shorter_than_the_lease_keeps_its_place(
    make_job: MakeJob,
) -> None:
    with make_job("--mode=bsp", lease_s=LONGER_LEASE_S) as job:
        job.start_workers("w0", "w1")
        job.wait_members("w0", "w1")
        for child in (job.workers["w1"], job.coordinator, *job.shards):
            job.wait_steps("w0", 3)
            child.send(signal.SIGSTOP)
            child.wait_stopped()
            time.sleep(SHORT_S)  # as long as it stands still: there is nothing to see
            child.send(signal.SIGCONT)
            job.fault("SIGSTOP for a tenth of the lease")
            job.wait_steps("w0", 3)
        status = job.status()
        assert status["evicted_count"] == 0
        assert {worker["incarnation"] for worker in status["workers"]} == {1}


# One that is killed stays away in BSP; see `test_killed_coordinators.py`.
@pytest.mark.parametrize("mode", ["asp", pytest.param("bsp", marks=pytest.mark.repeat)])
def test_a_coordinator_that_stands_still_holds_the_job_and_costs_nobody_its_place(
    mode: str, make_job: MakeJob
) -> None:
    with make_job(*MODES[mode], lease_s=LONGER_LEASE_S) as job:
        job.start_workers("w0", "w1")
        job.wait_members("w0", "w1")
        job.wait_steps("w0", 3)
        job.coordinator.send(signal.SIGSTOP)
        job.coordinator.wait_stopped()
        wait_until(
            lambda: all("silent for a lease" in shard.log for shard in job.shards),
            "the shards to hold",
        )
        wait_until(
            lambda: "which has been silent" in job.workers["w0"].log,
            "w0 to be told why its step is held",
        )
        job.coordinator.send(signal.SIGCONT)
        job.fault("SIGSTOP of the coordinator")
        job.wait_steps("w0", 10)
        job.wait_members("w0", "w1")
        assert job.status()["evicted_count"] == 0


def wait_any_stopped(children: list[Child]) -> Child:
    def stopped() -> list[Child]:
        return [child for child in children if child.stopped_at_s is not None]

    wait_until(lambda: bool(stopped()), "one of them to stand still")
    return stopped()[0]


@pytest.mark.parametrize(
    ("mode", "point"),
    [("bsp", "push_received"), ("ssp", "chunk_applied"), ("asp", "before_reply")],
)
def test_a_shard_that_stands_still_inside_a_push(
    mode: str, point: str, make_job: MakeJob
) -> None:
    failpoint = f"shard.{point}=stop@50"
    with make_job(
        *MODES[mode], shard_failpoint=failpoint, lease_s=LONGER_LEASE_S
    ) as job:
        job.start_workers("w0", "w1")
        waiting = list(job.shards)
        while waiting:  # one that stands still may keep the other from its place
            stopped = wait_any_stopped(waiting)
            time.sleep(SHORT_S)  # as long as it stands still: there is nothing to see
            stopped.send(signal.SIGCONT)
            job.fault("SIGSTOP of a shard")
            waiting.remove(stopped)
        job.wait_steps("w0", 5)
        job.wait_steps("w1", 5)
        assert job.status()["evicted_count"] == 0


@pytest.mark.parametrize("point", ["record_announced", "fence_prepared"])
def test_a_joiner_that_stands_still_joins_again(point: str, make_job: MakeJob) -> None:
    """It is lost before it is in, be it a member already or not, and its `prepare`
    returns all the same."""
    delay = f"coordinator.{point}=delay(300)@2"
    with make_job(
        "--mode=bsp", coordinator_failpoint=delay, lease_s=LONGER_LEASE_S
    ) as job:
        job.start_worker("w0")
        job.wait_steps("w0", 3)
        joiner = job.start_worker("w1")
        job.wait_status(
            lambda status: any(w["worker_id"] == "w1" for w in status["workers"]),
            "the joiner to be known",
        )
        joiner.send(signal.SIGSTOP)
        joiner.wait_stopped()
        job.fault("SIGSTOP of a joiner")
        job.wait_status(
            lambda status: not any(w["worker_id"] == "w1" for w in status["workers"]),
            "the joiner to be given up",
        )
        joiner.send(signal.SIGCONT)
        job.wait_steps("w1", 3)
        # Its log says so only where it had begun to join before it was stopped.
        assert members_of(job.status())["w1"]["incarnation"] == 2
        job.wait_steps("w0", 3)
