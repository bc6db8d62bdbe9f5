"""A job that begins from a checkpoint, and one that returns to it."""

from dataclasses import replace
from typing import Final

import pytest

from psserver.coordinator.core.coordinator_effects import (
    Abort,
    Announce,
    EndJob,
    OrderSeed,
    Persist,
    Prepare,
    ReplaceStartPoint,
    ReturnToCheckpoint,
)
from psserver.coordinator.core.data.epoch_ledger import EpochLedger
from psserver.coordinator.core.job_progress import LOAD_RETRY_MS
from psserver.coordinator.core.start_point import SavedJob, StartPoint
from psserver.edge.coordinator_settings import (
    CheckpointSettings,
    CoordinatorSettings,
    JobPhase,
    ShardLossPolicy,
)
from pswire.checkpoint.place import CheckpointPlace
from pswire.leased_data import DataRange, EpochShape
from pswire.membership import FenceKind, Mode, WorkerState
from pswire.reasons import ErrorReason, Refusal
from tests.doubles.core_values import TERMS, key, sgd
from tests.doubles.driven_coordinator import DrivenCoordinator
from tests.refusals import refused

POINT: Final = StartPoint(
    place=CheckpointPlace("/checkpoints", "step-000000000024"),
    clock=12,
    version=24,
    mode=Mode.SSP,
    staleness_bound=2,
    generation=5,
    incarnation_floor=7000,
)

SHAPE: Final = EpochShape(position_count=40, batch_size=4, drop_last=False)


def piece(start: int) -> DataRange:
    return DataRange("loader", 1, start, start + 4)


def open_epoch() -> EpochLedger:
    """Epoch 1 of `loader`: a/2 and b/1 had two batches each, nobody the rest."""
    return EpochLedger(
        "loader",
        1,
        SHAPE,
        origin=b"state",
        order_digest=99,
        registrant=key("b"),
        cursor=24,
        held={key("a/2"): {piece(12)}, key("b"): {piece(8)}},
        queues={},
        consumed_count=16,
    )


def saved(point: StartPoint = POINT) -> SavedJob:
    return SavedJob(
        job_id="job",
        job_seed=0,
        point=point,
        terms=TERMS,
        epochs=(open_epoch(),),
    )


def begun(*, workers_min: int = 2, mode: Mode = POINT.mode) -> DrivenCoordinator:
    """A job whose coordinator has nothing but a checkpoint."""
    job = DrivenCoordinator(workers_min=workers_min)
    point = replace(POINT, mode=mode)
    job.core.restore(
        terms=TERMS,
        record=None,
        incarnations={"a": 2},
        processes={},
        now_ms=0,
        start_point=point,
    )
    job.core.restore_ledger(saved(point).copied_epochs())
    job.core.way_back = saved(point)
    return job


def test_it_starts_without_a_seeder_at_the_clock_of_the_checkpoint() -> None:
    job = begun()
    job.add_worker("b", "loader")
    job.add_shards()
    assert job.of(Prepare) == []
    job.add_worker("a", "loader")

    (prepare,) = job.of(Prepare)
    assert (prepare.kind, prepare.seeder) == (FenceKind.START, None)
    assert prepare.start_point is not None
    assert prepare.start_point.place == POINT.place
    assert job.of(OrderSeed) == []
    assert job.phase() is JobPhase.SEEDING
    job.report_all()

    (record,) = job.announced()
    assert record.is_start
    assert [(m.rank, m.base_clock, m.base_sequence) for m in record.members] == [
        (0, 12, 0),
        (1, 12, 0),
    ]
    assert (record.generation, record.mode, record.staleness_bound) == (6, Mode.SSP, 2)
    # Its steps count, and none of them is made again.
    assert record.version_at(12) == 24
    assert record.version_at(13) == 26
    assert record.mode_clock == 12


def test_starts_are_numbered_above_all_that_may_live() -> None:
    """Also of workers that the checkpoint does not know, which came after it."""
    job = begun()
    job.add_shards()
    names = [job.add_worker(name).worker for name in ("a", "new")]
    assert names == [key("a/7001"), key("new/7001")]
    assert [slot.incarnation for slot in job.core.shards.slots] == [7001, 7001]
    for lost in ("a/3", "new/1", "other/1"):
        with refused(ErrorReason.WORKER_INCARNATION_STALE):
            job.core.roster.entry(key(lost))


