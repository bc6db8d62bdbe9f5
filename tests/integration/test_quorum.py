"""Mode quorum: a clock closes with those that are there first, and nothing is lost."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pswire.membership import Mode
from tests.integration.job import Crew, Job
from tests.integration.ones_worker import Worker


def test_nobody_waits_for_a_worker_that_does_not_come(tmp_path: Path) -> None:
    with Job(tmp_path, workers_min=3, mode=Mode.QUORUM, quorum=2) as job:
        with ThreadPoolExecutor(3) as pool:
            workers = list(
                pool.map(lambda name: Worker.of(job, name), ("w0", "w1", "w2"))
            )
        fast, other, slow = workers
        with fast.ps, other.ps, slow.ps:
            for clock in range(1, 6):
                with Crew(
                    {"w0": lambda _: fast.step(), "w1": lambda _: other.step()}
                ) as crew:
                    crew.results()
                assert fast.pushes[-1].clock == clock
                assert fast.value == other.value == -clock
            assert fast.ps.mode == "quorum"
            with Crew(
                {"w0": lambda _: fast.step(), "w2": lambda _: slow.step()}
            ) as crew:
                crew.results()
            assert slow.pushes[-1].outcome == "applied"
            assert slow.value == fast.value
