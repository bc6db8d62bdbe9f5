"""What the coordinator's watches send, as messages."""

from collections.abc import Iterator

from psserver.coordinator.core.coordinator import CoordinatorCore
from psserver.coordinator.core.coordinator_effects import (
    Abort,
    Announce,
    CoordinatorEffect,
    DecideCut,
    EndJob,
    OrderSeed,
    Prepare,
    ReleaseImage,
    ReturnToCheckpoint,
    WantState,
    WriteCheckpoint,
)
from psserver.coordinator.core.shard_map import ShardSlot
from psserver.edge.cut_codec import place_message
from pswire.membership import WorkerKey
from pswire.membership_codec import (
    identity_message,
    record_message,
    sequence_messages,
)
from pswire.schema_codec import cut_model, terms_fields
from pswire.v1 import coordinator_service_pb2 as messages
from pswire.v1 import membership_pb2


def address_message(slot: ShardSlot) -> membership_pb2.ShardAddress:
    return membership_pb2.ShardAddress(
        shard_index=slot.index, address=slot.address, incarnation=slot.incarnation
    )


def shard_view(core: CoordinatorCore) -> messages.ShardView:
    """The job as a shard sees it."""
    terms = core.model.terms
    view = (
        messages.ShardView()
        if terms is None
        else messages.ShardView(**terms_fields(terms))
    )
    view.fence_closed_number = core.progress.fences.closed_number
    view.snapshot_closed_id = core.snapshots.closed_id
    view.measure_key = core.settings.measure_key
    if core.record is not None:
        view.record.CopyFrom(record_message(core.record))
    return view


def view_events(core: CoordinatorCore) -> Iterator[messages.WatchShardResponse]:
    """The job as a shard sees it, as it is now, in as many events as it takes."""
    following = cut_model(shard_view(core))
    part: messages.ShardView | None = next(following)
    while part is not None:
        after = next(following, None)
        part.continued = after is not None
        yield messages.WatchShardResponse(view=part)
        part = after


def worker_view(core: CoordinatorCore) -> messages.WorkerView:
    """The job as a worker sees it."""
    view = messages.WorkerView(
        shards=[address_message(slot) for slot in core.shards.slots],
        makes_checkpoints=core.checkpoints.settings is not None,
    )
    if core.record is not None:
        view.record.CopyFrom(record_message(core.record))
    if core.progress.first is not None:
        view.first_values.CopyFrom(
            messages.FirstValues(
                worker_id=core.progress.first.worker.worker_id,
                values_digest=core.progress.first.brought.values,
                state_digest=core.progress.first.brought.state,
            )
        )
    return view


def shard_event(event: CoordinatorEffect) -> messages.WatchShardResponse | None:
    """What a shard is sent of an effect; None for nothing, or a view."""
    match event:
        case Prepare():
            prepare = messages.FencePrepare(
                fence_number=event.fence_number,
                kind=membership_pb2.FenceKind.ValueType(event.kind),
                evicting=[identity_message(worker) for worker in event.evicting],
            )
            if event.seeder is not None:
                prepare.seeder.CopyFrom(identity_message(event.seeder))
            if event.start_point is not None:
                place = event.start_point.place
                prepare.checkpoint.url, prepare.checkpoint.name = place
            return messages.WatchShardResponse(prepare=prepare)
        case Announce():
            return messages.WatchShardResponse(record=record_message(event.record))
        case Abort():
            abort = messages.FenceAbort(
                fence_number=event.fence_number,
                reason=event.reason,
                batch_floors=sequence_messages(event.batch_floors),
            )
            return messages.WatchShardResponse(abort=abort)
        case DecideCut():
            cut = messages.CutDecision(
                fence_number=event.fence_number,
                snapshot_id=event.snapshot_id,
                clock=event.clock,
                sequences=sequence_messages(event.sequences),
                purpose=membership_pb2.CutPurpose.ValueType(event.purpose),
            )
            return messages.WatchShardResponse(cut=cut)
        case WriteCheckpoint():
            write = messages.CheckpointWrite(
                snapshot_id=event.snapshot_id, place=place_message(event.place)
            )
            return messages.WatchShardResponse(write=write)
        case ReleaseImage():
            release = messages.SnapshotRelease(snapshot_id=event.snapshot_id)
            return messages.WatchShardResponse(release=release)
        case EndJob():
            end = messages.JobEnd(failed=True, reason=event.reason)
            return messages.WatchShardResponse(end=end)
    return None


def worker_event(
    core: CoordinatorCore, event: CoordinatorEffect, worker: WorkerKey
) -> messages.WatchWorkerResponse | None:
    """What a worker is sent of an effect; None for nothing."""
    match event:
        case OrderSeed():
            shards = [address_message(slot) for slot in core.shards.slots]
            if event.worker != worker:
                shard_map = messages.ShardMap(shards=shards)
                return messages.WatchWorkerResponse(shard_map=shard_map)
            seed = messages.SeedOrder(fence_number=event.fence_number, shards=shards)
            return messages.WatchWorkerResponse(seed=seed)
        case WantState():
            wanted = messages.StateWanted(
                snapshot_id=event.snapshot_id,
                sequence=event.sequence,
                epochs=[
                    messages.LoaderEpoch(loader=loader, epoch=epoch)
                    for loader, epoch in event.epochs.items()
                ],
            )
            return messages.WatchWorkerResponse(state_wanted=wanted)
        case Announce() | ReturnToCheckpoint():
            # A member needs the shards' addresses too: the whole view.
            return messages.WatchWorkerResponse(view=worker_view(core))
        case EndJob():
            end = messages.JobEnd(failed=True, reason=event.reason)
            return messages.WatchWorkerResponse(end=end)
    return None
