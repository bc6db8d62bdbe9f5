"""Processes of one host that push as one worker, and are killed and stopped."""

import random
import signal
from collections import defaultdict
from pathlib import Path
from typing import Final

import pytest

from tests.doubles.children import Child, wait_until
from tests.fault import host_ledger
from tests.fault.conftest import SEED, MakeJob
from tests.fault.fault_job import PATIENT_S, FaultJob, members_of
from tests.fault.host_data_training import BATCH_SIZE, EPOCH_COUNT, SAMPLE_COUNT

SCRIPT: Final = str(Path(__file__).with_name("training.py"))
DATA_SCRIPT: Final = str(Path(__file__).with_name("host_data_training.py"))
WORKER: Final = "host"


def start(
    job: FaultJob, index: int, count: int, name: str = "", failpoint: str = ""
) -> Child:
    return job.start_worker(
        name or f"p{index}",
        worker_id=WORKER,
        failpoint=failpoint,
        PS_HOST_GROUP="group",
        PS_LOCAL_RANK=str(index),
        PS_LOCAL_SIZE=str(count),
    )


def check(job: FaultJob) -> None:
    """At the end of a job: all processes had equal values at each of its clocks."""
    digests: dict[int, set[int]] = defaultdict(set)
    for worker in job.workers.values():
        for step in worker.events("step"):
            digests[step["clock"]].add(step["digest"])
    differing = [clock for clock, each in digests.items() if len(each) > 1]
    assert not differing, "\n".join(
        f"{worker.name} {step}"
        for worker in job.workers.values()
        for step in worker.events("step")
        if step["clock"] in differing
    )
    host_ledger.check_values(job.values, job.workers, max(digests))


def is_same_worker(job: FaultJob) -> bool:
    status = job.status()
    members = members_of(status).values()
    return [(each["worker_id"], each["incarnation"]) for each in members] == [
        (WORKER, 1)
    ]


@pytest.mark.parametrize(
    "failpoint",
    [
        "worker.step=kill@7",
        "worker.chunk_sent=kill@25",
        "worker.push_sent=kill@12",
        "worker.in_barrier=kill@7",
        "worker.push_answered=kill@13",
        "worker.push_answered=kill@14",
    ],
)
def test_a_leader_dies_at_any_moment_of_a_step(
    failpoint: str, make_job: MakeJob
) -> None:
    with make_job("--mode=bsp", script=SCRIPT, lease_s=PATIENT_S) as job:
        start(job, 0, 3, failpoint=failpoint)
        start(job, 1, 3)
        start(job, 2, 3)
        job.expect_killed("p0")
        job.wait_steps("p1", 4)
        job.wait_steps("p2", 4)
        assert is_same_worker(job)
    check(job)


@pytest.mark.repeat
def test_processes_are_killed_and_stopped_one_after_the_other(
    make_job: MakeJob,
) -> None:
    draw = random.Random(SEED)
    with make_job("--mode=bsp", script=SCRIPT, lease_s=PATIENT_S) as job:
        living = {index: start(job, index, 4) for index in range(4)}
        for child in living.values():
            job.wait_steps(child.name, 2)
        for turn in range(3):
            index = draw.choice(sorted(living))
            victim = living.pop(index)
            if turn % 2:
                victim.send(signal.SIGSTOP)
                job.expect_stopped(victim.name)
            else:
                job.kill_worker(victim.name)
            for child in living.values():
                job.wait_steps(child.name, 3)
            assert is_same_worker(job)
            if turn % 2:
                victim.send(signal.SIGCONT)
                living[index] = victim
            else:
                living[index] = start(job, index, 4, f"p{index}-{turn}")
            name = living[index].name
            wait_until(
                lambda name=name: bool(job.workers[name].events("step")),  # type: ignore[misc]
                f"the first step of {name}",
            )
            job.wait_steps(name, 2)
    check(job)


def test_a_group_of_one_process_after_all_others_have_died(make_job: MakeJob) -> None:
    with make_job("--mode=bsp", script=SCRIPT, lease_s=PATIENT_S) as job:
        start(job, 0, 3, failpoint="worker.step=kill@5")
        start(job, 1, 3, failpoint="worker.in_barrier=kill@3")
        start(job, 2, 3)
        job.expect_killed("p0")
        job.expect_killed("p1")
        job.wait_steps("p2", 5)
        assert is_same_worker(job)
    check(job)


