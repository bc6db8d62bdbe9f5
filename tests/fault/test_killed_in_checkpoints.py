"""A daemon is killed at each place of its work on checkpoints, and then the job."""

import signal
from pathlib import Path
from typing import Final

import pytest

from pswire.checkpoint.folder import CheckpointFolder
from tests.doubles.children import Child, Nursery, wait_until
from tests.fault.test_killed_whole_jobs import (
    EPOCHS,
    LAST_CLOCK,
    WORKERS,
    WholeJob,
    undisturbed,
)

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

EVERYWHERE: Final = (
    *(f"coordinator: checkpoint.{each}" for each in (
        "begun=kill@2", "file_written=kill@4", "file_synced=kill@4",
        "file_renamed=kill@4", "file_durable=kill@4", "complete=kill@2",
        "file_removed=kill",
    )),
    *(f"shard-0: checkpoint.{each}=kill@2" for each in (
        "file_written", "file_synced", "file_renamed", "file_durable",
    )),
    *(f"coordinator: coordinator.{each}" for each in (
        "cut_decided=kill@2", "checkpoint_decided=kill@2", "checkpoint_parts=kill@2",
        "checkpoint_committed=kill@2", "write_durable=kill@30",
    )),
    *(f"shard-0: shard.checkpoint_{each}=kill@2" for each in ("copied", "written")),
)  # fmt: skip
"""Failpoints of saving and pruning, by the daemon that reaches them."""


class FailingJob(WholeJob):
    """The coordinator, or each of the shards, has a failpoint.

    Each of them: a process does not know which shard it will be, and of a small model
    one may have nothing to load.

    Attributes:
        failpoint: Of the next life.
        role: Who has it, where its name does not say so.
    """

    failpoint = ""
    role = ""

    @property
    def _failing(self) -> str:
        return self.role or self.failpoint.partition(".")[0]

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

    def replace_dead(self) -> None:
        """Starts those again that a failpoint has killed."""
        for name, child in tuple(self.lives[-1].items()):
            if child.code is not None:
                self.replace(name, "-again")


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


@pytest.mark.repeat
@pytest.mark.parametrize("place", EVERYWHERE)
def test_a_daemon_may_die_wherever_it_saves_and_others_live_on(
    place: str, nursery: Nursery, tmp_path: Path
) -> None:
    """Another process takes its place; a shard's has all return to a checkpoint."""
    expected = undisturbed(nursery, tmp_path / "undisturbed", "step")
    role, _, failpoint = place.partition(": ")
    job = FailingJob(nursery, tmp_path / "killed", "--checkpoint-keep=1")
    job.failpoint, job.role = failpoint, role
    with job:
        job.start()
        job.wait_killed()
        job.failpoint = ""
        job.replace_dead()
        assert job.ends() == expected
        job.wait_checkpoint(LAST_CLOCK * len(WORKERS))


@pytest.mark.repeat
@pytest.mark.parametrize("name", ["shard-0", "shard-1", "coordinator", "w0", "w1"])
def test_anybody_may_die_while_the_job_returns_to_a_checkpoint(
    name: str, nursery: Nursery, tmp_path: Path
) -> None:
    """A shard that takes the place of a killed one is killed as it loads, and then
    another process before the shard that follows is there."""
    expected = undisturbed(nursery, tmp_path / "undisturbed", "step")
    job = FailingJob(nursery, tmp_path / "killed", "--on-worker-loss=wait")
    with job:
        job.start()
        job.wait_checkpoint()
        # A process does not know which shard it will be, and shard 1 has no chunk.
        (lost,) = (
            each for each in ("shard-0", "shard-1") if "shard 0 of job" in job.log(each)
        )
        job.failpoint, job.role = "shard.restore_read=kill", lost
        job.replace(lost, "-loads")
        job.wait_killed()
        job.failpoint = ""
        if name != lost:
            job.replace(name, "-again")
        job.replace_dead()
        assert job.ends() == expected
