"""Faults of all kinds at once, drawn by a seed.

What is drawn is repeatable, when it meets what is not: a failing storm may have to be
repeated to fail again. `FAULT_SEED` makes others.
"""

import random
import signal
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final

import pytest

from psworker import SnapshotReader
from psworker.errors import PsError
from tests.doubles.children import Child, wait_until
from tests.doubles.fault_proxy import BOTH, DOWN, UP
from tests.fault.conftest import SEED, MakeJob
from tests.fault.fault_job import FaultJob
from tests.fault.training import WORKERS_MAX

ACTION_COUNT: Final = 18
RECOVERY_S: Final = 30.0
"""Within which training goes on after the last fault: 10 s (G20) on a quiet machine,
and three times that on one that is busy."""

STORMS: Final = {
    "bsp": ("--mode=bsp",),
    "ssp": ("--mode=ssp", "--staleness=2"),
    "asp": ("--mode=asp",),
    "clock": ("--mode=bsp", "--step-atomicity=clock"),
    "backup": ("--mode=bsp", "--backup-workers=1"),
}


class Storm:
    """Does things to a job."""

    def __init__(
        self, job: FaultJob, drawn: random.Random, threads: ThreadPoolExecutor
    ) -> None:
        self._job = job
        self._drawn = drawn
        self._threads = threads
        self._asked: list[Future[Any]] = []
        self._standing: list[tuple[float, Child]] = []
        self._holes_until_s = 0.0
        self._free_ids: list[str] = []
        self.has_backups = False

    @property
    def alive(self) -> list[str]:
        return [
            name
            for name, worker in self._job.workers.items()
            if worker.code is None and worker.stopped_at_s is None
        ]

    def blow(self) -> None:
        actions: list[Callable[[], None]] = [
            *(self.kill, self.join, self.join, self.stand_still, self.stand_still),
            *(self.cut, self.cut, self.reset, self.swallow, self.kill_coordinator),
            *(self.cut_snapshot, self.change_mode),
        ]
        for _ in range(ACTION_COUNT):
            self._drawn.choice(actions)()
            time.sleep(self._drawn.uniform(0.0, 0.4))  # the storm's own pace
            self._let_go(time.monotonic())

    def calm_down(self) -> None:
        """Ends all faults; whoever asked for something has got it by then."""
        for proxy in self._job.proxies:
            proxy.heal()
        self._let_go(float("inf"))
        for future in self._asked:
            future.result()
        while len(self.alive) < 2:
            self.join()

    def kill(self) -> None:
        names = self.alive
        if len(names) > 1:
            name = self._drawn.choice(names)
            worker_id = self._job.workers[name].events("joined")
            self._job.kill_worker(name)
            if worker_id:
                self._free_ids.append(worker_id[0]["worker_id"])

    def join(self) -> None:
        count = len(self._job.workers)
        if count < WORKERS_MAX:
            worker_id = self._free_ids.pop() if self._free_ids else f"w{count}"
            self._job.start_worker(f"w{count}", worker_id=worker_id)

    def stand_still(self) -> None:
        names = self.alive
        if len(names) > 1:
            worker = self._job.workers[self._drawn.choice(names)]
            worker.send(signal.SIGSTOP)
            worker.wait_stopped()
            until_s = time.monotonic() + self._drawn.uniform(0.1, 3.0)
            self._standing.append((until_s, worker))
            self._job.fault("SIGSTOP of a worker")

    def cut(self) -> None:
        proxy = self._drawn.choice(self._job.proxies)
        proxy.cut_after(self._drawn.randrange(1, 40_000), self._drawn.choice(BOTH))
        self._job.fault("cut")

    def reset(self) -> None:
        self._drawn.choice(self._job.proxies).reset()
        self._job.fault("reset")

    def swallow(self) -> None:
        ways = self._drawn.choice([(UP,), (DOWN,), BOTH])
        self._drawn.choice(self._job.proxies).black_hole(ways)
        self._holes_until_s = time.monotonic() + self._drawn.uniform(0.2, 1.0)
        self._job.fault("black hole")

    def kill_coordinator(self) -> None:
        self._job.coordinator.send(signal.SIGKILL)
        self._job.expect_coordinator_killed()
        time.sleep(self._drawn.uniform(0.0, 0.5))  # as long as it is away
        self._job.start_coordinator()

    def cut_snapshot(self) -> None:
        def cut() -> None:
            with SnapshotReader(str(self._job.address)) as reader:
                reader.latest(timeout=25)

        self._ask(cut)

    def change_mode(self) -> None:
        if self.has_backups:
            return
        mode = self._drawn.choice(["bsp", "ssp", "asp"])
        self._ask(lambda: self._job.set_mode(mode))

    def _ask(self, question: Callable[[], None]) -> None:
        """In a thread; a coordinator that dies meanwhile is asked again."""

        def is_answered() -> bool:
            try:
                question()
            except PsError:
                return False
            return True

        self._asked.append(self._threads.submit(wait_until, is_answered, "an answer"))

    def _let_go(self, now_s: float) -> None:
        for entry in [entry for entry in self._standing if entry[0] <= now_s]:
            self._standing.remove(entry)
            entry[1].send(signal.SIGCONT)
        if self._holes_until_s and now_s >= self._holes_until_s:
            self._holes_until_s = 0.0
            for proxy in self._job.proxies:
                proxy.heal()


@pytest.mark.parametrize(
    "kind",
    [
        *("bsp", "asp", "backup"),
        *(pytest.param(kind, marks=pytest.mark.repeat) for kind in ("ssp", "clock")),
    ],
)
def test_a_storm(kind: str, make_job: MakeJob) -> None:
    drawn = random.Random(f"{SEED} {kind}")
    with (
        ThreadPoolExecutor(ACTION_COUNT) as threads,
        make_job(*STORMS[kind], has_proxies=True) as job,
    ):
        storm = Storm(job, drawn, threads)
        storm.has_backups = kind == "backup"
        job.start_workers("w0", "w1", "w2")
        job.wait_steps("w0", 3)
        storm.blow()
        storm.calm_down()
        began_s = time.monotonic()
        for name in storm.alive:
            job.wait_steps(name, 2)
        recovery_s = time.monotonic() - began_s
        print(f"{kind}: training goes on after {recovery_s:.1f} s")
        assert recovery_s < RECOVERY_S
