"""Learners that wait for nobody, while some of them are killed, stopped and replaced.

What a learner waits for is what it notes itself, in its history: a local step that
waits for a push. How long the machine keeps its process waiting is not in it.
"""

import json
import random
import signal
from typing import Final

import pytest

from tests.fault import strategy_training
from tests.fault.conftest import SEED, MakeJob
from tests.fault.epochs_training import SAMPLE_COUNT
from tests.fault.fault_job import FaultJob

LEARNERS: Final = ("w0", "w1", "w2", "w3")
GRACE_WINDOW_S: Final = 0.2
QUORUM: Final = ("--mode=quorum", "--quorum=2", f"--grace-window={GRACE_WINDOW_S}")


@pytest.mark.parametrize("fault_count", [3, pytest.param(25, marks=pytest.mark.repeat)])
def test_no_learner_waits_for_another(fault_count: int, make_job: MakeJob) -> None:
    drawn = random.Random(f"{SEED} {fault_count}")
    with make_job(*QUORUM, script=strategy_training.__file__) as job:
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

    waits = waits_ms(job)
    print("waits of local steps:", waits)
    assert all(wait_ms <= 1000 * GRACE_WINDOW_S for wait_ms in waits)
    epochs = [
        counts for worker in job.workers.values() for counts in worker.events("epoch")
    ]
    assert epochs
    for counts in epochs:
        assert counts["seen_again"] == counts["never"] == 0
        assert counts["seen_once"] + counts["torn"] == SAMPLE_COUNT


def waits_ms(job: FaultJob) -> list[float]:
    """What local steps have noted that they waited."""
    lines = [
        json.loads(text)
        for path in job.history.glob("worker-*.jsonl")
        for text in path.read_text().splitlines()
    ]
    assert any(line["type"] == "ok" for line in lines), "pushes were noted"
    return [line["wait_ms"] for line in lines if line["type"] == "wait"]


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
