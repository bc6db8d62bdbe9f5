"""`psworker.integrations.ray` on a real Ray: lost actors are started again."""

import json
import os
import re
import signal
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

from tests.clusters.ray_job import EPOCHS, WORKERS
from tests.doubles.children import wait_until
from tests.integration.processes import Processes

START_TIMEOUT_S = 180.0
"""Of Ray and of actors, which import torch by themselves."""

pytestmark = pytest.mark.skipif(
    find_spec("ray") is None, reason="ray is not installed: make ray"
)


def epochs_of(folder: Path, worker_id: str) -> int:
    """Epochs that a worker has trained, in all of its lives."""
    log = folder / "epochs"
    return log.read_text().count(f"{worker_id} ") if log.exists() else 0


def actors_of(folder: Path, kind: str) -> list[psutil.Process]:
    """Processes of the job's Ray that run actors of a kind."""
    (first, *_) = folder.glob("r0-*")
    raylet = psutil.Process(int(first.read_text()))
    return [
        each
        for each in raylet.children()
        if (words := each.cmdline()) and words[0].startswith(f"ray::{kind}")
    ]


@pytest.mark.timeout(900)
def test_a_killed_worker_and_a_killed_shard_are_replaced(tmp_path: Path) -> None:
    with Processes(tmp_path) as processes:
        processes.start("driver", "-m", "tests.clusters.ray_job", str(tmp_path))

        def wait_epochs(worker_id: str, count: int) -> None:
            def have_passed() -> bool:
                return epochs_of(tmp_path, worker_id) >= count

            wait_until(have_passed, f"{count} epochs of {worker_id}", START_TIMEOUT_S)

        wait_epochs("r0", 5)
        (first,) = tmp_path.glob("r1-*")
        os.kill(int(first.name.partition("-")[2]), signal.SIGKILL)
        wait_until(
            lambda: len(list(tmp_path.glob("r1-*"))) == 2, "another r1", START_TIMEOUT_S
        )
        wait_epochs("r1", epochs_of(tmp_path, "r1") + 2)
        shards = actors_of(tmp_path, "_Shard")
        assert len(shards) == 2
        shards[0].kill()
        wait_until(
            lambda: "the job returns to checkpoint" in processes.log("driver"),
            "a job that goes on from its checkpoint",
            START_TIMEOUT_S,
        )
        assert processes.code("driver", START_TIMEOUT_S) == 0, processes.logs()
        line = next(each for each in processes.rest("driver") if each.startswith("[{"))
        results = json.loads(line)
        assert [each["worker_id"] for each in results] == ["r0", "r1"]
        assert len({each["loss"] for each in results}) == 1
        assert results[0]["loss"] < 1e-6
        log = processes.log("driver")
        assert re.search(rf"epoch {EPOCHS - 1} of 'loader' is over: .* seen once", log)
        assert f"at least {WORKERS} workers" in log
