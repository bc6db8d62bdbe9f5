"""A script that is run again on a finished job is told so as it joins."""

import pytest

from psserver.core.coordinator import NEW_JOB_CURE
from psserver.core.epoch_ledger import EpochShape
from psserver.core.ledger import DataLedger
from psserver.core.push import DataRange
from psserver.core.record import WorkerKey
from psserver.core.shard_standing import ShardStanding
from pswire.reasons import ErrorReason, Refusal
from pswire.schema import ElementType, ModelSchema, SchemaEntry
from tests.doubles.core_values import OPTIMIZERS, key
from tests.doubles.driven_coordinator import DrivenCoordinator

SHAPE = EpochShape(position_count=4, batch_size=4, drop_last=False)


def train(ledger: DataLedger, worker: WorkerKey, *epochs: int) -> None:
    for epoch in epochs:
        ledger.open_epoch(worker, "train", epoch, SHAPE)
        book = ledger.register_order(worker, "train", epoch, 11)
        book.lease(worker, (worker,), 1)
        ledger.consume(worker, (DataRange("train", epoch, 0, 4),))
        assert book.is_closed


def finished(*epochs: int) -> DrivenCoordinator:
    """A job whose one worker has trained these epochs and has left."""
    job = DrivenCoordinator.running("a")
    train(job.core.ledger, key("a"), *epochs)
    entry = job.core.roster.present("a")
    assert entry is not None
    job.leave(entry, 300)
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
        job.core.join(entry, schema=other, optimizers=OPTIMIZERS, loaders=(), now_ms=0)
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
