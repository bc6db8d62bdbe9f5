"""Links that lose, delay, cut and reset, between whole processes."""

import random
import time
from typing import Final

import pytest

from tests.doubles.children import wait_until
from tests.doubles.fault_proxy import BOTH, DOWN, UP, Direction, FaultProxy
from tests.fault.conftest import SEED, MakeJob
from tests.fault.fault_job import PATIENT_S, FaultJob
from tests.fault.test_killed_workers import MODES
from tests.fault.test_stopped_processes import LONGER_LEASE_S, wait_rejoined

CUTS: Final = 6
PUSH_BYTES: Final = 16_000
"""What one worker sends to one shard in a step, about as much as comes back."""


@pytest.mark.parametrize(
    "mode",
    [
        *("bsp", "asp", "bsp two-phase"),
        pytest.param("ssp", marks=pytest.mark.repeat),
        pytest.param("ssp two-phase", marks=pytest.mark.repeat),
    ],
)
def test_lost_acknowledgements(mode: str, make_job: MakeJob) -> None:
    """The push has arrived and its answer is cut off, in the middle or at its end."""
    drawn = random.Random(SEED)
    with make_job(*MODES[mode], has_proxies=True, lease_s=PATIENT_S) as job:
        job.start_workers("w0", "w1")
        job.wait_members("w0", "w1")
        for cut in range(CUTS):
            job.wait_steps("w0", 2)
            proxy = job.proxies[cut % 2]
            before = proxy.cut_count
            way = UP if cut % 3 == 2 else DOWN
            proxy.cut_after(drawn.randrange(1, PUSH_BYTES), way)
            wait_until(lambda: proxy.cut_count > before, "the cut")  # noqa: B023
            job.fault("lost acknowledgement" if way is DOWN else "cut push")
            job.wait_steps("w0", 2)
        assert job.status()["evicted_count"] == 0


@pytest.mark.parametrize(
    "mode", ["bsp", "asp", pytest.param("ssp", marks=pytest.mark.repeat)]
)
def test_resets_by_the_dozen(mode: str, make_job: MakeJob) -> None:
    with make_job(*MODES[mode], has_proxies=True, lease_s=PATIENT_S) as job:
        job.start_workers("w0", "w1")
        job.wait_members("w0", "w1")
        for _ in range(5):
            for proxy in job.proxies:
                proxy.reset()
                job.fault("reset")
            job.wait_steps("w0", 1)
        job.wait_steps("w0", 3)
        assert job.status()["evicted_count"] == 0


@pytest.mark.parametrize(
    ("mode", "ways"),
    [
        pytest.param("bsp", (UP,), id="bsp up"),
        pytest.param("bsp", (DOWN,), id="bsp down", marks=pytest.mark.repeat),
        pytest.param("asp", (DOWN,), id="asp down"),
        pytest.param("asp", BOTH, id="asp both", marks=pytest.mark.repeat),
    ],
)
def test_a_shard_in_a_black_hole(
    mode: str, ways: tuple[Direction, ...], make_job: MakeJob
) -> None:
    """Nobody is dead: the job stands still, and goes on when the hole is closed."""
    with make_job(*MODES[mode], has_proxies=True, lease_s=LONGER_LEASE_S) as job:
        job.start_workers("w0", "w1")
        job.wait_members("w0", "w1")
        job.wait_steps("w0", 3)
        job.proxies[1].black_hole(ways)
        count = len(job.workers["w0"].events("step"))
        time.sleep(LONGER_LEASE_S)  # a hole as long as a lease, which nobody can see
        assert len(job.workers["w0"].events("step")) <= count + 1
        job.proxies[1].heal()
        job.fault(f"black hole {'+'.join(way.value for way in ways)}")
        job.wait_steps("w0", 5)
        assert job.status()["evicted_count"] == 0


def test_half_closed_connections(make_job: MakeJob) -> None:
    with make_job("--mode=bsp", has_proxies=True, lease_s=PATIENT_S) as job:
        job.start_workers("w0", "w1")
        job.wait_members("w0", "w1")
        for way in (UP, DOWN):
            for proxy in job.proxies:
                proxy.half_close(way)
                job.fault("half-close")
                job.wait_steps("w0", 3)
        assert job.status()["evicted_count"] == 0


@pytest.mark.parametrize("mode", ["bsp", pytest.param("ssp", marks=pytest.mark.repeat)])
def test_a_slow_link_costs_nobody_its_place(mode: str, make_job: MakeJob) -> None:
    job = make_job(*MODES[mode], has_proxies=True, lease_s=PATIENT_S)
    with FaultProxy(str(job.address)) as control, job:  # until workers have left
        for proxy in (*job.proxies, control):
            proxy.slow(delay_s=0.05, bytes_per_s=300_000)
            job.fault("slow link")
        job.start_worker("w0", coordinator=control.address)
        job.start_worker("w1", coordinator=control.address)
        job.wait_members("w0", "w1")
        job.wait_steps("w0", 5)
        assert job.status()["evicted_count"] == 0


def cut_off(job: FaultJob, control: FaultProxy, ways: tuple[Direction, ...]) -> None:
    control.black_hole(ways)
    job.wait_gone("w1")
    control.heal()
    job.fault("black hole of the control plane")


@pytest.mark.parametrize(
    ("mode", "ways"), [("bsp", (UP,)), ("asp", (DOWN,))], ids=["bsp up", "asp down"]
)
def test_a_worker_that_the_coordinator_does_not_hear(
    mode: str, ways: tuple[Direction, ...], make_job: MakeJob
) -> None:
    """It lives, reaches the shards, and is taken out: then it comes back by itself."""
    job = make_job(*MODES[mode])
    with FaultProxy(str(job.address)) as control, job:
        job.start_worker("w0")
        job.start_worker("w1", coordinator=control.address)
        job.wait_members("w0", "w1")
        job.wait_steps("w0", 3)
        cut_off(job, control, ways)
        wait_rejoined(job, "w1")
        job.fault("push of an evicted start")
        job.wait_steps("w1", 3)
        job.wait_steps("w0", 3)
