"""The coordinator's file: one process's alone, whole after any restart."""

import json
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from psserver.coordinator.core.coordinator_effects import Persist
from psserver.coordinator.core.data.epoch_ledger import EpochLedger
from psserver.coordinator.core.shard_map import ShardSlot
from psserver.coordinator.storage.job_codec import StoredJob, StoredShard
from psserver.coordinator.storage.job_store import (
    DATABASE,
    FORMAT_VERSION,
    WRITE_AHEAD_LOG,
    DamagedStateError,
    JobStore,
    NotWrittenError,
)
from psserver.edge.memory_grant import MemoryGrant
from psserver.edge.state_folder import StateFolderError
from pswire.leased_data import EpochShape
from tests.doubles.core_values import TERMS, key, record
from tests.doubles.full_disk import file_size_limit

MEMORY = MemoryGrant(1 << 40, "host")

SHARDS = (
    StoredShard(
        index=0, process_id="p", address="host:1", incarnation=1, memory=MEMORY
    ),
    StoredShard(index=1, process_id="q", address="host:2", incarnation=3),
)

SLOTS = (
    ShardSlot(index=0, process_id="p", address="host:1", incarnation=1, memory=MEMORY),
    ShardSlot(index=1, process_id="q", address="host:2", incarnation=3),
    ShardSlot(index=2),
)

ENROLMENTS = (("loader", (key("a"), key("b"))),)


def new_job(folder: Path) -> JobStore:
    store = JobStore(folder)
    store.save_job(job_id="job-1", job_seed=(1 << 62) - 1, shard_count=2)
    return store


def loaded(folder: Path) -> StoredJob:
    """The job as the next process finds it."""
    with JobStore(folder) as store:
        stored = store.load()
    assert stored is not None
    return stored


def execute(folder: Path, statement: str, *values: str | bytes) -> None:
    with closing(sqlite3.connect(folder / "job.sqlite")) as database, database:
        database.execute(statement, values)


def test_a_new_folder_holds_nothing(tmp_path: Path) -> None:
    with JobStore(tmp_path / "made" / "on" / "the" / "way") as store:
        assert store.load() is None
        assert store.load_epochs() == ()


