"""A script that is run again on a finished job is told so, and may go in peace."""

import pytest

from psserver.coordinator.core.coordinator import NEW_JOB_CURE, CoordinatorCore
from psserver.coordinator.core.data.ledger import DataLedger
from psserver.coordinator.core.roster import PRESENT, WorkerEntry
from psserver.coordinator.core.shard_map import ShardStanding
from psserver.edge.coordinator_settings import CoordinatorSettings, JobPhase
from pswire.job_terms import JobTerms
from pswire.leased_data import DataRange, DataReport, EpochShape
from pswire.membership import LossPolicy, StepAtomicity, WorkerKey
from pswire.reasons import ErrorReason, Refusal
from pswire.schema import ElementType, ModelSchema, SchemaEntry
from tests.doubles.core_values import OPTIMIZERS, TERMS, key
from tests.doubles.driven_coordinator import DrivenCoordinator

SHAPE = EpochShape(position_count=4, batch_size=4, drop_last=False)


def train(ledger: DataLedger, worker: WorkerKey, *epochs: int) -> None:
    for epoch in epochs:
        ledger.open_epoch(worker, "train", epoch, SHAPE)
        book = ledger.register_order(worker, "train", epoch, 11)
        book.lease(worker, (worker,), 1)
        used = DataRange("train", epoch, 0, 4)
        ledger.take_report(worker, DataReport((used,)))
        assert book.is_closed


def finished(
    *epochs: int, workers_min: int = 1, policy: LossPolicy = LossPolicy.CONTINUE
) -> DrivenCoordinator:
    """A job whose workers have trained these epochs and have left."""
    settings = CoordinatorSettings(
        job_id="job",
        shard_count=2,
        workers_min=workers_min,
        worker_loss_policy=policy,
        step_atomicity=StepAtomicity.CLOCK,
    )
    names = ("a", "a2")[:workers_min]
    job = DrivenCoordinator.running(*names, settings=settings)
    train(job.core.ledger, key("a"), *epochs)
    for name in names:
        entry = job.core.roster.present(name)
        assert entry is not None
        job.leave(entry, 300 if name == "a" else 0)
    while job.core.fence is not None:
        job.report_all(applied=300, trailer=300)
    assert not job.record.members
    return job


def test_who_joins_a_finished_job_is_told_how_to_begin_a_new_one() -> None:
    job = finished(0, 1, 2)
    assert job.core.joining_note() == (
        "this job is finished: all of its workers have left, after clock 300; 3 epochs "
        "of 'train' are trained, up to epoch 2. This worker goes on from its values; "
        f"{NEW_JOB_CURE}"
    )


def test_the_second_worker_of_the_same_run_is_told_too() -> None:
    job = finished(0)
    note = job.core.joining_note()
    job.add_worker("a")
    assert job.core.joining_note() == note
    job.report_all(applied=300, trailer=300)
    assert "a/2" in job.bases
    assert job.core.joining_note() == note


def test_a_restart_does_not_forget_that_who_has_joined_has_trained_nothing() -> None:
    job = finished(0)
    note = job.core.joining_note()
    joined(job, "b")
    again = CoordinatorCore(job.core.settings, start_count=1)
    again.restore(
        terms=TERMS, record=job.record, incarnations={}, processes={}, now_ms=0
    )
    again.restore_ledger(job.core.ledger.epochs())
    assert note
    assert again.joining_note() == job.core.joining_note() == note


def test_once_they_train_on_a_late_worker_is_told_nothing() -> None:
    job = finished(0)
    assert job.core.joining_note()
    job.add_worker("b")
    job.report_all(applied=300, trailer=300)
    for slot in job.core.shards.slots:
        slot.standing = ShardStanding(heard_ms=0, done={key("b"): 1})
    assert job.core.joining_note() == ""


def test_a_job_at_work_and_one_that_has_not_begun_are_not_finished() -> None:
    job = DrivenCoordinator.running("a")
    assert job.core.joining_note() == ""
    train(job.core.ledger, key("a"), 0)
    assert job.core.joining_note() == ""
    assert DrivenCoordinator().core.joining_note() == ""


def test_a_job_whose_workers_left_in_the_middle_of_an_epoch_goes_on() -> None:
    job = finished(0)
    job.core.ledger.open_epoch(key("a"), "train", 1, SHAPE)
    assert job.core.joining_note() == ""


def test_another_model_on_a_finished_job_is_a_new_run() -> None:
    job = finished(0)
    entry = job.register("b")
    job.watch(entry)
    other = ModelSchema(
        (SchemaEntry(name="other", shape=(3,), element_type=ElementType.FLOAT32),)
    )
    with pytest.raises(Refusal, match=r"^this job is finished") as caught:
        job.core.join(
            entry,
            terms=JobTerms(schema=other, optimizers=OPTIMIZERS),
            loaders=(),
            now_ms=0,
        )
    assert caught.value.reason is ErrorReason.SCHEMA_MISMATCH
    assert caught.value.cure == NEW_JOB_CURE


