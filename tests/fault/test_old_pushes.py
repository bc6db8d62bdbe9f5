"""Duplicates, pushes out of order, and late ones from an evicted incarnation."""

import signal

import pytest

from pswire.membership import Outcome
from pswire.reasons import ErrorReason
from psworker.errors import PsError
from psworker.optim.prepare import sort_objects
from tests.fault.conftest import MakeJob
from tests.fault.fault_job import PATIENT_S
from tests.fault.forger import Forger
from tests.fault.test_killed_workers import MODES
from tests.fault.test_stopped_processes import wait_rejoined
from tests.fault.training import SLOT_COUNT, make_model

FORGING_MS = 10_000
"""For which the worker whose pushes are forged makes none itself."""

FORGED_SLOT = SLOT_COUNT - 1
"""Nobody else's: whatever is there at the end was applied by mistake."""


def refused(forger: Forger, sequence: int, clock: int) -> ErrorReason | None:
    with pytest.raises(PsError) as caught:
        forger.push(sequence, clock, FORGED_SLOT)
    return caught.value.reason


@pytest.mark.parametrize(
    "mode", ["bsp", "asp", pytest.param("ssp", marks=pytest.mark.repeat)]
)
def test_pushes_of_another_time_change_nothing(mode: str, make_job: MakeJob) -> None:
    """All are whole pushes, complete and well formed, in the worker's own name."""
    sort_objects(make_model())  # what it imports takes longer than that
    with make_job(*MODES[mode], lease_s=PATIENT_S) as job:
        job.start_worker("w0")
        job.wait_members("w0")
        # It keeps its place meanwhile: one that is stopped is soon taken out.
        job.start_worker("w1", failpoint=f"worker.step=delay({FORGING_MS})@6")
        job.wait_steps("w1", 5)
        (joined,) = job.workers["w1"].events("joined")
        status = job.status()
        base = joined["clock"]
        with Forger(status, "w1", 1) as forger:
            own_slot = job.workers["w1"].events("step")[4]["slot"]
            for sequence, slot in ((5, own_slot), (3, FORGED_SLOT), (5, own_slot)):
                replies = forger.push(sequence, base + sequence, slot)
                assert {reply.outcome for reply in replies} == {Outcome.DUPLICATE}
                job.fault("push sent again")
            assert refused(forger, 5, base + 5) is ErrorReason.PUSH_CONFLICT
            job.fault("push sent again with other bytes")
            assert refused(forger, 8, base + 8) is ErrorReason.SEQUENCE_GAP
            job.fault("push out of order")
            job.workers["w1"].send(signal.SIGSTOP)
            job.expect_stopped("w1")
            job.wait_departed("w1")
            for sequence in (6, 7):
                reason = refused(forger, sequence, base + sequence)
                assert reason is ErrorReason.WORKER_INCARNATION_STALE
                job.fault("push of an evicted start")
        with Forger(job.status(), "w1", 2) as forger:
            assert refused(forger, 1, base + 1) is ErrorReason.WORKER_INCARNATION_STALE
            job.fault("push of a start that is none")
        job.wait_steps("w0", 3)
        job.workers["w1"].send(signal.SIGCONT)
        wait_rejoined(job, "w1")
        job.wait_steps("w1", 3)
