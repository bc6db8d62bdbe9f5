"""`deploy/slurm/job.sh` on a real Slurm of one node: requeued, it goes on."""

import os
from pathlib import Path
from typing import Final

import pytest

from tests.doubles.children import wait_until
from tests.doubles.slurm import Slurm
from tests.integration.deploy_files import SCRIPTS

CHECKOUT: Final = Path(__file__).resolve().parents[2]
SCRIPT: Final = CHECKOUT / "deploy" / "slurm" / "job.sh"
TRAINING_TIMEOUT_S: Final = 180.0
"""A start of all processes and some steps: each imports torch by itself."""


class Submitted:
    """A job of Slurm, and what it prints."""

    def __init__(self, slurm: Slurm, folder: Path, *arguments: str) -> None:
        self._slurm = slurm
        self._log = folder / "job.log"
        options = ("--parsable", f"--chdir={folder}", f"--output={self._log}")
        self.number = slurm.run("sbatch", *options, str(SCRIPT), *arguments).strip()

    @property
    def log(self) -> str:
        return self._log.read_text() if self._log.exists() else ""

    def wait_state(self, *states: str) -> str:
        """Waits for one of some states, which it returns."""
        found = ""

        def is_in_one() -> bool:
            nonlocal found
            found = self._slurm.state(self.number)["JobState"]
            return found in states

        wait_until(is_in_one, " or ".join(states), TRAINING_TIMEOUT_S)
        return found

    def wait_lines(self, text: str, count: int) -> None:
        """Waits until it has printed so many lines with a text."""

        def is_there() -> bool:
            state = self._slurm.state(self.number)["JobState"]
            assert state not in ("COMPLETED", "FAILED"), self.log
            return self.log.count(text) >= count

        wait_until(is_there, f"{count} lines with {text!r}", TRAINING_TIMEOUT_S)


@pytest.mark.root
@pytest.mark.timeout(900)
def test_a_requeued_job_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    with Slurm(tmp_path) as slurm:
        slurm.environment |= {
            "PATH": f"{SCRIPTS}:{os.environ['PATH']}",
            "PS_OPTIONS": "--checkpoint-every 20steps --seed 7",
            "PS_PROCESSES": "2",
            "PS_SHARDS": "2",
        }
        job = Submitted(slurm, tmp_path, str(CHECKOUT / "examples" / "digits_after.py"))
        job.wait_lines("is complete", 2)
        # As where a node is lost or the job is preempted: nobody is asked.
        slurm.run("scontrol", "requeue", job.number)
        job.wait_lines("the job returns to checkpoint", 1)
        job.wait_lines("is complete", job.log.count("is complete") + 1)
        # As 90 s before the end of its time.
        slurm.run("scancel", "--batch", "--signal=USR1", job.number)
        job.wait_lines("back into the queue", 1)
        job.wait_lines("the job returns to checkpoint", 2)
        assert job.wait_state("COMPLETED", "FAILED") == "COMPLETED", job.log
        last = job.log.rpartition("the job returns to checkpoint")[2]
        assert "test accuracy 0.9" in last
        assert "of 1497 positions 1497 seen once" in last
        assert (tmp_path / f"paramserver-{job.number}" / "tls").is_dir()


def test_a_job_without_a_script_is_refused(tmp_path: Path) -> None:
    with Slurm(tmp_path) as slurm:
        job = Submitted(slurm, tmp_path)
        assert job.wait_state("COMPLETED", "FAILED") == "FAILED"
        assert slurm.state(job.number)["ExitCode"] == "2:0"
        assert "job.sh: no script to train" in job.log
