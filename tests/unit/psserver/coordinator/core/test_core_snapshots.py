"""Cuts: coalesced, reused, failing loudly, never more than two images."""

import pytest

from psserver.coordinator.core import job_progress
from psserver.coordinator.core.coordinator_effects import Abort, DecideCut, ReleaseImage
from psserver.coordinator.core.cut import Cut
from psserver.coordinator.core.snapshots import (
    IMAGE_COUNT_MAX,
    READER_BYTES_PER_MS,
    SnapshotEntry,
    SnapshotList,
)
from psserver.edge.cut_report import CutReport
from pswire.membership import FenceKind
from pswire.reasons import ErrorReason
from tests.doubles.core_values import key
from tests.doubles.driven_coordinator import DrivenCoordinator
from tests.refusals import refused


def want(job: DrivenCoordinator) -> int:
    return job.core.want_cut(job.now_ms)


def take(job: DrivenCoordinator, *, applied: int = 0) -> SnapshotEntry:
    """A snapshot from wish to images."""
    want(job)
    job.report_all(applied=applied)
    decided = job.of(DecideCut)[-1]
    job.copy_all(decided.snapshot_id)
    newest = job.core.snapshots.newest
    assert newest is not None
    assert newest.snapshot_id == decided.snapshot_id
    return newest


def released(job: DrivenCoordinator) -> list[int]:
    return [effect.snapshot_id for effect in job.of(ReleaseImage)]


# One cut


def test_a_cut_lies_at_the_highest_clock_that_any_shard_has_touched() -> None:
    job = DrivenCoordinator.running("a", "b")
    wanted = want(job)
    job.report(0, applied=6)
    job.report(1, applied=6, touched=7)

    (decision,) = job.of(DecideCut)
    assert decision.clock == 7
    pending = job.core.snapshots.pending
    assert pending is not None
    assert (pending.version, pending.generation) == (14, 1)
    assert job.core.snapshots.finished_cut_count < wanted
    job.copy_all(decision.snapshot_id)
    assert job.core.snapshots.finished_cut_count == wanted
    assert job.core.snapshots.newest is pending


def test_a_snapshot_is_ready_when_every_shard_has_copied() -> None:
    job = DrivenCoordinator.running("a")
    want(job)
    job.report_all(applied=1)
    (decision,) = job.of(DecideCut)
    slot = job.core.shards.slots[0]
    job.core.report_cut(slot, CutReport(decision.snapshot_id), 0)
    job.core.report_cut(slot, CutReport(decision.snapshot_id), 0)

    assert job.core.snapshots.newest is None


def test_before_the_start_there_is_nothing_to_cut() -> None:
    job = DrivenCoordinator(workers_min=2)
    with refused(ErrorReason.NOT_STARTED, r"waits for shard 0 .*, 2 more workers"):
        want(job)


def test_a_cut_that_finds_nothing_new_gives_the_newest_snapshot_again() -> None:
    job = DrivenCoordinator.running("a")
    first = take(job, applied=3)
    wanted = want(job)
    job.report_all(applied=3)

    assert len(job.of(DecideCut)) == 1
    assert job.of(Abort)[-1].reason == "nothing changed"
    assert job.core.snapshots.newest is first
    assert job.core.snapshots.finished_cut_count == wanted


# Coalescing


def test_wishes_before_the_cut_begins_share_it() -> None:
    job = DrivenCoordinator.running("a")
    job.add_worker("b")  # its fence is open
    assert {want(job) for _ in range(5)} == {1}
    job.report_all(applied=2)
    job.report_all(applied=2)

    assert job.fence_kinds() == [FenceKind.MEMBERSHIP, FenceKind.CUT]


@pytest.mark.parametrize("is_decided", [False, True])
def test_a_wish_that_comes_during_a_cut_gets_the_next_one(is_decided: bool) -> None:
    job = DrivenCoordinator.running("a")
    assert want(job) == 1
    if is_decided:
        job.report_all(applied=2)
    assert want(job) == 2
    if not is_decided:
        job.report_all(applied=2)
    (first,) = job.of(DecideCut)
    job.copy_all(first.snapshot_id)

    assert job.fence_kinds() == [FenceKind.CUT] * 2
    job.report_all(applied=3)
    assert job.of(DecideCut)[-1].clock == 3