def test_what_a_worker_held_is_its_own_again_and_comes_first() -> None:
    job = begun(mode=Mode.BSP)
    a, b = job.add_worker("a", "loader"), job.add_worker("b", "loader")
    job.add_shards()
    job.report_all()

    ledger = job.core.ledger
    (epoch,) = ledger.epochs()
    participants = job.core.participants("loader")
    assert participants == (a.worker, b.worker)
    assert epoch.lease(a.worker, participants, 2) == [piece(12), piece(24)]
    assert epoch.lease(b.worker, participants, 2) == [piece(8), piece(28)]
    assert ledger.open_epoch(a.worker, "loader", 1, SHAPE, origin=b"mine") == b"state"
    persisted = next(e for e in job.of(Persist) if e.record is not None)
    assert [each.epoch for each in persisted.epochs] == [1]


def test_what_nobody_has_the_name_for_is_dealt_again() -> None:
    job = begun(workers_min=1, mode=Mode.BSP)
    c = job.add_worker("c", "loader")
    job.add_shards()
    job.report_all()

    (epoch,) = job.core.ledger.epochs()
    leased = epoch.lease(c.worker, job.core.participants("loader"), 6)
    assert leased == [piece(start) for start in (12, 8, 24, 28, 32, 36)]


def test_other_terms_are_refused_with_what_differs() -> None:
    job = begun()
    entry = job.register("a")
    job.watch(entry)
    other = replace(TERMS, optimizers=(replace(sgd(), class_name="Adam"),))
    with pytest.raises(Refusal, match=r"step-000000000024 .*; optimizer .* is SGD in"):
        job.core.join(entry, terms=other, loaders=(), now_ms=0)
    assert entry.state is WorkerState.REGISTERED


def test_a_shard_that_cannot_load_is_named_and_nothing_begins() -> None:
    job = begun()
    job.add_shards()
    job.add_worker("a")
    job.add_worker("b")
    damaged = replace(job.report_of(), failure="part-00000 is damaged")
    job.send(1, damaged)
    job.send(0, damaged)

    assert len(job.of(Abort)) == 1
    assert job.announced() == []
    assert job.core.waiting_for() == (
        "shard 1 to load checkpoint step-000000000024 (clock 12, version 24): "
        "part-00000 is damaged"
    )
    job.pass_time(LOAD_RETRY_MS - 1)
    assert len(job.of(Prepare)) == 1
    job.pass_time(1)
    assert len(job.of(Prepare)) == 2
    job.report_all()
    assert [record.is_start for record in job.announced()] == [True]


def test_a_start_that_loses_a_shard_is_made_again_from_the_checkpoint() -> None:
    job = begun(workers_min=1)
    job.add_worker("a")
    job.add_shards()
    job.break_shard(0)
    assert job.core.record is None
    slot = job.core.register_shard(process_id="next", address="host:5", now_ms=1)
    job.core.shard_watching(slot, 1)

    first, second = job.of(Prepare)
    assert second.fence_number > first.fence_number
    assert second.start_point == first.start_point


# All was there, and is lost


def running(policy: ShardLossPolicy | None = None) -> DrivenCoordinator:
    job = DrivenCoordinator.running("a", "b", loaders=("loader",))
    job.core.settings = replace(job.core.settings, shard_loss_policy=policy)
    job.core.way_back = saved(replace(POINT, incarnation_floor=0, mode=Mode.BSP))
    return job


