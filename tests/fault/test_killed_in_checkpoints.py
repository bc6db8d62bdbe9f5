"""A daemon is killed at each place of its work on checkpoints, and then the job."""

import signal
from pathlib import Path
from typing import Final

import pytest

from pswire.checkpoint.folder import CheckpointFolder
from tests.doubles.children import Child, Nursery, wait_until
from tests.fault.test_killed_whole_jobs import EPOCHS, WholeJob, undisturbed

FAILPOINTS: Final = (
    "shard.checkpoint_copied=kill@2",
    "shard.restore_read=kill",
    "shard.checkpoint_written=kill@2",
)
"""One in each life: the second checkpoint of a life is never made."""

COORDINATORS_FAILPOINTS: Final = (
    "coordinator.checkpoint_decided=kill@2",
    "coordinator.checkpoint_parts=kill",
    "coordinator.checkpoint_committed=kill",
)
"""One in each life: the first makes one checkpoint before, the others none."""


class FailingJob(WholeJob):
    """The coordinator, or each of the shards, has a failpoint.

    Each of them: a process does not know which shard it will be, and of a small model
    one may have nothing to load.

    Attributes:
        failpoint: Of the next life.
    """

    failpoint = ""

    @property
    def _failing(self) -> str:
        return self.failpoint.partition(".")[0]

    def _start(self, name: str, *arguments: str, **environment: str) -> Child:
        if self.failpoint and name.startswith(self._failing):
            environment["PS_FAILPOINT"] = self.failpoint
        return super()._start(name, *arguments, **environment)

    def wait_killed(self) -> None:
        """Returns once the failpoint has killed a daemon."""
        daemons = {
            n: c for n, c in self.lives[-1].items() if n.startswith(self._failing)
        }

        def killed() -> list[str]:
            return [name for name, child in daemons.items() if child.code is not None]

        wait_until(lambda: bool(killed()), self.failpoint, 90)
        assert all(daemons[n].code == -signal.SIGKILL for n in killed()), self.logs()


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


@pytest.mark.timeout(300)
def test_the_coordinator_may_die_wherever_it_has_one_made(
    nursery: Nursery, tmp_path: Path
) -> None:
    expected = undisturbed(nursery, tmp_path / "undisturbed", "step")
    folder = CheckpointFolder(str(tmp_path / "killed" / "checkpoints"))
    job = FailingJob(nursery, tmp_path / "killed")
    with job:
        versions = []
        for failpoint in (*COORDINATORS_FAILPOINTS, ""):
            job.failpoint = failpoint
            job.start()
            if failpoint:
                job.wait_killed()
                job.kill()
                newest = folder.newest_good()
                assert not [
                    each
                    for found in newest.problems.values()
                    for each in found
                    if "is not complete" not in each
                ], "what is not complete is the only thing that may be wrong"
                assert newest.manifest is not None
                versions.append(newest.manifest.version)
        assert job.ends() == expected
        first, second, third = versions
        assert first == second < third