# Failing


def test_a_cut_gives_way_to_membership_and_is_made_after_it() -> None:
    job = DrivenCoordinator.running("a")
    wanted = want(job)
    job.report_all(applied=2)
    (first,) = job.of(DecideCut)
    job.add_worker("b")

    assert job.core.snapshots.finished_cut_count == wanted
    assert "gave way" in job.core.snapshots.failure
    assert released(job) == [first.snapshot_id]
    job.report_all(applied=2)
    assert job.fence_kinds() == [FenceKind.CUT, FenceKind.MEMBERSHIP, FenceKind.CUT]


def test_an_open_fence_of_a_cut_is_waited_for() -> None:
    job = DrivenCoordinator.running("a")
    want(job)
    job.add_worker("b")
    assert job.fence_kinds() == [FenceKind.CUT]
    job.report_all(applied=2)
    assert job.fence_kinds() == [FenceKind.CUT, FenceKind.MEMBERSHIP]


def test_a_cut_without_all_reports_fails_and_is_not_repeated_unasked() -> None:
    job = DrivenCoordinator.running("a")
    wanted = want(job)
    job.report(0, applied=2)
    job.pass_time(job.core.settings.fence_timeout_ms)

    assert job.core.snapshots.failure == "no report from shard 1"
    assert job.core.snapshots.finished_cut_count == wanted
    assert job.fence_kinds() == [FenceKind.CUT]


def test_a_wish_that_came_during_a_failing_cut_is_kept() -> None:
    job = DrivenCoordinator.running("a")
    want(job)
    want(job)
    job.pass_time(job.core.settings.fence_timeout_ms)
    assert job.fence_kinds() == [FenceKind.CUT] * 2


def test_a_cut_that_takes_too_long_fails_and_its_images_are_freed() -> None:
    job = DrivenCoordinator.running("a")
    want(job)
    job.report_all(applied=2)
    (decision,) = job.of(DecideCut)
    job.pass_time(job.core.settings.cut_timeout_ms)

    assert "not complete in time" in job.core.snapshots.failure
    assert released(job) == [decision.snapshot_id]
    job.copy_all(decision.snapshot_id)
    assert job.core.snapshots.newest is None
    # Whoever made its image after all is told to free it.
    assert set(released(job)) == {decision.snapshot_id}
    assert len(released(job)) == 3


def test_a_large_model_has_time_to_be_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    job = DrivenCoordinator.running("a")
    terms = job.core.progress.model.terms
    assert terms is not None
    monkeypatch.setattr(job_progress, "COPIED_BYTES_PER_MS", 1)
    want(job)
    job.report_all(applied=2)
    (decision,) = job.of(DecideCut)
    job.pass_time(job.core.settings.cut_timeout_ms)
    assert job.core.snapshots.pending is not None
    job.pass_time(terms.byte_count)

    assert "not complete in time" in job.core.snapshots.failure
    assert released(job) == [decision.snapshot_id]


def test_a_shard_that_can_not_copy_fails_the_cut() -> None:
    job = DrivenCoordinator.running("a")
    want(job)
    job.report_all(applied=2)
    (decision,) = job.of(DecideCut)
    slot = job.core.shards.slots[1]
    job.core.report_cut(slot, CutReport(decision.snapshot_id, "MemoryError"), 0)

    assert job.core.snapshots.failure == "shard 1: MemoryError"
    assert released(job) == [decision.snapshot_id]


def test_a_broken_connection_fails_the_cut_whose_decision_it_may_have_lost() -> None:
    job = DrivenCoordinator.running("a")
    want(job)
    job.report_all(applied=2)
    (decision,) = job.of(DecideCut)
    job.core.report_cut(job.core.shards.slots[0], CutReport(decision.snapshot_id), 0)
    job.break_shard(0)
    assert job.core.snapshots.failure == ""

    job.break_shard(1)

    assert "shard 1 broke" in job.core.snapshots.failure
    assert job.core.snapshots.released[-1] == decision.snapshot_id


# Images and pins


