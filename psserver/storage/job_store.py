"""The coordinator's durable state: one SQLite file, one process.

Records are committed with `synchronous=FULL` before they are announced. An exclusive
lock on the file tells a second coordinator of the same state folder to stay away.
Source: https://sqlite.org/wal.html, https://sqlite.org/pragma.html#pragma_synchronous
"""

import json
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Self

from psserver.core.epoch_ledger import EpochLedger
from psserver.core.ledger import Enrolments
from psserver.core.record import Record, WorkerKey
from psserver.core.split_book import RecordedSplit
from psserver.storage.job_codec import (
    StoredJob,
    StoredShard,
    dump_enrolments,
    dump_epoch,
    dump_model,
    dump_processes,
    dump_record,
    load_enrolments,
    load_epoch,
    load_model,
    load_processes,
    load_record,
)
from psserver.storage.state_folder import StateFolderError
from pswire import failpoints
from pswire.compression import NO_COMPRESSION, Compression
from pswire.schema import ModelSchema, OptimizerSpec

FORMAT_VERSION = 2
"""Format of the file; another one is refused by name."""

LOCK_TIMEOUT_S = 1.0
"""Wait for the file: its holder keeps it, so that a long wait only delays the news."""


class JobStore:
    """The file `job.sqlite` in a state folder.

    Raises:
        StateFolderError: Another coordinator holds it, or another release wrote it.
    """

    def __init__(self, folder: Path) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._db = sqlite3.connect(
                folder / "job.sqlite", isolation_level=None, timeout=LOCK_TIMEOUT_S
            )
        except (OSError, sqlite3.Error) as error:
            raise _unusable(folder, error) from error
        try:
            self._prepare()
            found = self._get("format")
        except sqlite3.Error as error:
            self._db.close()
            raise _unusable(folder, error) from error
        if found != str(FORMAT_VERSION):
            self._db.close()
            raise StateFolderError(
                f"state folder {folder} has format {found}, this release writes "
                f"{FORMAT_VERSION}; use another folder or the release that wrote it"
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._db.close()

    def load(self) -> StoredJob | None:
        """What an earlier process left, None in a new folder."""
        job = self._get("job")
        if job is None:
            return None
        model = self._get("model")
        schema, optimizers, clip, compression = (
            load_model(model) if model else (None, (), 0.0, NO_COMPRESSION)
        )
        record = self._get("record")
        return StoredJob(
            **json.loads(job),
            schema=schema,
            optimizers=optimizers,
            clip_grad_norm=clip,
            compression=compression,
            record=load_record(record) if record else None,
            shards=tuple(
                StoredShard(**shard)
                for shard in json.loads(self._get("shards") or "[]")
            ),
            incarnations=json.loads(self._get("incarnations") or "{}"),
            worker_processes=load_processes(self._get("worker_processes") or "[]"),
            enrolments=load_enrolments(self._get("enrolments") or "[]"),
            step_rules=json.loads(self._get("step_rules") or "{}"),
        )

    def load_epochs(self) -> tuple[EpochLedger, ...]:
        """The data ledger that an earlier process left, in the order of opening."""
        rows = self._db.execute(
            "SELECT loader, epoch, value FROM epochs ORDER BY rowid"
        ).fetchall()
        return tuple(load_epoch(*row) for row in rows)

    def save_job(self, *, job_id: str, job_seed: int, shard_count: int) -> None:
        """Keeps what makes the job this job."""
        job = {"job_id": job_id, "job_seed": job_seed, "shard_count": shard_count}
        self._put("job", json.dumps(job))

    def save_step_rules(self, rules: dict[str, str]) -> None:
        """Keeps how steps are made, which shards and workers know from their start."""
        self._put("step_rules", json.dumps(rules))

    def count_start(self) -> int:
        """Counts a start of the coordinator after the first; returns their number."""
        count = int(self._get("later_starts") or "0") + 1
        self._put("later_starts", str(count))
        return count

    def save_model(
        self,
        schema: ModelSchema,
        optimizers: tuple[OptimizerSpec, ...],
        clip_grad_norm: float = 0.0,
        compression: Compression = NO_COMPRESSION,
    ) -> None:
        """Keeps what the job trains."""
        model = dump_model(schema, optimizers, clip_grad_norm, compression)
        self._put("model", model)

    def save_record(
        self,
        record: Record,
        epochs: tuple[EpochLedger, ...] = (),
        enrolments: Enrolments = (),
        processes: Mapping[WorkerKey, str] | None = None,
    ) -> None:
        """Makes a record durable, at once with what it changes.

        Data of a worker that a record ends is accounted for with it: one without the
        other would deal it twice, or never, after a restart.

        Args:
            record: The record.
            epochs: Data of epochs that it changes.
            enrolments: Who leases data from now on.
            processes: Which process is which start of a worker, of those that are not
                over; None to leave that as it is.
        """
        with self._transaction():
            self._put("record", dump_record(record))
            self._put("enrolments", dump_enrolments(enrolments))
            if processes is not None:
                self._put("worker_processes", dump_processes(processes))
            for ledger in epochs:
                self.save_epoch(ledger)

    def save_shards(self, shards: tuple[StoredShard, ...]) -> None:
        """Keeps the shard map."""
        rows = [
            {name: getattr(shard, name) for name in StoredShard.__dataclass_fields__}
            for shard in shards
        ]
        self._put("shards", json.dumps(rows))

    def save_workers(
        self, incarnations: dict[str, int], processes: dict[WorkerKey, str]
    ) -> None:
        """Keeps the last incarnation of each worker id, and who is which process."""
        with self._transaction():
            self._put("incarnations", json.dumps(incarnations))
            self._put("worker_processes", dump_processes(processes))

    def save_epoch(self, ledger: EpochLedger) -> None:
        """Keeps one epoch of the data ledger."""
        self._db.execute(
            # In place: the order of the rows is that in which epochs were opened.
            "INSERT INTO epochs VALUES (?, ?, ?) "
            "ON CONFLICT (loader, epoch) DO UPDATE SET value = excluded.value",
            (ledger.loader, ledger.epoch, dump_epoch(ledger)),
        )
        self._note_write()

    def load_splits(self) -> tuple[RecordedSplit, ...]:
        """The splits that earlier processes recorded, in their order."""
        rows = self._db.execute("SELECT value FROM splits ORDER BY rowid").fetchall()
        return tuple(RecordedSplit(**json.loads(value)) for (value,) in rows)

    def save_split(self, split: RecordedSplit) -> None:
        """Keeps a split."""
        self._db.execute(
            "INSERT INTO splits VALUES (?, ?)", (split.name, json.dumps(asdict(split)))
        )
        self._note_write()

    def _prepare(self) -> None:
        # Exclusive: held from the first write to the end of the process.
        self._db.execute("PRAGMA locking_mode=EXCLUSIVE")
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=FULL")
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
        self._db.execute("BEGIN")
        try:
            yield
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")
        self._note_write()

    def _get(self, name: str) -> str | None:
        row = self._db.execute(
            "SELECT value FROM facts WHERE name = ?", (name,)
        ).fetchone()
        return None if row is None else str(row[0])

    def _put(self, name: str, value: str) -> None:
        self._db.execute("INSERT OR REPLACE INTO facts VALUES (?, ?)", (name, value))
        self._note_write()

    def _note_write(self) -> None:
        if failpoints.armed and not self._db.in_transaction:
            failpoints.hit("coordinator.write_durable")


def _unusable(folder: Path, error: Exception) -> StateFolderError:
    return StateFolderError(
        f"state folder {folder} can't be used: {error}; is another coordinator using "
        "it, or is it not writable?"
    )
