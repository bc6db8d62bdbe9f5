"""Data plane of a shard: messages to core calls and back, no arithmetic."""

from collections.abc import AsyncIterator

import grpc
import grpc.aio

from psserver.core.push import Outcome, Reply
from psserver.host.push_session import Outgoing
from psserver.host.shard_host import ShardHost
from psserver.rpc.guard import Context, reader, streaming, unary
from psserver.rpc.identity_codec import worker_key
from psserver.rpc.push_call import PushCall
from psserver.rpc.push_codec import (
    check_frame,
    check_target,
    reply_message,
    waiting_message,
)
from psserver.rpc.readiness import catch_up, model_known
from pswire.frames import (
    RESPONSE_CHUNK_FIELD,
    SEED_CHUNK_FIELD,
    bits_to_bytes,
    decode_chunk,
    encode_chunk,
    split_fields,
)
from pswire.limits import WAITING_INTERVAL_MS
from pswire.reasons import ErrorReason, Refusal
from pswire.v1 import parameter_service_pb2 as messages

SERVICE = "pswire.v1.ParameterService"


class ParameterService:
    """Handlers of one shard."""

    def __init__(self, host: ShardHost) -> None:
        self._host = host

    def handler(self) -> grpc.GenericRpcHandler:
        """Handlers by method name; bulk methods exchange raw bytes."""
        return grpc.method_handlers_generic_handler(
            SERVICE,
            {
                "PushPull": grpc.stream_stream_rpc_method_handler(
                    streaming(self.push_pull)
                ),
                "Push": grpc.stream_unary_rpc_method_handler(unary(self.push)),
                "Pull": grpc.unary_stream_rpc_method_handler(
                    streaming(self.pull),
                    request_deserializer=reader(messages.PullRequest),
                ),
                "Seed": grpc.stream_unary_rpc_method_handler(
                    unary(self.seed),
                    response_serializer=messages.SeedResponse.SerializeToString,
                ),
                "GetSession": grpc.unary_unary_rpc_method_handler(
                    unary(self.get_session),
                    request_deserializer=reader(messages.GetSessionRequest),
                    response_serializer=messages.GetSessionResponse.SerializeToString,
                ),
                "AwaitContribution": grpc.unary_unary_rpc_method_handler(
                    unary(self.await_contribution),
                    request_deserializer=reader(messages.AwaitContributionRequest),
                    response_serializer=(
                        messages.AwaitContributionResponse.SerializeToString
                    ),
                ),
                "PullSnapshot": grpc.unary_stream_rpc_method_handler(
                    streaming(self.pull_snapshot),
                    request_deserializer=reader(messages.PullSnapshotRequest),
                ),
            },
        )

    async def push_pull(
        self, requests: AsyncIterator[bytes], context: Context
    ) -> AsyncIterator[bytes]:
        """Takes a push and answers with the updated chunks, then the reply."""
        call = await PushCall.open(self._host, requests, wants_values=True)
        try:
            started_ms = self._host.now_ms()
            while True:
                item = await call.session.next(WAITING_INTERVAL_MS / 1000)
                if item is None:
                    waited_ms = self._host.now_ms() - started_ms
                    waiting = waiting_message(self._host, waited_ms)
                    response = messages.PushPullResponse(waiting=waiting)
                    yield response.SerializeToString()
                elif isinstance(item, Reply):
                    reply = reply_message(self._host, item)
                    yield messages.PushPullResponse(reply=reply).SerializeToString()
                    return
                else:
                    yield self._chunk_message(item)
        finally:
            await call.close()

    async def push(self, requests: AsyncIterator[bytes], context: Context) -> bytes:
        """Takes a push and answers with the reply alone."""
        call = await PushCall.open(self._host, requests, wants_values=False)
        try:
            while True:
                item = await call.session.next(WAITING_INTERVAL_MS / 1000)
                if isinstance(item, Reply):
                    reply = reply_message(self._host, item)
                    return messages.PushResponse(reply=reply).SerializeToString()
        finally:
            await call.close()

    async def pull(
        self, request: messages.PullRequest, context: Context
    ) -> AsyncIterator[bytes]:
        """Sends all values of this shard once they have reached a clock."""
        host = self._host
        check_target(host, request)
        worker = worker_key(request.worker)
        await catch_up(host, request.generation)
        core = host.model.core
        started_ms = host.now_ms()

        def is_over() -> bool:
            """Whether there is nothing to wait for, be it that it will never come."""
            is_there = core.clocks.applied_clock >= request.clock
            is_member = core.clocks.member_of(worker) is not None
            return is_there or not is_member or bool(host.end_reason)

        while not await host.changes.wait_until(is_over, WAITING_INTERVAL_MS / 1000):
            waiting = waiting_message(host, host.now_ms() - started_ms)
            yield messages.PullResponse(waiting=waiting).SerializeToString()
        host.check_open()
        if core.clocks.member_of(worker) is None:
            raise Refusal(
                ErrorReason.WORKER_INCARNATION_STALE,
                f"{worker} is no member; readers take snapshots",
            )
        for chunk in reversed(host.model.chunks):
            yield host.values_message(chunk.index, None, RESPONSE_CHUNK_FIELD)
        record = core.clocks.record
        assert record is not None
        reply = Reply(
            outcome=Outcome.APPLIED,
            generation=record.generation,
            version=core.clocks.version,
            frontier=core.clocks.frontier,
            clock=request.clock,
        )
        response = messages.PullResponse(reply=reply_message(host, reply))
        yield response.SerializeToString()

    async def seed(
        self, requests: AsyncIterator[bytes], context: Context
    ) -> messages.SeedResponse:
        """Stages first values."""
        host = self._host
        header: messages.SeedHeader | None = None
        async for message in requests:
            for field, view in split_fields(message):
                if field == 1:
                    header = messages.SeedHeader.FromString(bytes(view))
                    check_target(host, header)
                    await model_known(host)
                elif field == SEED_CHUNK_FIELD and header is not None:
                    await self._stage_seed(header, view)
        if header is None:
            raise Refusal(ErrorReason.MALFORMED_MESSAGE, "the seed has no header")
        host.pump()
        return messages.SeedResponse(shard_incarnation=host.incarnation)

    async def get_session(
        self, request: messages.GetSessionRequest, context: Context
    ) -> messages.GetSessionResponse:
        """Says what the shard holds of a worker's pushes."""
        host = self._host
        check_target(host, request)
        window = host.model.core.dedupe.window_of(worker_key(request.worker))
        return messages.GetSessionResponse(
            shard_incarnation=host.incarnation,
            sequence_done_max=window.done_sequence,
            pushes=[
                messages.SessionPush(
                    sequence=sequence,
                    has_trailer=entry.trailer is not None,
                    chunks=[
                        messages.SessionChunk(
                            index=index,
                            state=messages.ChunkState.ValueType(entry.state_of(index)),
                        )
                        for index in sorted(entry.digests)
                    ],
                )
                for sequence, entry in window.entries.items()
                if sequence > window.done_sequence
            ],
        )

    async def await_contribution(
        self, request: messages.AwaitContributionRequest, context: Context
    ) -> messages.AwaitContributionResponse:
        """Returns once a clock waits only for workers without data."""
        host = self._host
        check_target(host, request)
        await catch_up(host, request.generation)
        awaited = await host.await_contribution(
            worker_key(request.worker), request.clock
        )
        return messages.AwaitContributionResponse(
            clock=awaited.clock, optimizer=awaited.optimizer
        )

    async def pull_snapshot(
        self, request: messages.PullSnapshotRequest, context: Context
    ) -> AsyncIterator[bytes]:
        """Sends this shard's part of a snapshot."""
        host = self._host
        check_target(host, request)
        image = host.image(request.snapshot_id)
        for chunk in host.model.chunks:
            presence = bits_to_bytes((True,) * len(chunk.slices))
            yield encode_chunk(
                RESPONSE_CHUNK_FIELD,
                index=chunk.index,
                presence=presence,
                data=image.read(chunk.index, None),
            )

    # Inside

    def _chunk_message(self, item: Outgoing) -> bytes:
        if item.message is not None:
            return item.message
        return self._host.values_message(
            item.chunk_index, item.presence, RESPONSE_CHUNK_FIELD
        )

    async def _stage_seed(self, header: messages.SeedHeader, view: memoryview) -> None:
        host = self._host
        worker = worker_key(header.worker)
        core = host.model.core
        # The order to seed may come before this shard's watch has the fence.
        await host.changes.wait_until(
            lambda: core.is_seeding(header.fence_number) or bool(host.end_reason),
            WAITING_INTERVAL_MS / 1000,
        )
        core.check_seeder(worker, header.fence_number)
        frame = decode_chunk(view)
        check_frame(frame)
        host.model.engine.write_seed(frame.index, frame.data)
        core.seed_chunk_staged(frame.index)