def test_a_snapshot_is_freed_when_a_newer_one_is_there_and_nobody_reads_it() -> None:
    job = DrivenCoordinator.running("a")
    first = take(job, applied=1)
    pin = job.core.snapshots.pin(first, job.now_ms)
    take(job, applied=2)
    job.pass_time(1)
    assert released(job) == []

    job.core.release_snapshot(first.snapshot_id, pin, job.now_ms)

    assert released(job) == [first.snapshot_id]


def test_a_pin_lasts_its_time() -> None:
    job = DrivenCoordinator.running("a")
    first = take(job, applied=1)
    job.core.snapshots.pin(first, job.now_ms)
    take(job, applied=2)
    job.pass_time(job.core.settings.pin_ttl_ms - 1)
    assert released(job) == []
    job.pass_time(1)
    assert released(job) == [first.snapshot_id]


def test_a_pin_on_a_large_model_lasts_as_long_as_a_slow_reader_takes() -> None:
    job = DrivenCoordinator.running("a")
    first = take(job, applied=1)
    seconds = 100
    byte_count = seconds * 1000 * READER_BYTES_PER_MS
    job.core.snapshots.pin(first, job.now_ms, byte_count)
    take(job, applied=2)
    job.pass_time(job.core.settings.pin_ttl_ms + seconds * 1000 - 1)
    assert released(job) == []
    job.pass_time(1)
    assert released(job) == [first.snapshot_id]


def test_a_third_image_waits_until_one_is_freed() -> None:
    job = DrivenCoordinator.running("a")
    first = take(job, applied=1)
    pin = job.core.snapshots.pin(first, job.now_ms)
    second = take(job, applied=2)
    job.core.snapshots.pin(second, job.now_ms)
    want(job)
    assert job.fence_kinds() == [FenceKind.CUT] * IMAGE_COUNT_MAX
    held_by = job.core.snapshots.held_by(job.now_ms + 10_000)
    assert "2 readers" in held_by
    assert "20 s" in held_by

    job.core.release_snapshot(first.snapshot_id, pin, job.now_ms)

    assert job.fence_kinds() == [FenceKind.CUT] * 3
    assert not job.core.snapshots.held_by(job.now_ms)


def test_a_slow_reader_of_an_older_snapshot_holds_up_nobody() -> None:
    job = DrivenCoordinator.running("a")
    first = take(job, applied=1)
    job.core.snapshots.pin(first, job.now_ms)
    for applied in (2, 3, 4):
        newest = take(job, applied=applied)
        assert newest.clock == applied
    assert released(job) == [2, 3]


def test_one_that_is_read_since_the_cut_began_does_not_make_room() -> None:
    job = DrivenCoordinator.running("a")
    first = take(job, applied=1)
    job.core.snapshots.pin(first, job.now_ms)
    second = take(job, applied=2)
    job.forget()
    wanted = want(job)
    pin = job.core.snapshots.pin(second, job.now_ms)
    job.report_all(applied=3)
    assert [abort.reason for abort in job.of(Abort)] == ["both images are being read"]
    assert job.core.snapshots.finished_cut_count < wanted

    job.core.release_snapshot(second.snapshot_id, pin, job.now_ms)
    job.report_all(applied=3)
    job.copy_all(job.of(DecideCut)[-1].snapshot_id)
    assert job.core.snapshots.finished_cut_count == wanted


def test_the_newest_snapshot_stays_without_a_pin() -> None:
    snapshots = SnapshotList(shard_count=1, pin_ttl_ms=10)
    cut = Cut(clock=1, sequences=(), version=1)
    entry = snapshots.decide(cut, generation=1)
    snapshots.copied(entry.snapshot_id, 0)
    assert snapshots.take_released(1_000_000) == []
    assert snapshots.copied(entry.snapshot_id, 0)


def test_unpinning_what_is_gone_does_nothing() -> None:
    snapshots = SnapshotList(shard_count=1, pin_ttl_ms=10)
    snapshots.unpin(7, 7)
    assert snapshots.take_released(0) == []


def test_after_the_last_worker_has_left_the_final_snapshot_holds_all() -> None:
    job = DrivenCoordinator.running("a", "b")
    for name in "ab":
        job.leave(job.core.roster.entry(key(name)), 4)
        job.report_all(applied=4)
    final = take(job, applied=4)
    assert (final.version, final.clock) == (8, 4)
