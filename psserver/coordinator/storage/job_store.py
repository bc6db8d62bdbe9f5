"""The coordinator's durable state: one SQLite file, one process.

Records are committed with `synchronous=FULL` before they are announced. An exclusive
lock on the file keeps a second coordinator away from the same state folder.
Source: https://sqlite.org/wal.html, https://sqlite.org/pragma.html#pragma_synchronous
"""

import json
import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Final, Self, TypeVar

from psserver.coordinator.core.coordinator_effects import Persist
from psserver.coordinator.core.data.epoch_ledger import EpochLedger
from psserver.coordinator.storage.job_codec import (
    StoredJob,
    dump_enrolments,
    dump_epoch,
    dump_processes,
    dump_record,
    dump_shards,
    dump_start_point,
    load_enrolments,
    load_epoch,
    load_processes,
    load_record,
    load_shards,
    load_start_point,
)
from psserver.edge.state_folder import StateFolderError
from pswire import failpoints
from pswire.checkpoint.errors import UNREADABLE
from pswire.job_terms import JobTerms
from pswire.job_terms_codec import dump_terms, load_terms
from pswire.leased_data import RecordedSplit
from pswire.names import printable

T = TypeVar("T")

FORMAT_VERSION = 2
"""Format of the file; another one is refused by name."""

LOCK_TIMEOUT_S = 1.0
"""Wait for the file: its holder keeps it, so that a long wait only delays the news."""


LOG_PAGE_COUNT: Final = 50
"""Pages of the log, 200 KB, after which the database gets what is in it. SQLite's 1,000
would be 4 MB, which fill a small disk, and leave none for the database to grow."""

DATABASE: Final = "job.sqlite"
WRITE_AHEAD_LOG: Final = "job.sqlite-wal"
IDENTITY: Final = "job.json"
"""Names the job of the folder, so that a database that is gone is missed."""

_JOURNAL_VERSION: Final = slice(18, 20)
_IN_WAL_MODE: Final = b"\x02\x02"
"""Header of a database whose last process did not end in good order: part of its state
is in the write-ahead log. Source: https://sqlite.org/fileformat2.html"""

_UNREADABLE: Final = (*UNREADABLE, sqlite3.Error)
"""What reading the file raises where no release has written what is there."""


class NotWrittenError(Exception):
    """The disk did not take a change; the text says why."""


class DamagedStateError(StateFolderError):
    """Files of a job are damaged or missing: nothing that is there can be relied on."""


