"""Generated messages to values and back. No other module reads their fields."""

from collections.abc import Iterable

from pswire.awaited import Awaited
from pswire.limits import PROTOCOL_VERSION
from pswire.membership import Mode, Outcome
from pswire.membership_codec import identity_message, known, range_messages, read_record
from pswire.reasons import ErrorReason, Refusal
from pswire.schema_codec import schema_from_message
from pswire.v1 import (
    coordinator_service_pb2,
    membership_pb2,
    parameter_service_pb2,
    push_pb2,
    schema_pb2,
)
from psworker.transport import values


def shards_of(
    messages: Iterable[membership_pb2.ShardAddress],
) -> tuple[values.ShardAddress, ...]:
    """Addresses in the order of the shard map."""
    return tuple(
        sorted(
            (
                values.ShardAddress(each.shard_index, each.address, each.incarnation)
                for each in messages
            ),
            key=lambda shard: shard.shard_index,
        )
    )


def waiting_of(message: push_pb2.Waiting) -> values.Waiting:
    """Whom a call waits for."""
    return values.Waiting(
        clock=message.clock,
        waited_ms=message.waited_ms,
        reason=message.reason,
        awaited=tuple(
            Awaited(each.name, each.clock, each.step_ms, each.lost_ms)
            for each in message.awaited
        ),
    )


def watch_event_of(
    message: coordinator_service_pb2.WatchWorkerResponse,
) -> values.WatchEvent | None:
    """The event, `None` for a kind that only a newer coordinator knows."""
    kind = message.WhichOneof("event")
    if kind == "view":
        view = message.view
        record = read_record(view.record) if view.HasField("record") else None
        first = None
        if view.HasField("first_values"):
            first = values.FirstValues(
                view.first_values.worker_id,
                view.first_values.values_digest,
                view.first_values.state_digest,
            )
        return values.WorkerView(
            record, shards_of(view.shards), first, view.makes_checkpoints
        )
    if kind == "seed":
        return values.SeedOrder(
            message.seed.fence_number, shards_of(message.seed.shards)
        )
    if kind == "shard_map":
        return values.ShardMap(shards_of(message.shard_map.shards))
    if kind == "record":
        return read_record(message.record)
    if kind == "end":
        return values.JobEnd(message.end.failed, message.end.reason)
    if kind == "state_wanted":
        wanted = message.state_wanted
        epochs = {each.loader: each.epoch for each in wanted.epochs}
        return values.StateWanted(wanted.snapshot_id, wanted.sequence, epochs)
    if kind == "waiting":
        return waiting_of(message.waiting)
    return None


def header_bytes(header: values.PushHeader, shard_incarnation: int) -> bytes:
    """A push's header for one shard."""
    return push_pb2.PushHeader(
        protocol_version=PROTOCOL_VERSION,
        job_id=header.job_id,
        optimizer=header.optimizer,
        worker=identity_message(header.worker),
        shard_incarnation=shard_incarnation,
        generation=header.generation,
        sequence=header.sequence,
        sequence_unacknowledged_min=header.sequence_unacknowledged_min,
        clock=header.clock,
        value_entries=header.value_entries,
    ).SerializeToString()


def trailer_bytes(trailer: values.PushTrailer, chunk_bitmap: bytes) -> bytes:
    """A push's trailer for one shard."""
    return push_pb2.PushTrailer(
        weight=trailer.weight,
        groups=[
            schema_pb2.GroupHyperparameters(values=group) for group in trailer.groups
        ],
        finite=trailer.is_finite,
        loss_scale=trailer.loss_scale,
        averaged_buffers=trailer.averaged_buffers,
        chunk_bitmap=chunk_bitmap,
        ranges=range_messages(trailer.ranges),
        gradient_norm=trailer.gradient_norm,
        optimizer_digest=trailer.optimizer_digest,
        loads_state=trailer.loads_state,
        is_of_longest=trailer.is_of_longest,
        scheduler_steps=trailer.scheduler_steps,
        publishes=trailer.publishes,
        continues_batch=trailer.continues_batch,
        slack_ms=trailer.slack_ms,
        is_last=trailer.is_last,
    ).SerializeToString()


def settings_used_of(
    message: parameter_service_pb2.OptimizerSettings,
) -> values.OptimizerSettings:
    """What the newest update of an optimizer was made with."""
    return values.OptimizerSettings(
        tuple(tuple(group.values) for group in message.groups),
        tuple(message.scheduler_steps),
        tuple(message.next_scheduler_steps),
    )


def seed_state_bytes(optimizer: str, chunk_index: int, tensors: bytes) -> bytes:
    """A message of a seed that holds only a part of optimizer state."""
    part = push_pb2.OptimizerStatePart(
        optimizer=optimizer, chunk_index=chunk_index, tensors=tensors
    )
    return parameter_service_pb2.SeedRequest(state=part).SerializeToString()


def reply_of(message: push_pb2.PushReply) -> values.PushReply:
    """A shard's answer to a push or a pull."""
    return values.PushReply(
        outcome=known(Outcome, message.outcome),
        shard_incarnation=message.shard_incarnation,
        generation=message.generation,
        version=message.version,
        frontier=message.frontier,
        clock=message.clock,
        mode=known(Mode, message.mode),
        staleness_bound=message.staleness_bound,
        staleness=message.staleness,
        nonfinite_worker_ids=tuple(message.nonfinite_worker_ids),
        closed_sequence=message.closed_sequence,
        grad_norm=message.grad_norm if message.HasField("grad_norm") else None,
        gradient_factor=message.gradient_factor
        if message.HasField("gradient_factor")
        else 1.0,
        difference=_difference_of(message),
        peer_wait_s=message.peer_wait_ms / 1000,
    )


def _difference_of(
    message: push_pb2.PushReply,
) -> values.HyperparameterDifference | None:
    if not message.HasField("hyperparameter_difference"):
        return None
    difference = message.hyperparameter_difference
    if not len(difference.names) == len(difference.used) == len(difference.own):
        raise Refusal(
            ErrorReason.MALFORMED_MESSAGE,
            "a difference of hyperparameters has not as many names as values",
        )
    return values.HyperparameterDifference(
        worker_id=difference.worker_id,
        optimizer=difference.optimizer,
        clock=difference.clock,
        group=difference.group,
        names=tuple(difference.names),
        used=tuple(difference.used),
        own=tuple(difference.own),
    )


def session_of(
    message: parameter_service_pb2.GetSessionResponse,
) -> values.ShardSession:
    """What a shard holds of this worker's pushes."""
    held = (
        parameter_service_pb2.CHUNK_STATE_STAGED,
        parameter_service_pb2.CHUNK_STATE_APPLIED,
    )
    return values.ShardSession(
        sequence_done_max=message.sequence_done_max,
        held_chunks={
            push.sequence: frozenset(
                chunk.index for chunk in push.chunks if chunk.state in held
            )
            for push in message.pushes
        },
    )


def snapshot_of(
    message: coordinator_service_pb2.RequestSnapshotResponse,
) -> values.PinnedSnapshot:
    """A snapshot that is ready on all shards."""
    return values.PinnedSnapshot(
        job_id=message.job_id,
        snapshot_id=message.snapshot_id,
        version=message.version,
        clock=message.clock,
        generation=message.generation,
        shards=shards_of(message.shards),
        schema=schema_from_message(message.schema),
        pin_ttl_ms=message.pin_ttl_ms,
        pin_id=message.pin_id,
        chunk_bytes=message.chunk_bytes,
    )