@pytest.mark.parametrize(
    "failpoints",
    [
        ("worker.step=kill@4", ""),
        pytest.param(("worker.in_barrier=kill@4", ""), marks=pytest.mark.repeat),
        ("", "worker.step=kill@5"),
        ("worker.push_answered=kill@5", "worker.step=kill@9"),
    ],
)
def test_each_sample_counts_once_whoever_is_killed(
    failpoints: tuple[str, str], make_job: MakeJob
) -> None:
    with make_job("--mode=bsp", script=DATA_SCRIPT, lease_s=PATIENT_S) as job:
        for index in range(3):
            start(job, index, 3, failpoint=(*failpoints, "")[index])
        for index, failpoint in enumerate(failpoints):
            if failpoint:
                job.expect_killed(f"p{index}")
        for child in job.workers.values():
            if child.code is None:
                child.wait_end()
    seen: list[tuple[int, int]] = []
    for child in job.workers.values():
        if not child.code:
            ends = child.events("epoch")
            assert [end["once"] for end in ends] == [SAMPLE_COUNT] * EPOCH_COUNT, ends
        for step in child.events("step"):
            assert step["outcome"] in host_ledger.COUNTED
            seen += [(step["epoch"], row) for row in step["rows"]]
    assert len(seen) == len(set(seen)), "a sample was trained on twice"
    # Of those that died at most their last batch counts without their word for it.
    lost = len(list(filter(None, failpoints)))
    assert len(seen) >= SAMPLE_COUNT * EPOCH_COUNT - lost * BATCH_SIZE


def test_a_leader_that_comes_too_late_joins_again_and_says_what_became_of_its_push(
    make_job: MakeJob,
) -> None:
    with make_job("--mode=bsp", script=SCRIPT, lease_s=PATIENT_S) as job:
        job.start_worker("w0")
        job.wait_members("w0")
        start(job, 0, 2)
        follower = start(job, 1, 2)
        for name in ("p0", "p1"):
            job.wait_steps(name, 3)
        follower.send(signal.SIGSTOP)  # and before the leader can know of it
        job.kill_worker("p0")
        job.expect_stopped("p1")
        job.wait_gone(WORKER)
        follower.send(signal.SIGCONT)
        job.wait_members(WORKER)
        job.wait_steps("p1", 3)
        assert members_of(job.status())[WORKER]["incarnation"] == 2
        outcomes = [step["outcome"] for step in follower.events("step")]
        rejoined = [step for step in follower.events("step") if step["rejoined"]]
        assert len(rejoined) <= 1
        assert set(outcomes) <= {"applied", "duplicate", "dropped"}
        assert outcomes.count("dropped") <= 1
        assert outcomes[-1] == "applied"


@pytest.mark.repeat
@pytest.mark.parametrize("hit", [13, 14])
def test_a_leader_is_lost_between_the_answers_of_two_shards_in_mode_quorum(
    hit: int, make_job: MakeJob
) -> None:
    """One has closed a clock, and the other is never told by whom it was committed."""
    with make_job(
        "--mode=quorum", "--quorum=1", script=SCRIPT, lease_s=PATIENT_S
    ) as job:
        # Slow enough that the group is not late for each clock on a busy machine.
        job.start_worker("w0", step_s=0.1)
        start(job, 0, 3, failpoint=f"worker.push_answered=kill@{hit}")
        start(job, 1, 3)
        start(job, 2, 3)
        job.expect_killed("p0")
        for name in ("p1", "p2"):
            job.wait_steps(name, 6)
        job.wait_steps("w0", 3)


@pytest.mark.repeat
@pytest.mark.parametrize("hit", [13, 14])
def test_a_leader_is_lost_between_the_answers_of_two_shards_of_a_measured_clock(
    hit: int, make_job: MakeJob
) -> None:
    """The one that has closed it alone knows what it has measured for it."""
    options = ("--mode=bsp", "--gradient-norm-max=1e6")
    with make_job(*options, script=SCRIPT, lease_s=PATIENT_S) as job:
        start(job, 0, 3, failpoint=f"worker.push_answered=kill@{hit}")
        start(job, 1, 3)
        start(job, 2, 3)
        job.expect_killed("p0")
        for name in ("p1", "p2"):
            job.wait_steps(name, 6)