class JobStore:
    """The database in a state folder.

    Raises:
        StateFolderError: Another coordinator holds it, another release wrote it, or
            files of it are missing or damaged. Nothing in it was changed.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        identity = self._identity()
        self._check_log(identity)
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            # SQLite would make it readable for all; its log gets the same mode.
            os.close(os.open(folder / DATABASE, os.O_CREAT | os.O_RDWR, 0o600))
            # At its end a connection that writes would merge the log into a database
            # that may be damaged, and is to stay as it is then.
            self._db = self._opened("ro")
        except (OSError, sqlite3.Error) as error:
            raise self._unusable(error) from error
        try:
            with closing(self._db):
                self._check_database(identity)
            self._db = self._opened("rw")
            # One for all: a connection keeps a reference for each cursor that it has
            # made.
            self._writes = self._db.cursor()
            self._prepare()
        except sqlite3.Error as error:
            self._db.close()
            raise self._unusable(error) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._writes.close()
        # All is in the database then: without its log it is whole.
        with suppress(sqlite3.Error):  # no room: the log stays, for the next start
            self._db.execute("PRAGMA journal_mode=DELETE")
        self._db.close()

    def load(self) -> StoredJob | None:
        """What an earlier process left, None in a new folder.

        Raises:
            StateFolderError: What it left can't be read.
        """
        job = self._read("job", json.loads)
        if job is None:
            return None
        with self._reading("the entry 'job'"):
            measure_key = bytes.fromhex(job.pop("measure_key", ""))
            return StoredJob(
                **job,
                measure_key=measure_key,
                terms=self._read("model", _load_terms),
                record=self._read("record", load_record),
                shards=self._read("shards", load_shards) or (),
                incarnations=self._read("incarnations", _load_counts) or {},
                worker_processes=self._read("worker_processes", load_processes) or {},
                enrolments=self._read("enrolments", load_enrolments) or (),
                step_rules=self._read("step_rules", json.loads) or {},
                start_point=self._read("start_point", load_start_point),
            )

    @property
    def has_record(self) -> bool:
        """Whether the job has started, as far as an earlier process knew."""
        return self._get("record") is not None

    def load_epochs(self) -> tuple[EpochLedger, ...]:
        """The data ledger that an earlier process left, in the order of opening.

        Raises:
            StateFolderError: It can't be read.
        """
        with self._reading("the table 'epochs'"):
            rows = self._db.execute(
                "SELECT loader, epoch, value FROM epochs ORDER BY rowid"
            ).fetchall()
            return tuple(load_epoch(*row) for row in rows)

    def save_job(
        self, *, job_id: str, job_seed: int, shard_count: int, measure_key: bytes = b""
    ) -> None:
        """Keeps what makes the job this job."""
        job = {"job_id": job_id, "job_seed": job_seed, "shard_count": shard_count}
        job["measure_key"] = measure_key.hex()
        self._put_at_start(job=json.dumps(job))
        self._write_identity(job_id)

    def save_step_rules(self, rules: dict[str, str]) -> None:
        """Keeps how steps are made, which shards and workers know from their start."""
        self._put_at_start(step_rules=json.dumps(rules))

    def count_start(self) -> int:
        """Counts a start of the coordinator after the first; returns their number."""
        count = (self._read("later_starts", int) or 0) + 1
        self._put_at_start(later_starts=str(count))
        return count

    def write(self, change: Persist) -> None:
        """Makes a change durable, all of it or nothing.

        Data of a worker that a record ends is accounted for with it: one without the
        other would deal it twice, or never, after a restart.

        Raises:
            NotWrittenError: The disk does not take it; nothing is changed.
        """
        try:
            try:
                self._write_all(change)
            except sqlite3.OperationalError:
                # The log has the room that a change takes, once all that is in it is in
                # the database too.
                self._db.execute("PRAGMA wal_checkpoint(RESTART)")
                self._write_all(change)
        except sqlite3.Error as error:
            raise NotWrittenError(f"{error} ({self._folder / DATABASE})") from error

    def _write_all(self, change: Persist) -> None:
        with self._transaction():
            if change.start_point is not None:
                self._writes.execute("DELETE FROM facts WHERE name = 'record'")
                self._writes.execute("DELETE FROM epochs")
            for name, value in _facts_of(change).items():
                self._put(name, value)
            for ledger in change.epochs:
                self._writes.execute(
                    # In place: the order of the rows is that in which epochs were
                    # opened.
                    "INSERT INTO epochs VALUES (?, ?, ?) ON CONFLICT "
                    "(loader, epoch) DO UPDATE SET value = excluded.value",
                    (ledger.loader, ledger.epoch, dump_epoch(ledger)),
                )
            if change.split is not None:
                self._writes.execute(
                    "INSERT OR REPLACE INTO splits VALUES (?, ?)",
                    (change.split.name, json.dumps(asdict(change.split))),
                )

    def load_splits(self) -> tuple[RecordedSplit, ...]:
        """The splits that earlier processes recorded, in their order.

        Raises:
            StateFolderError: They can't be read.
        """
        with self._reading("the table 'splits'"):
            rows = self._db.execute(
                "SELECT value FROM splits ORDER BY rowid"
            ).fetchall()
            return tuple(RecordedSplit(**json.loads(value)) for (value,) in rows)

    def _opened(self, mode: str) -> sqlite3.Connection:
        path = (self._folder / DATABASE).absolute()
        return sqlite3.connect(
            f"{path.as_uri()}?mode={mode}",
            isolation_level=None,
            timeout=LOCK_TIMEOUT_S,
            uri=True,
        )

    def _prepare(self) -> None:
        # Exclusive: held from the first write to the end of the process.
        self._db.execute("PRAGMA locking_mode=EXCLUSIVE")
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=FULL")
        self._db.execute(f"PRAGMA wal_autocheckpoint={LOG_PAGE_COUNT}")
        self._db.execute(
            "CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value TEXT)"
        )
        self._db.execute(
            "CREATE TABLE IF NOT EXISTS epochs (loader TEXT, epoch INTEGER, "
            "value TEXT, PRIMARY KEY (loader, epoch))"
        )
        self._db.execute(
            "CREATE TABLE IF NOT EXISTS splits (name TEXT PRIMARY KEY, value TEXT)"
        )
        self._db.execute(
            "INSERT OR IGNORE INTO facts VALUES ('format', ?)", (str(FORMAT_VERSION),)
        )

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """All of what is written within, or nothing."""
        self._writes.execute("BEGIN")
        try:
            yield
            self._writes.execute("COMMIT")
        except BaseException:
            # Of some failures, as a full disk, SQLite has gone back already.
            if self._db.in_transaction:
                self._writes.execute("ROLLBACK")
            raise
        if failpoints.armed:
            failpoints.hit("coordinator.write_durable")

    def _get(self, name: str) -> str | None:
        row = self._db.execute(
            "SELECT value FROM facts WHERE name = ?", (name,)
        ).fetchone()
        return None if row is None else str(row[0])

    def _put(self, name: str, value: str) -> None:
        self._writes.execute(
            "INSERT OR REPLACE INTO facts VALUES (?, ?)", (name, value)
        )

    def _put_at_start(self, **facts: str) -> None:
        """Keeps facts of a start.

        Raises:
            StateFolderError: The disk does not take them.
        """
        try:
            with self._transaction():
                for name, value in facts.items():
                    self._put(name, value)
        except sqlite3.Error as error:
            raise self._unusable(error) from error

    # The folder

    def _identity(self) -> str | None:
        """The job that the folder is of, None when no job has begun here."""
        try:
            text = (self._folder / IDENTITY).read_text()
            return str(json.loads(text)["job_id"])
        except FileNotFoundError:
            return None
        except IsADirectoryError as error:
            raise self._damaged(IDENTITY, "it is a folder") from error
        except OSError as error:
            raise self._unusable(error) from error
        except _UNREADABLE as error:
            raise self._damaged(IDENTITY, "it names no job") from error

    def _write_identity(self, job_id: str) -> None:
        """After the database has the job: a crash in between loses nothing."""
        new = self._folder / f"{IDENTITY}.new"
        try:
            file = os.open(new, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600)
            try:
                os.write(file, json.dumps({"job_id": job_id}).encode())
                os.fsync(file)
            finally:
                os.close(file)
            new.replace(self._folder / IDENTITY)
            folder = os.open(self._folder, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        except OSError as error:
            raise self._unusable(error) from error

    def _check_log(self, identity: str | None) -> None:
        """Before SQLite sees the folder: it begins a new log where one is missing."""
        if identity is None or (self._folder / WRITE_AHEAD_LOG).exists():
            return
        try:
            with (self._folder / DATABASE).open("rb") as file:
                header = file.read(_JOURNAL_VERSION.stop)
        except PermissionError as error:
            raise self._unusable(error) from error
        except OSError as error:
            raise self._damaged(DATABASE, error.strerror or str(error)) from error
        if header[_JOURNAL_VERSION] == _IN_WAL_MODE:
            raise self._damaged(
                WRITE_AHEAD_LOG,
                "it is missing, and held the newest state, since the last coordinator "
                f"was killed. If it is gone since sqlite3 opened {DATABASE}, which "
                "merges the two, nothing is lost: say so with `sqlite3 "
                f"{DATABASE} 'PRAGMA journal_mode=DELETE'` and start again",
            )

    def _check_database(self, identity: str | None) -> None:
        """Checks that what is there is whole, and of the folder's job.

        Raises:
            StateFolderError: It is not.
            sqlite3.Error: It can't be read now.
        """
        found = self._db.execute("PRAGMA quick_check(1)").fetchone()[0]
        if found != "ok":
            raise self._damaged(DATABASE, f"SQLite finds {printable(str(found))}")
        has_facts = self._db.execute(
            "SELECT count(*) FROM sqlite_schema WHERE name = 'facts'"
        ).fetchone()[0]
        job_id = self._read("job", _job_id_of) if has_facts else None
        if identity is not None and job_id != identity:
            raise self._damaged(
                DATABASE,
                f"{IDENTITY} says that the folder is of job {printable(identity)}, the "
                f"database has {printable(job_id) if job_id else 'no job'}",
            )
        version = self._read("format", int) if has_facts else FORMAT_VERSION
        if version != FORMAT_VERSION:
            raise StateFolderError(
                f"state folder {self._folder} has format {version}, this release "
                f"writes {FORMAT_VERSION}; use another folder or the release that "
                "wrote it"
            )
        if job_id is not None and identity is None:  # of a release before
            self._write_identity(job_id)

    def _read(self, name: str, load: Callable[[str], T]) -> T | None:
        """A fact, decoded; None where there is none."""
        with self._reading(f"the entry {name!r}"):
            value = self._get(name)
            return None if value is None else load(value)

    @contextmanager
    def _reading(self, what: str) -> Iterator[None]:
        """What decoding raises shows what is there, which may be any bytes."""
        try:
            yield
        except _UNREADABLE as error:
            text = f"{what} in it can't be read"
            if _is_of_file(error):
                text = str(error)
            raise self._damaged(DATABASE, text) from error

    def _damaged(self, file: str, text: str) -> DamagedStateError:
        return DamagedStateError(
            f"{file} in state folder {self._folder} is damaged: {text}. Nothing was "
            "changed. Put the files of the folder back from a copy, or go on from the "
            "newest checkpoint by `psserver form`, which says first what that means; "
            "without one begin a new job with another --state-dir"
        )

    def _unusable(self, error: Exception) -> StateFolderError:
        if _is_of_file(error):
            return self._damaged(DATABASE, str(error))
        text = str(error)
        if isinstance(error, OSError) and error.strerror:
            text = error.strerror
            if error.filename:
                text += f" ({printable(Path(error.filename).name)})"
        return StateFolderError(
            f"state folder {self._folder} can't be used: {text}; is another "
            "coordinator using it, is the disk full, or is it not writable?"
        )


def _is_of_file(error: Exception) -> bool:
    """Whether SQLite says of the file that it is none of its own, or damaged."""
    return isinstance(error, sqlite3.DatabaseError) and not isinstance(
        error, sqlite3.OperationalError
    )


def _job_id_of(job: str) -> str:
    return str(json.loads(job)["job_id"])


def _load_terms(text: str) -> JobTerms:
    return load_terms(json.loads(text))


def _load_counts(text: str) -> dict[str, int]:
    return {name: int(count) for name, count in json.loads(text).items()}


def _facts_of(change: Persist) -> dict[str, str]:
    """What a change makes of the facts, by name."""
    facts = {}
    if change.record is not None:
        facts["record"] = dump_record(change.record)
    if change.enrolments is not None:
        facts["enrolments"] = dump_enrolments(change.enrolments)
    if change.incarnations is not None:
        facts["incarnations"] = json.dumps(dict(change.incarnations))
    if change.processes is not None:
        facts["worker_processes"] = dump_processes(change.processes)
    if change.shards is not None:
        facts["shards"] = dump_shards(change.shards)
    if change.terms is not None:
        facts["model"] = json.dumps(dump_terms(change.terms))
    if change.start_point is not None:
        facts["start_point"] = dump_start_point(change.start_point)
    if not facts and not change.epochs and change.split is None:
        # A try: what it writes says nothing.
        facts["format"] = str(FORMAT_VERSION)
    return facts
