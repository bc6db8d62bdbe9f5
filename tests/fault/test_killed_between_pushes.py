"""Workers with local steps that die at drawn moments: in a round, and in its push."""

import random
from typing import Final

import pytest
import torch

from tests.fault import strategy_training
from tests.fault.conftest import SEED, MakeJob
from tests.fault.epochs_training import SAMPLE_COUNT
from tests.fault.fault_job import PATIENT_S

BSP: Final = ("--mode=bsp",)
ASP: Final = ("--mode=asp",)
SSP: Final = ("--mode=ssp", "--staleness=2")
WAYS: Final = {
    "model-averaging": BSP,
    "diloco": BSP,
    "streaming-diloco": BSP,
    "post-local-sgd": BSP,
    "easgd": BSP,
    "fedavg": BSP,
    "fedprox": BSP,
    "local-steps": SSP,
    "async-local-sgd in ssp": SSP,
    "async-easgd": ASP,
    "async-local-sgd": ASP,
    "downpour": ASP,
}
POINTS: Final = {
    "worker.chunk_sent": 60,
    "worker.in_barrier": 20,
    "worker.push_answered": 40,
    "worker.step": 20,
}
"""Where a worker is killed, at most at so manieth passing."""

OFTEN: Final = {"fedavg"}


@pytest.mark.parametrize(
    "way",
    [
        pytest.param(way, marks=() if way in OFTEN else pytest.mark.repeat)
        for way in WAYS
    ],
)
def test_workers_that_die_in_a_round_or_its_push(way: str, make_job: MakeJob) -> None:
    draw = random.Random(f"{SEED} {way}")
    every = draw.randint(2, 4)
    with make_job(
        *WAYS[way], script=strategy_training.__file__, lease_s=PATIENT_S
    ) as job:
        points = {
            name: f"{point}=kill@{draw.randint(1, POINTS[point])}"
            for name, point in zip(
                ("w1", "w2"), draw.sample(sorted(POINTS), 2), strict=True
            )
        }
        settings = {"STRATEGY": way.partition(" ")[0], "EVERY": str(every)}
        # In a round, which is its own where not all workers train in each.
        dies = {"DIES_AFTER": str(3 * every + 1)}
        for name in ("w0", "w1", "w2", "w3"):
            job.start_worker(
                name,
                failpoint=points.get(name, ""),
                **settings,  # type: ignore[arg-type]
                **(dies if name == "w3" else {}),  # type: ignore[arg-type]
            )
        for name in (*points, "w3"):
            job.expect_killed(name)
        job.start_worker("w1-again", worker_id="w1", **settings)  # type: ignore[arg-type]
        job.wait_gone("w2", "w3")
        job.wait_members("w0", "w1")
        job.wait_steps("w0", 10)

    assert all(torch.isfinite(each).all() for each in job.values)
    epochs = {each["epoch"]: each for each in job.workers["w0"].events("epoch")}
    assert epochs
    for counts in epochs.values():
        assert counts["seen_again"] == counts["skipped"] == counts["never"] == 0
        behind_steps = counts["seen_once"] + counts["torn"] + counts["dropped"]
        assert behind_steps == SAMPLE_COUNT
