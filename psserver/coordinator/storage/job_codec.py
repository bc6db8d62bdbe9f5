"""The job's state as JSON, for the coordinator's file.

JSON and not protobuf, so that the file can be read with sqlite3 and a text editor.
"""

import json
from base64 import b64decode, b64encode
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from psserver.coordinator.core.data.epoch_ledger import EpochLedger
from psserver.coordinator.core.data.ledger import Enrolments
from psserver.coordinator.core.data.position_set import PositionSet
from psserver.coordinator.core.shard_map import ShardSlot
from psserver.coordinator.core.start_point import StartPoint
from psserver.edge.memory_grant import NO_GRANT, MemoryGrant
from pswire.checkpoint.place import CheckpointPlace
from pswire.job_terms import JobTerms
from pswire.leased_data import DataRange, EpochShape
from pswire.membership import (
    ClockChoice,
    Departure,
    FenceKind,
    Member,
    MixedClock,
    Mode,
    Record,
    WorkerKey,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredShard:
    """A place of the shard map and the process that has it."""

    index: int
    process_id: str
    address: str
    incarnation: int
    memory: MemoryGrant = NO_GRANT


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredJob:
    """All that survives a restart of the coordinator."""

    job_id: str
    job_seed: int
    shard_count: int
    measure_key: bytes = field(default=b"", repr=False)
    terms: JobTerms | None = None
    record: Record | None = None
    shards: tuple[StoredShard, ...] = ()
    incarnations: dict[str, int] = field(default_factory=dict)
    worker_processes: dict[WorkerKey, str] = field(default_factory=dict)
    enrolments: Enrolments = ()
    step_rules: dict[str, str] = field(default_factory=dict)
    start_point: StartPoint | None = None


def dump_shards(slots: Iterable[ShardSlot]) -> str:
    names = list(StoredShard.__dataclass_fields__)
    return json.dumps(
        [
            {name: getattr(slot, name) for name in names}
            for slot in slots
            if slot.incarnation
        ]
    )


def load_shards(text: str) -> tuple[StoredShard, ...]:
    return tuple(
        StoredShard(**{**shard, "memory": MemoryGrant(*shard.get("memory", NO_GRANT))})
        for shard in json.loads(text)
    )


def dump_start_point(point: StartPoint) -> str:
    return json.dumps(asdict(point))


def load_start_point(text: str) -> StartPoint:
    data = json.loads(text)
    place, mode = CheckpointPlace(*data["place"]), Mode(data["mode"])
    return StartPoint(**{**data, "place": place, "mode": mode})


def dump_record(record: Record) -> str:
    commit = None if record.commit is None else record.commit.decision
    return json.dumps({**asdict(record), "commit": commit})


def load_record(text: str) -> Record:
    """Reads a record. A field that the file lacks has the default of `Record`."""
    data = json.loads(text)
    return Record(
        **{
            **data,
            "kind": FenceKind(data["kind"]),
            "members": tuple(_member(m) for m in data["members"]),
            "departures": tuple(
                Departure(**{**d, "member": _member(d["member"])})
                for d in data["departures"]
            ),
            "skipped_clocks": tuple(data["skipped_clocks"]),
            "mixed_clocks": tuple(MixedClock(*c) for c in data.get("mixed_clocks", ())),
            "mode": Mode(data["mode"]),
            "commit": _choice(data["commit"]),
        }
    )


def _member(data: dict[str, Any]) -> Member:
    return Member(
        worker=WorkerKey(*data["worker"]),
        rank=data["rank"],
        base_clock=data["base_clock"],
        base_sequence=data["base_sequence"],
    )


def _choice(data: list[Any] | None) -> ClockChoice | None:
    if data is None:
        return None
    clock, workers, *scale = data[:4]
    return ClockChoice(
        clock,
        tuple(WorkerKey(*worker) for worker in workers),
        *scale,
        *map(tuple, data[4:]),
    )


def dump_processes(processes: Mapping[WorkerKey, str]) -> str:
    return json.dumps([[*worker, process] for worker, process in processes.items()])


def load_processes(text: str) -> dict[WorkerKey, str]:
    return {
        WorkerKey(worker_id, incarnation): process
        for worker_id, incarnation, process in json.loads(text)
    }


def dump_enrolments(enrolments: Enrolments) -> str:
    return json.dumps(enrolments)


def load_enrolments(text: str) -> Enrolments:
    return tuple(
        (loader, tuple(WorkerKey(*worker) for worker in workers))
        for loader, workers in json.loads(text)
    )


def dump_epoch(ledger: EpochLedger) -> str:
    return json.dumps(
        {
            "shape": asdict(ledger.shape),
            "origin": b64encode(ledger.origin).decode(),
            "order_digest": ledger.order_digest,
            "registrant": ledger.registrant,
            "cursor": ledger.cursor,
            "returned": list(ledger.returned),
            "queues": [[w, list(q)] for w, q in ledger.queues.items()],
            "held": _dumped(ledger.held),
            "consumed_count": ledger.consumed_count,
            "torn_count": ledger.torn_count,
            "dropped_count": ledger.dropped_count,
            "skipped": [[w, kept.runs] for w, kept in ledger.skipped.items()],
            "settled_skipped_count": ledger.settled_skipped_count,
            "revoked": _dumped(ledger.revoked),
            "repeated_count": ledger.repeated_count,
            "taken_back": list(ledger.taken_back.items()),
            "repetition_max": ledger.repetition_max,
        }
    )


def load_epoch(loader: str, epoch: int, text: str) -> EpochLedger:
    data = json.loads(text)
    registrant = data["registrant"]
    return EpochLedger(
        loader,
        epoch,
        EpochShape(**data["shape"]),
        # A file of an earlier release has none: its job has a seed.
        origin=b64decode(data.get("origin", "")),
        order_digest=data["order_digest"],
        registrant=WorkerKey(*registrant) if registrant else None,
        cursor=data["cursor"],
        returned=deque(DataRange(*piece) for piece in data["returned"]),
        queues={
            WorkerKey(*w): deque(DataRange(*piece) for piece in pieces)
            for w, pieces in data["queues"]
        },
        held=_loaded(data["held"]),
        consumed_count=data["consumed_count"],
        torn_count=data["torn_count"],
        dropped_count=data["dropped_count"],
        # A file of release 0.1.0 has none of these.
        skipped={
            WorkerKey(*worker): PositionSet((start, stop) for start, stop in runs)
            for worker, runs in data.get("skipped", [])
        },
        settled_skipped_count=data.get("settled_skipped_count", 0),
        revoked=_loaded(data.get("revoked", [])),
        repeated_count=data.get("repeated_count", 0),
        taken_back=dict(data.get("taken_back", [])),
        repetition_max=data.get("repetition_max", 0),
    )


def _dumped(kept: Mapping[WorkerKey, set[DataRange]]) -> list[Any]:
    return [[worker, sorted(pieces)] for worker, pieces in kept.items()]


def _loaded(rows: list[Any]) -> dict[WorkerKey, set[DataRange]]:
    return {
        WorkerKey(*worker): {DataRange(*piece) for piece in pieces}
        for worker, pieces in rows
    }
