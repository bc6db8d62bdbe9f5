"""Where a job stands, as a message for people and programs."""

from psserver.core.coordinator import CoordinatorCore
from psserver.core.roster import GONE, WorkerEntry, WorkerState
from psserver.core.shard_map import ShardSlot
from psserver.rpc.record_codec import (
    address_message,
    identity_message,
    settings_message,
)
from pswire.v1 import coordinator_service_pb2 as messages


def status_message(core: CoordinatorCore, now_ms: int) -> messages.GetStatusResponse:
    """Writes the status."""
    newest = core.snapshots.newest
    schema = core.model.schema
    return messages.GetStatusResponse(
        settings=settings_message(core.settings),
        phase=messages.JobPhase.ValueType(core.phase.value),
        generation=core.record.generation if core.record is not None else 0,
        workers=[
            _worker_status(core, entry, now_ms)
            for entry in core.roster.in_state(*set(WorkerState).difference(GONE))
        ],
        shards=[_shard_status(core, slot, now_ms) for slot in core.shards.slots],
        waiting_for=_waiting_for(core),
        snapshot_version=newest.version if newest is not None else -1,
        tensor_count=len(schema.entries) if schema is not None else 0,
        parameter_bytes=core.model.byte_count,
        failure=core.failure,
    )


def _waiting_for(core: CoordinatorCore) -> str:
    """Whom the job waits for: processes missing, else a clock's stragglers."""
    missing = core.waiting_for()
    if missing:
        return missing
    found: dict[str, str] = {}
    for slot in core.shards.slots:
        for name, clock, silent_ms in slot.waiting_for:
            heard = f"silent for {silent_ms / 1000:.0f} s" if silent_ms >= 0 else "new"
            waited_s = slot.waited_ms / 1000
            found[name] = f"{name} (clock {clock}, {heard}) for {waited_s:.0f} s"
    return ", ".join(found.values())


def _worker_status(
    core: CoordinatorCore, entry: WorkerEntry, now_ms: int
) -> messages.WorkerStatus:
    member = core.record.member_of(entry.worker) if core.record is not None else None
    clock = max((slot.applied_clock for slot in core.shards.slots), default=0)
    return messages.WorkerStatus(
        worker=identity_message(entry.worker),
        rank=member.rank if member is not None else -1,
        state=entry.state.value,
        clock=max(clock, member.base_clock) if member is not None else 0,
        silent_ms=0 if entry.is_watching else max(0, now_ms - entry.heard_ms),
        address=entry.address,
    )


def _shard_status(
    core: CoordinatorCore, slot: ShardSlot, now_ms: int
) -> messages.ShardStatus:
    if slot.is_ready:
        state = "ready"
    elif not slot.process_id:
        state = "missing"
    else:
        state = "lost" if core.failure else "suspect"
    return messages.ShardStatus(
        shard=address_message(slot),
        state=state,
        silent_ms=_silent_ms(slot, now_ms),
        parameter_bytes=slot.parameter_bytes,
        optimizer_bytes=slot.optimizer_bytes,
        applied_clock=slot.applied_clock,
        version=slot.version,
    )


def _silent_ms(slot: ShardSlot, now_ms: int) -> int:
    """Time since a shard's last sign of life: an open stream is one."""
    if slot.is_ready:
        return 0
    return -1 if slot.heard_ms is None else max(0, now_ms - slot.heard_ms)