def test_other_data_for_an_epoch_that_is_over_is_a_new_run() -> None:
    ledger = DataLedger(7)
    train(ledger, key("a"), 0)
    other = EpochShape(position_count=9, batch_size=4, drop_last=False)
    with pytest.raises(Refusal, match="is trained already, with 4 samples") as caught:
        ledger.open_epoch(key("b"), "train", 0, other)
    assert caught.value.reason is ErrorReason.DATA_ORDER_MISMATCH
    assert "set_epoch(1)" in caught.value.text
    assert "same data set" not in caught.value.text
    train(ledger, key("a"), 1)
    with pytest.raises(Refusal) as caught:
        ledger.open_epoch(key("b"), "train", 0, other)
    assert "set_epoch(2)" in caught.value.text


# Who joins and does not train


def joined(job: DrivenCoordinator, *names: str) -> list[WorkerEntry]:
    """These workers join the finished job."""
    entries = [job.add_worker(name) for name in names]
    while job.core.fence is not None:
        job.report_all(applied=300, trailer=300)
    assert {str(entry.worker) for entry in entries} <= job.bases.keys()
    return entries


@pytest.mark.parametrize("policy", list(LossPolicy))
def test_a_script_that_ends_before_its_first_step_leaves_the_job_finished(
    policy: LossPolicy,
) -> None:
    job = finished(0, policy=policy)
    (entry,) = joined(job, "b")
    job.lose(entry)
    job.report_all(applied=300, trailer=300)
    assert job.phase() is JobPhase.FINISHED
    assert job.core.waiting_for() == ""
    assert job.core.joining_note().startswith("this job is finished")


@pytest.mark.parametrize("is_at_once", [True, False])
def test_two_such_scripts_leave_the_job_finished(is_at_once: bool) -> None:
    job = finished(0, workers_min=2)
    entries = joined(job, "b", "c")
    for entry in entries:
        job.core.worker_broken(entry, job.now_ms)
        if not is_at_once:
            job.pass_time(job.core.settings.reconnect_grace_ms)
            job.report_all(applied=300, trailer=300)
    if is_at_once:  # most streams broke: it may be the network, for a lease
        job.pass_time(job.core.settings.lease_ttl_ms)
        job.report_all(applied=300, trailer=300)
    assert job.phase() is JobPhase.FINISHED


def test_who_leaves_before_its_first_step_leaves_the_job_finished() -> None:
    job = finished(0)
    (entry,) = joined(job, "b")
    job.leave(entry)
    job.report_all(applied=300, trailer=300)
    assert job.phase() is JobPhase.FINISHED
    assert job.record.finished_step_count == 300


def test_a_coordinator_that_starts_again_meanwhile_knows_that_nobody_trained() -> None:
    before = finished(0)
    (entry,) = joined(before, "b")
    job = DrivenCoordinator(settings=before.core.settings)
    job.core.restore(
        terms=TERMS,
        record=before.record,
        incarnations=before.core.roster.incarnations,
        processes=before.core.roster.processes,
        now_ms=0,
    )
    job.add_shards()
    settings = job.core.settings
    job.pass_time(settings.return_ms)
    job.pass_time(settings.reconnect_grace_ms)
    job.report_all(applied=300, trailer=300)
    assert entry.worker not in {m.worker for m in job.record.members}
    assert job.phase() is JobPhase.FINISHED


@pytest.mark.parametrize("policy", list(LossPolicy))
def test_one_that_has_trained_on_keeps_its_place(policy: LossPolicy) -> None:
    job = finished(0, policy=policy)
    (entry,) = joined(job, "b")
    job.lose(entry)
    job.report_all(applied=301, trailer=301)  # its first push is on every shard
    assert job.core.fence is None
    assert job.bases.keys() == {"b/1"}
    assert job.core.progress.workers_floor == 1
    assert job.phase() is JobPhase.RUNNING
    assert job.core.waiting_for().startswith("b (lost ")
    job.pass_time(100_000)
    assert job.core.fence is None


def test_a_push_that_one_shard_lacks_is_no_training() -> None:
    job = finished(0)
    (entry,) = joined(job, "b")
    job.lose(entry)
    job.report(0, applied=300, complete={"b": 301}, trailer=301)
    job.report(1, applied=300)
    assert job.phase() is JobPhase.FINISHED


def test_with_the_first_step_the_next_record_has_the_floor_again() -> None:
    job = finished(0, workers_min=2)
    joined(job, "b")
    assert (job.core.progress.workers_floor, job.record.finished_step_count) == (0, 600)
    job.add_worker("c")
    job.report_all(applied=301, trailer=301)
    assert (job.core.progress.workers_floor, job.record.finished_step_count) == (2, -1)


def test_who_was_lost_as_the_job_finished_is_still_to_be_replaced_with_wait() -> None:
    settings = CoordinatorSettings(
        job_id="job",
        shard_count=2,
        worker_loss_policy=LossPolicy.WAIT,
        step_atomicity=StepAtomicity.CLOCK,
    )
    job = DrivenCoordinator.running("a", "b", settings=settings)
    entries = {e.worker.worker_id: e for e in job.core.roster.in_state(*PRESENT)}
    job.lose(entries["b"])
    job.leave(entries["a"], 3)
    job.report_all(applied=3)
    assert job.bases.keys() == {"b/1"}
    assert job.core.fence is None
    assert "--worker-id b" in job.core.waiting_for()
