"""Learners that wait for nobody, while some of them are killed, stopped and replaced.

A learner notes itself, in its history, each local step that waits for a push.
"""

import json
import random
import signal
from typing import Any, Final

import pytest

from tests.fault import strategy_training
from tests.fault.conftest import SEED, MakeJob
from tests.fault.epochs_training import SAMPLE_COUNT
from tests.fault.fault_job import PATIENT_S, FaultJob

LEARNERS: Final = ("w0", "w1", "w2", "w3")
QUORUM: Final = ("--mode=quorum", "--quorum=2", "--grace-window=0.2")


@pytest.mark.parametrize("fault_count", [3, pytest.param(25, marks=pytest.mark.repeat)])
def test_no_learner_waits_for_another(fault_count: int, make_job: MakeJob) -> None:
    drawn = random.Random(f"{SEED} {fault_count}")
    with make_job(*QUORUM, script=strategy_training.__file__, lease_s=PATIENT_S) as job:
        storm = Storm(job)
        for name in LEARNERS:
            storm.start(name)
        job.wait_members(*LEARNERS)
        for fault in [storm.kill, storm.stop, storm.kill_stopped][:fault_count]:
            fault(drawn.choice(storm.alive))
        for _ in range(fault_count - 3):
            fault = drawn.choice([storm.kill, storm.stop, storm.stop_for_long])
            fault(drawn.choice(storm.alive))
        for name in storm.alive:
            job.wait_steps(name, 3)

    assert waits(job) == []
    epochs = [
        counts for worker in job.workers.values() for counts in worker.events("epoch")
    ]
    assert epochs
    for counts in epochs:
        assert counts["seen_again"] == counts["never"] == 0
        assert counts["seen_once"] + counts["torn"] == SAMPLE_COUNT


def waits(job: FaultJob) -> list[dict[str, Any]]:
    """What local steps have noted that they waited.

    Of learners that kept their place: one that joins again begins with a push.
    """
    found = []
    for path in job.history.glob("worker-*.jsonl"):
        lines = [json.loads(text) for text in path.read_text().splitlines()]
        starts = {tuple(line["worker"]) for line in lines if "worker" in line}
        if len(starts) == 1 and any("push" in line for line in lines):
            found.append([line for line in lines if line["type"] == "wait"])
    assert found, "pushes were noted"
    return [line for each in found for line in each]


class Storm:
    """Does things to learners, of which at least two are left alone each time."""

    def __init__(self, job: FaultJob) -> None:
        self._job = job

    @property
    def alive(self) -> list[str]:
        """Learners that train, by name."""
        workers = self._job.workers.items()
        return [name for name, worker in workers if worker.code is None]

    def start(self, name: str, worker_id: str = "") -> None:
        """Starts a learner."""
        self._job.start_worker(
            name, worker_id=worker_id, STRATEGY="decoupled-diloco", EVERY="4"
        )

    def kill(self, name: str) -> None:
        """Kills a learner; another one takes its place, and the others go on."""
        self._job.kill_worker(name)
        self._others_go_on(name)
        again = f"{name}+"
        self.start(again, worker_id=name.rstrip("+"))
        self._job.wait_steps(again, 1)

    def stop(self, name: str) -> None:
        """Stops a learner for a moment, in which the others go on."""
        self._stop(name)
        self._go_on(name)

    def stop_for_long(self, name: str) -> None:
        """Stops a learner until it is evicted; it joins again when it goes on."""
        self._stop(name)
        self._job.wait_gone(name.rstrip("+"))
        self._go_on(name)

    def kill_stopped(self, name: str) -> None:
        """Kills a learner that is stopped."""
        self._stop(name)
        self._job.kill_worker(name)
        self._others_go_on(name)
        again = f"{name}+"
        self.start(again, worker_id=name.rstrip("+"))
        self._job.wait_steps(again, 1)

    def _stop(self, name: str) -> None:
        self._job.workers[name].send(signal.SIGSTOP)
        self._job.expect_stopped(name)
        self._others_go_on(name)

    def _go_on(self, name: str) -> None:
        self._job.workers[name].send(signal.SIGCONT)
        self._job.wait_steps(name, 1)

    def _others_go_on(self, name: str) -> None:
        for other in self.alive:
            if other != name:
                self._job.wait_steps(other, 2)
