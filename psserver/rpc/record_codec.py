"""Records, settings and addresses <-> messages of the control plane."""

from psserver.core.job_settings import JobSettings
from psserver.core.record import (
    Departure,
    FenceKind,
    Member,
    Mode,
    Record,
    WorkerKey,
)
from psserver.core.shard_map import ShardSlot
from pswire.v1 import membership_pb2 as messages


def identity_message(worker: WorkerKey) -> messages.WorkerIdentity:
    """Writes an identity."""
    return messages.WorkerIdentity(
        worker_id=worker.worker_id, incarnation=worker.incarnation
    )


def address_message(slot: ShardSlot) -> messages.ShardAddress:
    """Writes where a shard is."""
    return messages.ShardAddress(
        shard_index=slot.index, address=slot.address, incarnation=slot.incarnation
    )


def settings_message(settings: JobSettings) -> messages.JobSettings:
    """Writes a job's settings."""
    return messages.JobSettings(
        job_id=settings.job_id,
        shard_count=settings.shard_count,
        mode=messages.Mode.ValueType(settings.mode),
        staleness_bound=settings.staleness_bound,
        workers_min=settings.workers_min,
        lease_ttl_ms=settings.lease_ttl_ms,
        worker_loss_policy=messages.WORKER_LOSS_POLICY_CONTINUE,
        step_atomicity=messages.STEP_ATOMICITY_CHUNK,
    )


def record_message(record: Record) -> messages.Record:
    """Writes a record."""
    return messages.Record(
        fence_number=record.fence_number,
        generation=record.generation,
        kind=messages.FenceKind.ValueType(record.kind),
        members=[_member_message(member) for member in record.members],
        departures=[
            messages.Departure(
                member=_member_message(end.member),
                last_clock=end.last_clock,
                evicted=end.evicted,
            )
            for end in record.departures
        ],
        departed_step_count=record.departed_step_count,
        skipped_clocks=record.skipped_clocks,
        mode=messages.Mode.ValueType(record.mode),
        staleness_bound=record.staleness_bound,
    )


def read_record(message: messages.Record) -> Record:
    """Reads a record."""
    return Record(
        fence_number=message.fence_number,
        generation=message.generation,
        kind=FenceKind(message.kind),
        members=tuple(_read_member(member) for member in message.members),
        departures=tuple(
            Departure(
                member=_read_member(end.member),
                last_clock=end.last_clock,
                evicted=end.evicted,
            )
            for end in message.departures
        ),
        departed_step_count=message.departed_step_count,
        skipped_clocks=tuple(message.skipped_clocks),
        mode=Mode(message.mode),
        staleness_bound=message.staleness_bound,
    )


def read_identity(message: messages.WorkerIdentity) -> WorkerKey:
    """Reads an identity from the coordinator, which never sends a wrong one."""
    return WorkerKey(message.worker_id, message.incarnation)


def _member_message(member: Member) -> messages.Member:
    return messages.Member(
        worker=identity_message(member.worker),
        rank=member.rank,
        base_clock=member.base_clock,
    )


def _read_member(message: messages.Member) -> Member:
    return Member(
        worker=read_identity(message.worker),
        rank=message.rank,
        base_clock=message.base_clock,
    )
