"""A coordinator that dies at each of its decisions, while training goes on."""

import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from psworker import SnapshotReader
from psworker.errors import PsError
from tests.doubles.children import wait_until
from tests.fault.conftest import MakeJob
from tests.fault.fault_job import PATIENT_S, FaultJob, members_of
from tests.fault.test_killed_workers import MODES


def revive(job: FaultJob, failpoint: str = "") -> None:
    """Waits for the death of the coordinator and starts it again."""
    job.expect_coordinator_killed()
    job.start_coordinator(failpoint)
    job.wait_status(lambda status: status["phase"] == "running", "the job to go on")


def end_at_write(job: FaultJob) -> None:
    """Waits for the death of the coordinator, or kills it if all is written.

    What comes together is written together, so that there may be fewer writes.
    """

    def has_ended_or_written_all() -> bool:
        if job.coordinator.code is not None:
            return True
        try:
            members = members_of(job.status())
        except PsError:
            return False
        return len(members) == 2

    wait_until(has_ended_or_written_all, "a write of the coordinator")
    if job.coordinator.code is None:
        job.coordinator.send(signal.SIGKILL)
    job.expect_coordinator_killed()


@pytest.mark.parametrize(
    "mode", ["bsp", "asp", pytest.param("ssp", marks=pytest.mark.repeat)]
)
def test_a_coordinator_that_dies_at_each_moment_of_a_fence(
    mode: str, make_job: MakeJob
) -> None:
    """Each death is in the fence that a joiner asks for."""
    points = ("fence_prepared", "record_persisted", "record_announced")
    with make_job(*MODES[mode], lease_s=PATIENT_S) as job:
        job.start_workers("w0")
        job.wait_members("w0")
        job.wait_steps("w0", 3)
        for number, point in enumerate(points, 1):
            # One that is not in the way of a fence yet: a restart with the failpoint.
            job.coordinator.send(signal.SIGKILL)
            revive(job, f"coordinator.{point}=kill")
            job.start_worker(f"w{number}")
            revive(job)
            job.wait_members(f"w{number}")
            job.wait_steps("w0", 3)
            job.wait_steps(f"w{number}", 3)
        assert job.status()["evicted_count"] == 0


@pytest.mark.parametrize("mode", ["bsp", "asp"])
def test_a_coordinator_that_dies_in_a_cut(mode: str, make_job: MakeJob) -> None:
    with make_job(*MODES[mode], lease_s=PATIENT_S) as job:
        job.start_workers("w0", "w1")
        job.wait_members("w0", "w1")
        with (
            SnapshotReader(str(job.address)) as reader,
            ThreadPoolExecutor(1) as threads,
        ):
            before = reader.latest(timeout=20).version
            for point in ("cut_decided", "fence_prepared"):
                job.coordinator.send(signal.SIGKILL)
                revive(job, f"coordinator.{point}=kill")
                cut = threads.submit(reader.wait_newer, before, 30)
                revive(job)
                before = cut.result(20).version
                job.wait_steps("w0", 3)


# At the other moments it dies in the fence of a joiner; see above.
@pytest.mark.parametrize(
    "point",
    [
        "record_persisted",
        pytest.param("fence_prepared", marks=pytest.mark.repeat),
        pytest.param("record_announced", marks=pytest.mark.repeat),
    ],
)
def test_a_coordinator_that_dies_while_it_takes_a_lost_worker_out(
    point: str, make_job: MakeJob
) -> None:
    with make_job("--mode=bsp", lease_s=PATIENT_S) as job:
        job.start_workers("w0", "w1")
        job.wait_members("w0", "w1")
        job.coordinator.send(signal.SIGKILL)
        revive(job, f"coordinator.{point}=kill")
        job.kill_worker("w1")
        revive(job)
        job.wait_gone("w1")
        job.wait_steps("w0", 3)


def test_a_coordinator_that_dies_at_each_of_its_writes(make_job: MakeJob) -> None:
    """From the very first one on: registrations, model, records."""
    with make_job(
        "--mode=bsp",
        coordinator_failpoint="coordinator.write_durable=kill",
        lease_s=PATIENT_S,
    ) as job:
        job.start_workers("w0", "w1")
        for number in range(1, 8):
            end_at_write(job)
            job.start_coordinator(f"coordinator.write_durable=kill@{number % 3 + 1}")
        end_at_write(job)
        job.start_coordinator()
        job.wait_members("w0", "w1")
        job.wait_steps("w0", 5)


def test_a_coordinator_that_dies_while_the_mode_changes(make_job: MakeJob) -> None:
    """Whoever asked is told that nobody answered, and asks again."""
    changes = (("fence_prepared", "ssp"), ("record_persisted", "asp"))
    with make_job("--mode=bsp", lease_s=PATIENT_S) as job:
        job.start_workers("w0", "w1", "w2")
        job.wait_members("w0", "w1", "w2")
        for point, mode in (*changes, ("record_announced", "bsp")):
            job.coordinator.send(signal.SIGKILL)
            revive(job, f"coordinator.{point}=kill")
            with pytest.raises(PsError):
                job.set_mode(mode)
            revive(job)
            job.set_mode(mode)
            job.wait_steps("w0", 3)
            assert job.status()["mode"] == mode
        assert job.status()["evicted_count"] == 0


# One that stands still does so in ASP; see `test_stopped_processes.py`.
@pytest.mark.parametrize("mode", ["bsp", pytest.param("asp", marks=pytest.mark.repeat)])
def test_a_coordinator_that_stays_away_for_longer_than_a_lease(
    mode: str, make_job: MakeJob
) -> None:
    """Shards acknowledge for a lease, then hold; a worker that dies meanwhile is missed
    by nobody until there is a coordinator again."""
    with make_job(*MODES[mode]) as job:
        job.start_workers("w0", "w1", "w2")
        job.wait_members("w0", "w1", "w2")
        job.wait_steps("w0", 3)
        job.coordinator.send(signal.SIGKILL)
        job.expect_coordinator_killed()
        for shard in job.shards:
            wait_until(
                lambda shard=shard: "silent for a lease" in shard.log,  # type: ignore[misc]
                "the shards to hold",
            )
        count = len(job.workers["w0"].events("step"))
        job.kill_worker("w2")
        wait_until(
            lambda: "which has been silent" in job.workers["w0"].log,
            "w0 to be told why its step is held",
        )
        assert len(job.workers["w0"].events("step")) <= count + 1
        job.start_coordinator()
        job.wait_gone("w2")
        job.wait_steps("w0", 5)
        job.wait_members("w0", "w1")
