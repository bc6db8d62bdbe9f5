"""A shard is killed at each place of its work on checkpoints, and then the job."""

import signal
from pathlib import Path
from typing import Final

import pytest

from tests.doubles.children import Nursery, wait_until
from tests.fault.test_killed_whole_jobs import EPOCHS, WholeJob, undisturbed

FAILPOINTS: Final = (
    "shard.checkpoint_copied=kill@2",
    "shard.restore_read=kill",
    "shard.checkpoint_written=kill@2",
)
"""One in each life: the second checkpoint of a life is never made."""


class FailingJob(WholeJob):
    """Its first shard has a failpoint.

    Attributes:
        failpoint: Of the next life.
    """

    failpoint = ""

    def _start(self, name: str, *arguments: str, **environment: str) -> None:
        if name == "shard-0" and self.failpoint:
            environment["PS_FAILPOINT"] = self.failpoint
        super()._start(name, *arguments, **environment)

    def wait_killed(self) -> None:
        """Returns once the failpoint has killed the shard."""
        shard = self.lives[-1].pop("shard-0")
        wait_until(lambda: shard.code is not None, self.failpoint, 90)
        assert shard.code == -signal.SIGKILL, self.logs()


@pytest.mark.timeout(300)
def test_a_shard_may_die_wherever_it_copies_writes_or_loads(
    nursery: Nursery, tmp_path: Path
) -> None:
    expected = undisturbed(nursery, tmp_path / "undisturbed", "step")
    job = FailingJob(nursery, tmp_path / "killed")
    with job:
        for failpoint in (*FAILPOINTS, ""):
            job.failpoint = failpoint
            job.start()
            if failpoint:
                job.wait_killed()
                job.kill()
        assert job.ends() == expected
        # Of the life that died while it loaded nobody has made a step.
        assert [bool(job.steps(life)) for life in range(4)] == [True, False, True, True]
        assert job.joined(3)["epoch"] < EPOCHS
