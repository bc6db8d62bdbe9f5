"""A snapshot is never what stops training: cuts that need a push of a lost worker.

Found with real processes: in ASP a worker was killed in the middle of a push, stayed a
member below the floor, and the next snapshot stopped all others for 30 s.
"""

from dataclasses import replace

from psserver.coordinator.core.coordinator_effects import Abort, DecideCut, ReleaseImage
from psserver.edge.coordinator_settings import CoordinatorSettings
from psserver.shard.core.shard_fence import Cut
from pswire.membership import FenceKind, Mode, StepAtomicity
from tests.doubles.core_values import key
from tests.doubles.driven_coordinator import DrivenCoordinator
from tests.doubles.driven_shard import DrivenShard

SETTINGS = CoordinatorSettings(
    job_id="job", shard_count=2, workers_min=2, mode=Mode.ASP
)
TWO_PHASE = replace(SETTINGS, step_atomicity=StepAtomicity.CLOCK)


def running(settings: CoordinatorSettings = SETTINGS) -> DrivenCoordinator:
    return DrivenCoordinator.running("a", "b", settings=settings)


def lose(job: DrivenCoordinator, name: str) -> None:
    job.lose(job.core.roster.entry(key(name)))


def want(job: DrivenCoordinator) -> int:
    return job.core.want_cut(job.now_ms)


def has_failed(job: DrivenCoordinator, wanted: int) -> bool:
    snapshots = job.core.snapshots
    return (
        snapshots.finished_cut_count >= wanted
        and snapshots.pending is None
        and "b/1 was lost in the middle of a push" in snapshots.failure
    )


def test_no_cut_is_made_of_a_push_that_a_lost_worker_has_sent_in_part() -> None:
    job = running()
    lose(job, "b")
    wanted = want(job)
    job.report(0, applied=5)
    job.report(1, applied=4, trailer=5)

    assert job.of(DecideCut) == []
    assert len(job.of(Abort)) == 1
    assert has_failed(job, wanted)


def test_what_a_lost_worker_has_sent_whole_stops_no_cut() -> None:
    job = running()
    lose(job, "b")
    want(job)
    job.report_all(applied=5)

    assert len(job.of(DecideCut)) == 1
    job.pass_time(50)
    assert job.of(ReleaseImage) == []


def test_a_cut_ends_when_a_worker_whose_push_it_waits_for_is_lost() -> None:
    job = running()
    wanted = want(job)
    job.report(0, applied=5)
    job.report(1, applied=4, trailer=5)
    (decided,) = job.of(DecideCut)
    lose(job, "b")
    job.pass_time(50)

    assert [each.snapshot_id for each in job.of(ReleaseImage)] == [decided.snapshot_id]
    assert has_failed(job, wanted)


def test_with_two_phases_what_nobody_will_commit_stops_a_job_once() -> None:
    job = running(TWO_PHASE)
    lose(job, "b")
    for is_first in (True, False):
        wanted = want(job)
        for index in range(2):
            job.report(index, applied=5, complete={"b": 6}, trailer=6)
        assert len(job.of(DecideCut)) == is_first
        job.pass_time(50)
        assert has_failed(job, wanted)
        job.forget()


def test_a_shard_names_whose_push_a_cut_waits_for() -> None:
    shard = DrivenShard({"a": 0, "b": 0}, [0], mode=Mode.ASP)
    shard.step("a", 1, [0])
    shard.freeze(2, FenceKind.CUT)
    shard.core.decide_cut(2, Cut(9, 1, {key("a"): 1, key("b"): 1}))
    shard.push("a", 2, chunks=[0])

    assert shard.core.waiting_reason == "the last push of a snapshot to be complete"
    assert [each.name for each in shard.core.awaited(0)] == ["b"]
    shard.step("b", 1, [0])
    shard.apply_all()
    assert shard.core.awaited(0) == []