def test_everything_survives_a_restart(tmp_path: Path) -> None:
    shape = EpochShape(position_count=8, batch_size=2, drop_last=False)
    epochs = (EpochLedger("loader", 0, shape), EpochLedger("loader", 1, shape))
    epochs[0].lease(key("a"), (key("a"), key("b")), 1)
    with new_job(tmp_path) as store:
        store.write(Persist(terms=TERMS))
        newest = record({"a": 0, "b": 3}, generation=4)
        store.write(Persist(record=newest, enrolments=ENROLMENTS))
        store.write(Persist(shards=SLOTS))
        store.write(
            Persist(incarnations={"a": 1, "b": 7}, processes={key("b/7"): "process"})
        )
        for epoch in (*epochs, epochs[0]):
            store.write(Persist(epochs=(epoch,)))

    with JobStore(tmp_path) as store:
        assert store.load() == StoredJob(
            job_id="job-1",
            job_seed=(1 << 62) - 1,
            shard_count=2,
            terms=TERMS,
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
    assert loaded(tmp_path) == StoredJob(
        job_id="job-1", job_seed=(1 << 62) - 1, shard_count=2
    )


def test_the_newest_of_everything_counts(tmp_path: Path) -> None:
    with new_job(tmp_path) as store:
        for generation in (1, 2, 3):
            store.write(Persist(record=record({"a": 0}, generation=generation)))
    assert loaded(tmp_path).record == record({"a": 0}, generation=3)


def test_a_record_and_the_data_that_it_settles_are_kept_as_one(tmp_path: Path) -> None:
    """A process that dies between the two: neither is there."""
    shape = EpochShape(position_count=8, batch_size=2, drop_last=False)
    ledger = EpochLedger("loader", 0, shape)
    with new_job(tmp_path) as store:
        store.write(Persist(epochs=(ledger,)))
        ledger.consume(key("a"), tuple(ledger.lease(key("a"), (), 1)))
        store.write(Persist(record=record({"a": 0}, generation=1), epochs=(ledger,)))
        assert store.load_epochs() == (ledger,)
        unwritable = EpochLedger("loader", 1, shape, order_digest=object())  # type: ignore[arg-type]
        with pytest.raises(TypeError):
            store.write(
                Persist(
                    record=record({"a": 0}, generation=2), epochs=(ledger, unwritable)
                )
            )
        store.write(Persist(incarnations={"a": 1}))

    with JobStore(tmp_path) as store:
        assert store.load_epochs() == (ledger,)
    assert loaded(tmp_path).record == record({"a": 0}, generation=1)


def test_a_full_disk_is_no_end_while_the_log_has_room(tmp_path: Path) -> None:
    """The log is begun anew: what it has taken before is room enough."""
    with new_job(tmp_path) as store:
        for generation in range(30):
            store.write(Persist(record=record({"a": 0}, generation=generation)))
        size = (tmp_path / WRITE_AHEAD_LOG).stat().st_size
        with file_size_limit(size):
            for generation in range(30, 200):
                store.write(Persist(record=record({"a": 0}, generation=generation)))
    assert loaded(tmp_path).record == record({"a": 0}, generation=199)


def test_what_the_disk_refuses_leaves_all_as_it_was(tmp_path: Path) -> None:
    with new_job(tmp_path) as store:
        store.write(Persist(record=record({"a": 0}, generation=1)))
        with file_size_limit(0), pytest.raises(NotWrittenError, match=DATABASE):
            store.write(Persist(record=record({"a": 0}, generation=2)))
        stored = store.load()
        assert stored is not None
        assert stored.record == record({"a": 0}, generation=1)
        store.write(Persist(incarnations={"a": 1}))
    stored = loaded(tmp_path)
    assert stored.record == record({"a": 0}, generation=1)
    assert stored.incarnations == {"a": 1}


def test_a_start_on_a_full_disk_says_so(tmp_path: Path) -> None:
    with new_job(tmp_path) as store:
        with (
            file_size_limit(0),
            pytest.raises(StateFolderError, match="is the disk full"),
        ):
            store.count_start()
        assert store.count_start() == 1


def test_a_record_is_durable_when_saving_returns(tmp_path: Path) -> None:
    """A process that is killed right after it: no close, no goodbye."""
    program = (
        "import os, sys; from pathlib import Path;"
        "from psserver.coordinator.storage.job_store import JobStore;"
        "from psserver.coordinator.core.coordinator_effects import Persist;"
        "from pswire.membership import FenceKind, Record;"
        "store = JobStore(Path(sys.argv[1]));"
        "store.save_job(job_id='job', job_seed=1, shard_count=1);"
        "store.write(Persist(record=Record(fence_number=5, generation=5,"
        " kind=FenceKind.MEMBERSHIP, members=())));"
        "os.kill(os.getpid(), 9)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], check=False, timeout=120
    )
    assert ended.returncode == -9

    newest = loaded(tmp_path).record
    assert newest is not None
    assert newest.generation == 5


def test_records_are_flushed_to_the_disk(tmp_path: Path) -> None:
    with JobStore(tmp_path) as store:
        (synchronous,) = store._db.execute("PRAGMA synchronous").fetchone()
        (journal,) = store._db.execute("PRAGMA journal_mode").fetchone()
    assert (synchronous, journal) == (2, "wal")


def test_a_second_coordinator_is_kept_out(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path;"
        "from psserver.coordinator.storage.job_store import JobStore;"
        "JobStore(Path(sys.argv[1]))"
    )
    with new_job(tmp_path):
        ended = subprocess.run(
            [sys.executable, "-c", program, str(tmp_path)],
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
    assert ended.returncode == 1
    assert "StateFolderError" in ended.stderr
    assert "is another coordinator using it" in ended.stderr


def test_a_file_of_another_format_is_refused_by_name(tmp_path: Path) -> None:
    with new_job(tmp_path):
        pass
    execute(tmp_path, "UPDATE facts SET value = '1' WHERE name = 'format'")

    said = f"has format 1, this release writes {FORMAT_VERSION}"
    with pytest.raises(StateFolderError, match=said):
        JobStore(tmp_path)


def test_a_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    (tmp_path / "job.sqlite").write_text("no database " * 100)
    with pytest.raises(
        StateFolderError, match=r"job\.sqlite .* is damaged: file is not"
    ):
        JobStore(tmp_path)


KILLED = """
import os, signal, sys
from pathlib import Path
from psserver.coordinator.storage.job_store import JobStore
store = JobStore(Path(sys.argv[1]))
store.save_job(job_id="job-1", job_seed=7, shard_count=2)
os.kill(os.getpid(), signal.SIGKILL)
"""


def killed_job(folder: Path) -> None:
    """A folder whose coordinator was killed."""
    subprocess.run(
        [sys.executable, "-c", KILLED, str(folder)], check=False, timeout=120
    )


def test_after_a_kill_the_newest_state_is_there(tmp_path: Path) -> None:
    killed_job(tmp_path)
    assert loaded(tmp_path).job_seed == 7


def test_a_database_that_is_damaged_stays_as_it_is_beside_its_log(
    tmp_path: Path,
) -> None:
    """At its end SQLite merges the two."""
    killed_job(tmp_path)
    (tmp_path / "job.json").write_text(json.dumps({"job_id": "another"}))
    (tmp_path / "job.sqlite").write_bytes(b"no database" * 1_000)
    before = {each.name: each.read_bytes() for each in tmp_path.iterdir()}

    with pytest.raises(DamagedStateError):
        JobStore(tmp_path)
    assert {name: (tmp_path / name).read_bytes() for name in before} == before


@pytest.mark.parametrize(
    ("lost", "told"),
    [
        (
            ["job.sqlite-wal"],
            "job.sqlite-wal in state folder .* is damaged: it is miss",
        ),
        (["job.sqlite", "job.sqlite-wal"], "job.sqlite .* damaged: No such file"),
    ],
    ids=["log", "database"],
)
def test_a_killed_jobs_missing_file_begins_no_new_job(
    tmp_path: Path, lost: list[str], told: str
) -> None:
    killed_job(tmp_path)
    for name in lost:
        (tmp_path / name).unlink()
    before = sorted(tmp_path.iterdir())

    with pytest.raises(StateFolderError, match=told):
        JobStore(tmp_path)
    assert sorted(tmp_path.iterdir()) == before


def test_a_log_that_was_merged_is_not_missed_once_that_is_said(tmp_path: Path) -> None:
    killed_job(tmp_path)
    reader = sqlite3.connect(tmp_path / "job.sqlite")
    reader.execute("SELECT 1 FROM facts")
    reader.close()
    assert not (tmp_path / "job.sqlite-wal").exists()
    with pytest.raises(StateFolderError, match="PRAGMA journal_mode=DELETE"):
        JobStore(tmp_path)

    execute(tmp_path, "PRAGMA journal_mode=DELETE")

    with JobStore(tmp_path) as store:
        assert store.load() is not None


def test_the_database_of_another_job_is_refused(tmp_path: Path) -> None:
    with new_job(tmp_path / "mine"):
        pass
    with JobStore(tmp_path / "other") as store:
        store.save_job(job_id="job-2", job_seed=1, shard_count=1)
    (tmp_path / "other" / "job.sqlite").replace(tmp_path / "mine" / "job.sqlite")

    with pytest.raises(
        StateFolderError, match="is of job job-1, the database has job-2"
    ):
        JobStore(tmp_path / "mine")


def test_a_folder_of_a_release_without_an_identity_gets_one(tmp_path: Path) -> None:
    with new_job(tmp_path):
        pass
    (tmp_path / "job.json").unlink()
    with JobStore(tmp_path):
        pass
    assert (tmp_path / "job.json").exists()


def flip(database: Path) -> None:
    data = bytearray(database.read_bytes())
    for position in range(100, len(data), 37):
        data[position] ^= 0x5A
    database.write_bytes(data)


def cut_off(database: Path) -> None:
    database.write_bytes(database.read_bytes()[: database.stat().st_size // 2])


@pytest.mark.parametrize("damage", [flip, cut_off], ids=["flipped", "cut off"])
def test_a_damaged_database_is_refused(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    with new_job(tmp_path):
        pass
    damage(tmp_path / "job.sqlite")
    with (
        pytest.raises(
            StateFolderError, match=r"job\.sqlite in state folder .* damaged"
        ),
        JobStore(tmp_path) as store,
    ):
        store.load()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("record", '{"fence_number": 1,'),
        ("record", "{}"),
        ("job", "[1, 2, 3]"),
        ("model", "{}"),
        ("shards", b"\xff\x00"),
        ("shards", "7"),
        ("incarnations", "[" * 100_000),
        ("incarnations", '{"w0": "x"}'),
        ("enrolments", '{"loader": 1}'),
        ("worker_processes", "[[1]]"),
        ("incarnations", '{"w0": "\x1b[31m\\n"}'),
        ("step_rules", "\x1b]0;title\x07"),
        ("format", "\x1b\n9"),
    ],
)
def test_a_value_that_can_not_be_read_is_refused(
    tmp_path: Path, name: str, value: str | bytes
) -> None:
    with new_job(tmp_path):
        pass
    execute(tmp_path, "INSERT OR REPLACE INTO facts VALUES (?, ?)", name, value)

    with (
        pytest.raises(StateFolderError, match=r"Nothing was") as caught,
        JobStore(tmp_path) as store,
    ):
        store.load()
    assert f"is damaged: the entry {name!r} in it can't be read. " in str(caught.value)
    assert str(caught.value).isprintable(), "nothing of the bytes that are there"


def damaged_by(statement: str) -> Callable[[Path], None]:
    """Damage that SQLite itself has no eye for."""
    return lambda folder: execute(folder, statement)


def load_all(folder: Path) -> None:
    with JobStore(folder) as store:
        store.load_splits()
        store.load_epochs()


def identity_of(text: bytes) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        (folder / "job.json").write_bytes(text)

    return damage


def make_identity_a_folder(folder: Path) -> None:
    (folder / "job.json").unlink()
    (folder / "job.json").mkdir()


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (
            damaged_by("UPDATE facts SET value = CAST(X'fffe' AS TEXT)"),
            "job.sqlite .* is damaged: the entry 'job' in it can't be read",
        ),
        (
            damaged_by("INSERT INTO splits VALUES ('s', CAST(X'1bff' AS TEXT))"),
            "the table 'splits' in it can't be read",
        ),
        (
            damaged_by("INSERT INTO epochs VALUES ('l', 0, X'1bff')"),
            "the table 'epochs' in it can't be read",
        ),
        (
            damaged_by("ALTER TABLE epochs RENAME COLUMN loader TO x"),
            "the table 'epochs'",
        ),
        (identity_of(b"\xff\x00"), "job.json .* is damaged: it names no job"),
        (
            identity_of(b'{"job_id": "\\u001b[31m"}'),
            r"folder is of job \\x1b\[31m, the database has job-1",
        ),
        (make_identity_a_folder, "job.json .* is damaged: it is a folder"),
    ],
)
def test_a_refusal_quotes_nothing_of_what_is_there(
    tmp_path: Path, damage: Callable[[Path], None], says: str
) -> None:
    with new_job(tmp_path):
        pass
    damage(tmp_path)
    with pytest.raises(StateFolderError, match=says) as caught:
        load_all(tmp_path)
    assert "Put the files of the folder back from a copy" in str(caught.value)
    assert str(caught.value).isprintable()


def test_what_is_kept_is_for_its_owner_alone(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    with new_job(folder):
        kept = {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir()}
    assert folder.stat().st_mode & 0o777 == 0o700
    assert set(kept) == {"job.sqlite", "job.sqlite-wal", "job.json"}
    assert set(kept.values()) == {0o600}


def test_a_folder_that_can_not_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StateFolderError, match="can't be used"):
        JobStore(tmp_path / "file" / "folder")


def test_starts_are_counted(tmp_path: Path) -> None:
    with new_job(tmp_path) as store:
        assert store.count_start() == 1
    with JobStore(tmp_path) as store:
        assert store.count_start() == 2
