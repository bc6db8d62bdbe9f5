"""Workers with local steps that die and stand still at every moment of a round."""

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from tests.doubles.children import wait_until
from tests.fault.conftest import MakeJob
from tests.fault.fault_job import FaultJob
from tests.fault.test_killed_workers import MODES
from tests.fault.test_stopped_processes import wait_rejoined

SCRIPT: Final = str(Path(__file__).with_name("local_training.py"))


def _epochs(job: FaultJob) -> Iterator[dict[str, Any]]:
    return (each for worker in job.workers.values() for each in worker.events("epoch"))


def _check_epochs(job: FaultJob) -> None:
    """Every sample was seen once, but for those of a push that is torn."""
    epochs = list(_epochs(job))
    assert epochs
    for each in epochs:
        assert each["seen_once"] + each["torn"] == each["count"], each
        # Pushes that were torn count on no shard for sure.
        assert each["torn"] <= 6 * 3, each


@pytest.mark.parametrize(
    "mode",
    [
        pytest.param(mode, marks=() if mode == "bsp" else pytest.mark.repeat)
        for mode in MODES
    ],
)
def test_workers_that_die_or_stand_still_within_a_round(
    mode: str, make_job: MakeJob
) -> None:
    points = {
        "w1": "worker.chunk_sent=kill@15",
        "w2": "worker.in_barrier=kill@8",
        "w3": "worker.push_answered=kill@31",
        "w4": "worker.step=stop@6",
    }
    with make_job(*MODES[mode], script=SCRIPT, leaves_marks=True) as job:
        job.start_workers("w0", "w5", *points, **points)
        for name in ("w1", "w2", "w3"):
            job.expect_killed(name)
            job.wait_gone(name)
        job.expect_stopped("w4")
        job.wait_gone("w4")
        job.wait_steps("w0", 3)
        job.workers["w4"].send(signal.SIGCONT)
        wait_rejoined(job, "w4")
        # Between two pushes, wherever that is.
        job.wait_steps("w5", 2)
        job.kill_worker("w5")
        job.start_worker("w5-1", worker_id="w5")
        job.wait_members("w5")
        job.wait_steps("w5-1", 2)
        count = len(list(_epochs(job)))
        wait_until(lambda: len(list(_epochs(job))) > count, "the end of an epoch")
    _check_epochs(job)
