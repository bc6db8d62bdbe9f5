"""First values of a job, from the worker that was asked for them."""

from collections.abc import AsyncIterator

from psserver.edge.decoding import decode, decoded, worker_key
from psserver.edge.staging_calls import StagingCall
from psserver.shard.host.shard_host import ShardHost
from psserver.shard.rpc.optimizer_state_calls import StateParts, check_header_alone
from psserver.shard.rpc.push_codec import check_caller, check_frame
from psserver.shard.rpc.readiness import model_known
from pswire.frames import (
    REQUEST_HEADER_FIELD,
    SEED_CHUNK_FIELD,
    SEED_STATE_FIELD,
    decode_chunk,
    split_fields,
)
from pswire.limits import WAITING_INTERVAL_MS
from pswire.membership import WorkerKey
from pswire.reasons import ErrorReason, Refusal
from pswire.v1 import parameter_service_pb2 as messages
from pswire.v1 import push_pb2


async def seed(
    host: ShardHost, requests: AsyncIterator[bytes]
) -> messages.SeedResponse:
    """Stages first values.

    Raises:
        Refusal: Of the header with nothing read; else with nothing that counts.
    """
    call = StagingCall(requests, host.limits.message_s)
    header = _header(await call.next())
    check_caller(host, header)
    worker = worker_key(header.worker)
    await model_known(host)
    await _admitted(host, worker, header.fence_number)
    state = StateParts()
    with host.staging.admitted(worker, call):
        async for message in call.rest():
            for field, view in split_fields(message):
                if field == SEED_STATE_FIELD:
                    part = await decoded(push_pb2.OptimizerStatePart, view)
                    await state.take(host, part)
                elif field == SEED_CHUNK_FIELD:
                    _stage(host, worker, header.fence_number, view, state)
    host.pump()
    return messages.SeedResponse(shard_incarnation=host.incarnation)


def _header(first: bytes | None) -> messages.SeedHeader:
    found: memoryview | None = None
    if first is not None:
        check_header_alone(first, "seed")
        for field, view in split_fields(first):
            if field == REQUEST_HEADER_FIELD:
                found = view
    if found is None:
        raise Refusal(ErrorReason.MALFORMED_MESSAGE, "the seed has no header")
    return decode(messages.SeedHeader, found)


async def _admitted(host: ShardHost, worker: WorkerKey, fence_number: int) -> None:
    core = host.model.core

    def is_decided() -> bool:
        """Whether it is known who seeds: a job that has begun is seeded by nobody."""
        has_begun = core.clocks.record is not None
        return has_begun or core.is_seeding(fence_number) or bool(host.end_reason)

    # The order to seed may come before this shard's watch has the fence.
    await host.changes.wait_until(is_decided, WAITING_INTERVAL_MS / 1000)
    host.check_open()
    core.check_seeder(worker, fence_number)


def _stage(
    host: ShardHost,
    worker: WorkerKey,
    fence_number: int,
    view: memoryview,
    state: StateParts,
) -> None:
    core = host.model.core
    core.check_seeder(worker, fence_number)
    frame = decode_chunk(view)
    check_frame(frame)
    frame.check_whole()
    for optimizer, chunks in state.take_checked(host).items():
        host.model.engine.write_seed_state(optimizer, chunks)
    host.model.engine.write_seed(frame.index, frame.data)
    core.seed_chunk_staged(frame.index)