def lose_shard(job: DrivenCoordinator, index: int) -> None:
    job.break_shard(index)
    job.pass_time(job.core.settings.lease_ttl_ms // 2)


def test_with_a_checkpoint_a_lost_shard_does_not_end_the_job() -> None:
    job = running()
    before = job.record
    lose_shard(job, 0)

    assert job.of(EndJob) == []
    (effect,) = job.of(ReturnToCheckpoint)
    # Generations go on: nothing of before is mistaken for what comes.
    assert effect.start_point.generation == before.generation
    assert job.core.record is None
    (persist,) = [each for each in job.of(Persist) if each.start_point is not None]
    assert persist.epochs == saved().epochs
    assert [shard.process_id for shard in persist.shards or ()] == ["", ""]
    states = {entry.state for entry in job.core.roster.in_state(*WorkerState)}
    assert states == {WorkerState.EVICTED}


def test_a_job_that_shall_fail_fails_though_it_has_a_checkpoint() -> None:
    job = running(ShardLossPolicy.FAIL)
    job.break_shard(1)
    assert "without which the job fails after 5 s" in job.core.waiting_for()
    with refused(ErrorReason.SHARD_UNKNOWN):
        job.core.register_shard(process_id="new", address="host:7", now_ms=job.now_ms)
    job.pass_time(job.core.settings.lease_ttl_ms // 2)
    assert [each.reason for each in job.of(EndJob)] == ["shard 1 at host:1 was lost"]
    assert job.of(ReturnToCheckpoint) == []


def test_a_job_that_shall_fail_goes_on_when_all_was_started_again() -> None:
    """Its shards are away, and nobody has lost them."""
    job = running(ShardLossPolicy.FAIL)
    for slot in job.core.shards.slots:
        slot.heard_ms, slot.is_watching = None, False  # as after a restart
        slot.broken_ms = job.now_ms
    job.pass_time(job.core.settings.lease_ttl_ms // 2)
    assert job.of(EndJob) == []
    assert len(job.of(ReturnToCheckpoint)) == 1


@pytest.mark.parametrize("policy", [None, ShardLossPolicy.WAIT])
def test_a_job_that_is_to_wait_for_shards_makes_a_checkpoint_at_its_start(
    policy: ShardLossPolicy | None,
) -> None:
    settings = CoordinatorSettings(
        job_id="job",
        shard_count=2,
        checkpoints=CheckpointSettings(url="/checkpoints"),
        shard_loss_policy=policy,
    )
    job = DrivenCoordinator.running("a", settings=settings)
    assert (job.core.fence is not None) is (policy is ShardLossPolicy.WAIT)


def test_after_it_the_job_starts_again_with_new_starts_of_all() -> None:
    job = running()
    lose_shard(job, 0)
    job.forget()
    for index in range(2):
        slot = job.core.register_shard(
            process_id=f"new-{index}", address=f"host:{index}", now_ms=job.now_ms
        )
        assert slot.incarnation == 2
        job.core.shard_watching(slot, job.now_ms)
    for name in ("b", "a"):
        assert job.fence_kinds() == []
        job.add_worker(name, "loader", process_id=f"process-{name}")
    assert job.fence_kinds() == [FenceKind.START]
    job.report_all()

    assert job.bases == {"a/2": 12, "b/2": 12}
    assert job.record.generation == 2
    assert job.of(Announce)[-1].record is job.record


def test_a_worker_that_does_not_join_again_is_waited_for_a_lease() -> None:
    job = running()
    lose_shard(job, 0)
    job.add_shards()
    job.add_worker("b", process_id="process-b")
    job.pass_time(job.core.settings.lease_ttl_ms - 1)
    assert job.core.fence is None
    job.pass_time(1)
    assert job.core.fence is not None
    assert job.core.fence.starters == (key("b/2"),)


def test_new_shards_have_the_job_return_at_once() -> None:
    """As many as are away: whoever starts them knows that those are dead."""
    job = running()
    job.break_shard(1)
    with refused(ErrorReason.RECOVERING, "returns to checkpoint step-000000000024"):
        job.core.register_shard(process_id="new", address="host:7", now_ms=job.now_ms)
    job.pass_time(job.core.settings.reconnect_grace_ms - 1)
    assert job.core.record is not None
    job.pass_time(1)
    assert job.core.record is None


def test_a_stray_shard_changes_nothing_while_all_are_there() -> None:
    job = running()
    with refused(ErrorReason.SHARD_UNKNOWN):
        job.core.register_shard(process_id="new", address="host:7", now_ms=job.now_ms)
    job.pass_time(1_000)
    assert job.core.record is not None


def test_one_that_comes_back_keeps_its_values_though_another_has_asked() -> None:
    job = running()
    job.break_shard(1)
    with pytest.raises(Refusal):
        job.core.register_shard(process_id="new", address="host:7", now_ms=job.now_ms)
    job.core.shard_watching(job.core.shards.slots[1], job.now_ms)
    job.pass_time(60_000)
    assert job.core.record is not None


def test_a_process_of_before_has_no_place_any_more() -> None:
    job = running()
    lose_shard(job, 0)
    slot = job.core.shards.slots[1]
    with refused(ErrorReason.SHARD_INCARNATION_STALE):
        job.core.shards.slot(1, slot.incarnation, "shard-1")


def test_the_checkpoint_can_be_returned_to_twice() -> None:
    job = running()
    lose_shard(job, 0)
    job.add_shards()
    a = job.add_worker("a", "loader", process_id="process-a")
    job.add_worker("b", "loader", process_id="process-b")
    job.report_all()
    (epoch,) = job.core.ledger.epochs()
    epoch.consume(a.worker, tuple(epoch.lease(a.worker, (), 9)))
    lose_shard(job, 0)

    (epoch,) = job.core.ledger.epochs()
    assert epoch == open_epoch()
    assert job.core.progress.start_point is not None
    assert job.core.progress.start_point.generation == 2


def test_a_job_that_returns_still_knows_which_numbers_are_taken() -> None:
    """Also its next coordinator, which has no others than what is kept."""
    job = begun(workers_min=1)
    job.add_worker("a")
    job.add_shards()
    job.report_all()
    lose_shard(job, 0)
    (effect,) = job.of(ReturnToCheckpoint)
    assert effect.start_point.incarnation_floor == POINT.incarnation_floor


# A checkpoint that shards can't load

OLDER: Final = replace(
    POINT, place=CheckpointPlace("/checkpoints", "step-000000000008"), version=8
)


def fail_load(job: DrivenCoordinator) -> ReplaceStartPoint:
    job.add_worker("a")
    job.add_shards()
    job.send(0, replace(job.report_of(), failure="part-0 is damaged"))
    (effect,) = job.of(ReplaceStartPoint)
    return effect


def test_a_checkpoint_that_a_shard_can_not_load_is_replaced_by_the_one_before() -> None:
    job = begun(workers_min=1)
    effect = fail_load(job)
    assert effect.reason.startswith("shard 0 to load checkpoint step-000000000024")
    assert effect.reason.endswith("part-0 is damaged")
    job.core.replace_start_point(saved(OLDER), effect.reason, job.now_ms)
    job.forget()
    for index in range(2):
        slot = job.core.register_shard(
            process_id=f"again-{index}", address=f"host:{index}", now_ms=job.now_ms
        )
        assert slot.incarnation == 7002
        job.core.shard_watching(slot, job.now_ms)
    (prepare,) = job.of(Prepare)
    assert prepare.start_point is not None
    assert prepare.start_point.place == OLDER.place
    assert prepare.start_point.incarnation_floor == POINT.incarnation_floor
    job.report_all()
    assert job.record.version_at(POINT.clock) == 8


def test_without_another_one_the_same_is_tried_again() -> None:
    """Its folder may not be mounted yet where the shard runs."""
    job = begun(workers_min=1)
    effect = fail_load(job)
    job.core.replace_start_point(saved(), effect.reason, job.now_ms)
    assert job.of(ReturnToCheckpoint) == []
    job.pass_time(LOAD_RETRY_MS)
    first, second = job.of(Prepare)
    assert second.start_point == first.start_point


def test_a_worker_is_told_that_the_job_has_returned() -> None:
    job = running()
    lose_shard(job, 0)
    with pytest.raises(Refusal) as caught:
        job.core.roster.entry(key("a"))
    assert caught.value.facts["cause"].startswith("the job has returned to checkpoint")


def test_a_lost_shard_is_named_with_the_checkpoint_that_the_job_returns_to() -> None:
    job = DrivenCoordinator.running("a")
    job.core.way_back = saved()
    job.core.shard_broken(job.core.shards.slots[1], job.now_ms)
    job.pass_time(100)
    assert job.core.waiting_for().endswith(
        f", without which the job returns to {POINT} after 5 s"
    )


def test_shards_that_were_not_there_since_a_restart_are_waited_for_longer() -> None:
    job = running()
    settings = job.core.settings
    for slot in job.core.shards.slots:
        slot.heard_ms, slot.is_watching = None, False  # as after a restart
        slot.broken_ms = job.now_ms + settings.return_ms
    after_ms = settings.return_ms + settings.lease_ttl_ms // 2
    assert job.core.waiting_for().startswith(
        "shard 0 (not connected yet), shard 1 (not connected yet), without which the "
        f"job returns to {POINT} after {after_ms / 1000:g} s"
    )
    job.pass_time(after_ms - 1)
    assert job.of(ReturnToCheckpoint) == []
    job.pass_time(1)
    assert len(job.of(ReturnToCheckpoint)) == 1


def test_shards_that_live_get_their_places_again_and_a_new_one_that_of_the_lost() -> (
    None
):
    """Also where the new one asks first, as one does that was waiting."""
    job = running()
    lose_shard(job, 1)
    assert job.core.waiting_for().startswith(
        "shard 0 (not connected yet), shard 1 (lost: a new one has to take its place)"
    )
    for process_id, wanted in (("new", None), ("again", 0)):
        slot = job.core.register_shard(
            process_id=process_id, address="a:1", now_ms=1, wanted_index=wanted
        )
        job.core.shard_watching(slot, 1)
    assert [slot.process_id for slot in job.core.shards.slots] == ["again", "new"]


def test_a_shard_gets_the_place_that_it_asks_for_if_that_is_free() -> None:
    job = DrivenCoordinator(shard_count=3)
    places = [
        job.core.register_shard(
            process_id=f"p{number}", address="a:1", now_ms=0, wanted_index=wanted
        ).index
        for number, wanted in enumerate((2, 2, None))
    ]
    assert places == [2, 0, 1]


def test_the_reason_of_a_return_says_which_shard_was_lost_and_when() -> None:
    job = running()
    lose_shard(job, 1)
    (effect,) = job.of(ReturnToCheckpoint)
    assert effect.reason == "shard 1 was lost 5 s ago at clock 0"
