"""Why a reader got no snapshot: there was no time, or none could be made."""

import asyncio

from psserver.coordinator.core.coordinator_effects import DecideCut
from psserver.coordinator.host.job_waits import JobWaits
from psserver.coordinator.host.snapshot_requests import SnapshotRequests
from psserver.edge.changes import Changes
from pswire.membership import FenceKind
from pswire.reasons import ErrorReason
from tests.doubles.driven_coordinator import DrivenCoordinator
from tests.refusals import refused


def requests_of(job: DrivenCoordinator) -> SnapshotRequests:
    return SnapshotRequests(job.core, Changes(), JobWaits(job.core), lambda: None)


async def test_a_cut_that_is_under_way_is_a_matter_of_time() -> None:
    """So it is for a reader that has waited for the start until its time was over."""
    job = DrivenCoordinator.running("a")

    with refused(ErrorReason.WAIT_TIMEOUT, r"no snapshot within 0\.0 s"):
        await requests_of(job).get(newer_than=-1, timeout_s=0.0)

    fence = job.core.fence
    assert fence is not None
    assert fence.kind is FenceKind.CUT


async def test_a_cut_that_failed_says_why() -> None:
    job = DrivenCoordinator.running("a")
    job.core.want_cut(job.now_ms)
    job.pass_time(job.core.settings.fence_timeout_ms)

    with refused(ErrorReason.CUT_FAILED, "no report from shard 0"):
        await requests_of(job).get(newer_than=-1, timeout_s=0.0)


async def test_no_reader_guesses_the_pins_of_others() -> None:
    """Whoever names one releases it, and its reader finds the snapshot gone."""
    job = DrivenCoordinator.running("a")
    changes = Changes()
    requests = SnapshotRequests(job.core, changes, JobWaits(job.core), lambda: None)
    reading = asyncio.create_task(requests.get(newer_than=-1, timeout_s=9.0))
    await asyncio.sleep(0)
    job.report_all(applied=1)
    job.copy_all(job.of(DecideCut)[-1].snapshot_id)
    changes.notify()
    pins = [(await reading).pin_id]
    newest = job.core.snapshots.newest
    assert newest is not None
    assert [*newest.pins] == pins
    assert pins[0] > 1 << 20
