"""The coordinator's file: one process's alone, whole after any restart."""

import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from psserver.core.epoch_ledger import EpochLedger, EpochShape
from psserver.storage.job_codec import StoredJob, StoredShard
from psserver.storage.job_store import FORMAT_VERSION, JobStore
from psserver.storage.state_folder import StateFolderError
from tests.doubles.core_values import OPTIMIZERS, SCHEMA, key, record

SHARDS = (
    StoredShard(index=0, process_id="p", address="host:1", incarnation=1),
    StoredShard(index=1, process_id="q", address="host:2", incarnation=3),
)

ENROLMENTS = (("loader", (key("a"), key("b"))),)


def new_job(folder: Path) -> JobStore:
    store = JobStore(folder)
    store.save_job(job_id="job-1", job_seed=(1 << 62) - 1, shard_count=2)
    return store


def test_a_new_folder_holds_nothing(tmp_path: Path) -> None:
    with JobStore(tmp_path / "made" / "on" / "the" / "way") as store:
        assert store.load() is None
        assert store.load_epochs() == ()


def test_everything_survives_a_restart(tmp_path: Path) -> None:
    shape = EpochShape(position_count=8, batch_size=2, drop_last=False)
    epochs = (EpochLedger("loader", 0, shape), EpochLedger("loader", 1, shape))
    epochs[0].lease(key("a"), (key("a"), key("b")), 1)
    with new_job(tmp_path) as store:
        store.save_model(SCHEMA, OPTIMIZERS)
        store.save_record(record({"a": 0, "b": 3}, generation=4), enrolments=ENROLMENTS)
        store.save_shards(SHARDS)
        store.save_workers({"a": 1, "b": 7}, {key("b/7"): "process"})
        for epoch in (*epochs, epochs[0]):
            store.save_epoch(epoch)

    with JobStore(tmp_path) as store:
        assert store.load() == StoredJob(
            job_id="job-1",
            job_seed=(1 << 62) - 1,
            shard_count=2,
            schema=SCHEMA,
            optimizers=OPTIMIZERS,
            record=record({"a": 0, "b": 3}, generation=4),
            shards=SHARDS,
            incarnations={"a": 1, "b": 7},
            worker_processes={key("b/7"): "process"},
            enrolments=ENROLMENTS,
        )
        assert store.load_epochs() == epochs


def test_a_job_that_has_not_started_survives_too(tmp_path: Path) -> None:
    with new_job(tmp_path):
        pass
    with JobStore(tmp_path) as store:
        stored = store.load()
    assert stored == StoredJob(job_id="job-1", job_seed=(1 << 62) - 1, shard_count=2)


def test_the_newest_of_everything_counts(tmp_path: Path) -> None:
    with new_job(tmp_path) as store:
        for generation in (1, 2, 3):
            store.save_record(record({"a": 0}, generation=generation))
        stored = store.load()
    assert stored is not None
    assert stored.record == record({"a": 0}, generation=3)


def test_a_record_and_the_data_that_it_settles_are_kept_as_one(tmp_path: Path) -> None:
    """A process that dies between the two: neither is there."""
    shape = EpochShape(position_count=8, batch_size=2, drop_last=False)
    ledger = EpochLedger("loader", 0, shape)
    with new_job(tmp_path) as store:
        store.save_epoch(ledger)
        ledger.consume(key("a"), tuple(ledger.lease(key("a"), (), 1)))
        store.save_record(record({"a": 0}, generation=1), (ledger,))
        assert store.load_epochs() == (ledger,)
        unwritable = EpochLedger("loader", 1, shape, order_digest=object())  # type: ignore[arg-type]
        with pytest.raises(TypeError):
            store.save_record(record({"a": 0}, generation=2), (ledger, unwritable))
        store.save_workers({"a": 1}, {})

    with JobStore(tmp_path) as store:
        stored = store.load()
        assert store.load_epochs() == (ledger,)
    assert stored is not None
    assert stored.record == record({"a": 0}, generation=1)


def test_a_record_is_durable_when_saving_returns(tmp_path: Path) -> None:
    """A process that is killed right after it: no close, no goodbye."""
    program = (
        "import os, sys; from pathlib import Path;"
        "from psserver.storage.job_store import JobStore;"
        "from psserver.core.record import FenceKind, Record;"
        "store = JobStore(Path(sys.argv[1]));"
        "store.save_job(job_id='job', job_seed=1, shard_count=1);"
        "store.save_record(Record(fence_number=5, generation=5,"
        " kind=FenceKind.MEMBERSHIP, members=()));"
        "os.kill(os.getpid(), 9)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], check=False, timeout=30
    )
    assert ended.returncode == -9

    with JobStore(tmp_path) as store:
        stored = store.load()
    assert stored is not None
    assert stored.record is not None
    assert stored.record.generation == 5


def test_records_are_flushed_to_the_disk(tmp_path: Path) -> None:
    with JobStore(tmp_path) as store:
        (synchronous,) = store._db.execute("PRAGMA synchronous").fetchone()
        (journal,) = store._db.execute("PRAGMA journal_mode").fetchone()
    assert (synchronous, journal) == (2, "wal")


def test_a_second_coordinator_is_kept_out(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path;"
        "from psserver.storage.job_store import JobStore;"
        "JobStore(Path(sys.argv[1]))"
    )
    with new_job(tmp_path):
        ended = subprocess.run(
            [sys.executable, "-c", program, str(tmp_path)],
            capture_output=True,
            text=True,
            check=False,
            timeout=30,
        )
    assert ended.returncode == 1
    assert "StateFolderError" in ended.stderr
    assert "is another coordinator using it" in ended.stderr


def test_a_file_of_another_format_is_refused_by_name(tmp_path: Path) -> None:
    with new_job(tmp_path):
        pass
    database = sqlite3.connect(tmp_path / "job.sqlite")
    database.execute("UPDATE facts SET value = '1' WHERE name = 'format'")
    database.commit()
    database.close()

    with pytest.raises(StateFolderError) as caught:
        JobStore(tmp_path)
    assert f"has format 1, this release writes {FORMAT_VERSION}" in str(caught.value)


def test_a_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    (tmp_path / "job.sqlite").write_text("no database " * 100)
    with pytest.raises(StateFolderError, match="can't be used"):
        JobStore(tmp_path)


def test_a_folder_that_can_not_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StateFolderError, match="can't be used"):
        JobStore(tmp_path / "file" / "folder")


def test_starts_are_counted(tmp_path: Path) -> None:
    with new_job(tmp_path) as store:
        assert store.count_start() == 1
    with JobStore(tmp_path) as store:
        assert store.count_start() == 2
