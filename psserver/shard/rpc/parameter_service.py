"""Data plane of a shard: messages to core calls and back, no arithmetic."""

from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import ExitStack

import grpc
import grpc.aio

from psserver.edge.decoding import worker_key
from psserver.edge.guard import Context, answered, machine_of, streaming, telling, unary
from psserver.edge.monotonic import now_ms
from psserver.shard.core.push import PushId, Reply
from psserver.shard.host.push_session import QUEUED_BYTES_MAX, Outgoing
from psserver.shard.host.shard_host import ShardHost
from psserver.shard.rpc import (
    optimizer_state_calls,
    seed_call,
    step_calls,
)
from psserver.shard.rpc.push_call import PushCall
from psserver.shard.rpc.push_codec import (
    check_caller,
    check_held,
    check_target,
    checked_clock,
    reply_message,
    waiting_message,
)
from psserver.shard.rpc.readiness import catch_up, clock_reached, slot_free
from psserver.shard.tensors.values_encoder import Messages, unchanged_message
from pswire import failpoints
from pswire.encodings.change import digest_of
from pswire.frames import (
    RESPONSE_CHUNK_FIELD,
    bits_to_bytes,
    encode_part,
    part_count,
)
from pswire.limits import WAITING_INTERVAL_MS
from pswire.membership import ClockChoice, WorkerKey
from pswire.membership_codec import choice_message
from pswire.placement import Chunk
from pswire.reasons import ErrorReason, Refusal
from pswire.torch_types import buffer_of
from pswire.v1 import parameter_service_pb2 as messages

SERVICE = "pswire.v1.ParameterService"

SLOT_TIMEOUT_S = 30.0
"""Time for a reader's earlier answers to be read, after which it is refused."""


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
                "PushPullOnce": grpc.stream_stream_rpc_method_handler(
                    streaming(self.push_pull_once)
                ),
                "Pull": grpc.unary_stream_rpc_method_handler(
                    telling(self.pull, messages.PullRequest)
                ),
                "Seed": grpc.stream_unary_rpc_method_handler(
                    unary(self.seed),
                    response_serializer=messages.SeedResponse.SerializeToString,
                ),
                "GetSession": answered(self.get_session, messages.GetSessionRequest),
                "AwaitContribution": answered(
                    self.await_contribution, messages.AwaitContributionRequest
                ),
                "Commit": answered(self.commit, messages.CommitRequest),
                "Ready": answered(self.ready, messages.ReadyRequest),
                "PullOptimizerState": grpc.unary_stream_rpc_method_handler(
                    telling(
                        self.pull_optimizer_state, messages.PullOptimizerStateRequest
                    )
                ),
                "StageOptimizerState": grpc.stream_unary_rpc_method_handler(
                    unary(self.stage_optimizer_state),
                    response_serializer=(
                        messages.StageOptimizerStateResponse.SerializeToString
                    ),
                ),
                "OpenSegments": answered(
                    self.open_segments, messages.OpenSegmentsRequest
                ),
                "PullSnapshot": grpc.unary_stream_rpc_method_handler(
                    telling(self.pull_snapshot, messages.PullSnapshotRequest)
                ),
            },
        )

    async def push_pull(
        self, requests: AsyncIterator[bytes], context: Context
    ) -> AsyncIterator[bytes]:
        """Takes a push and answers with the updated chunks, then the reply."""
        host = self._host
        call = await PushCall.open(host, requests, wants_values=True)
        slot = ExitStack()
        try:
            started_ms = now_ms()
            is_answering = False
            while True:
                item = await call.next(WAITING_INTERVAL_MS / 1000)
                if isinstance(item, Outgoing):
                    if not is_answering:
                        async for waiting in slot_free(
                            host, host.push_answers, call.push.worker
                        ):
                            call.session.check()
                            response = messages.PushPullResponse(waiting=waiting)
                            yield response.SerializeToString()
                        slot.enter_context(host.push_answers.taken(call.push.worker))
                        is_answering = True
                    for message in await self._chunk_messages(item, call.push):
                        host.sent_bytes += len(message)
                        yield message
                    continue
                if item is None and call.is_ahead:
                    started_ms = now_ms()
                    continue
                if failpoints.armed and isinstance(item, Reply):
                    failpoints.hit("shard.before_reply")
                response = self._response(item, started_ms, call.push.worker)
                yield response.SerializeToString()
                if isinstance(item, Reply):
                    return
        finally:
            slot.close()
            await call.close()

    async def push_pull_once(
        self, requests: AsyncIterator[bytes], context: Context
    ) -> AsyncIterator[bytes]:
        """Takes pushes that are one message each, and answers each with one."""
        resting, worker = self._host.resting, None
        while (request := await resting.next(requests, worker)) is not None:
            answer, worker = await self._answer_whole(request)
            with self._host.push_answers.taken(worker):
                self._host.sent_bytes += len(answer)
                yield answer

    async def push(self, requests: AsyncIterator[bytes], context: Context) -> bytes:
        """Takes a push and answers with the reply alone."""
        call = await PushCall.open(self._host, requests, wants_values=False)
        try:
            while True:
                item = await call.next(WAITING_INTERVAL_MS / 1000)
                if isinstance(item, Reply):
                    reply = reply_message(self._host, item, call.push.worker)
                    return messages.PushResponse(reply=reply).SerializeToString()
        finally:
            await call.close()

    async def pull(
        self, request: messages.PullRequest, context: Context
    ) -> AsyncIterator[bytes]:
        """Sends all values of this shard once they have reached a clock."""
        host = self._host
        check_caller(host, request)
        worker = worker_key(request.worker)
        clock = checked_clock(request.clock)
        check_held(host, len(request.held_digests), len(host.model.chunks))
        await catch_up(host, request.generation)
        async for waiting in clock_reached(
            host, worker, clock, otherwise="readers take snapshots"
        ):
            yield messages.PullResponse(waiting=waiting).SerializeToString()
        async for waiting in slot_free(host, host.pull_answers, worker):
            yield messages.PullResponse(waiting=waiting).SerializeToString()
        with host.pull_answers.taken(worker):
            async for message in self._pulled(request, worker, clock):
                yield message

    async def _pulled(
        self, request: messages.PullRequest, worker: WorkerKey, clock: int
    ) -> AsyncIterator[bytes]:
        host = self._host
        # Before the values: they may go on while they are sent, and hold no less.
        wanted = _chunks_wanted(host, request.chunk_indexes)
        is_part = bool(request.chunk_indexes)
        reply = host.model.core.pull_reply(worker, clock, is_part=is_part)
        if not is_part:
            host.history.pulled(worker, reply)
        own = (chunk.index for chunk in host.model.chunks)
        held = dict(zip(own, request.held_digests, strict=False))
        for chunk_index in reversed(wanted):
            for message in await host.values_messages(
                chunk_index,
                None,
                worker,
                sequence=None,
                held_digest=held.get(chunk_index),
                is_inline=is_part,
            ):
                host.sent_bytes += len(message)
                yield message
        response = messages.PullResponse(reply=reply_message(host, reply))
        yield response.SerializeToString()

    async def seed(
        self, requests: AsyncIterator[bytes], context: Context
    ) -> messages.SeedResponse:
        """Stages first values."""
        return await seed_call.seed(self._host, requests)

    async def get_session(
        self, request: messages.GetSessionRequest, context: Context
    ) -> messages.GetSessionResponse:
        """Says what the shard holds of a worker's pushes."""
        host = self._host
        check_caller(host, request)
        worker = worker_key(request.worker)
        core = host.model.core
        closed = core.closed_sequence(worker)
        entries = core.on_shard.window_of(worker).entries
        return messages.GetSessionResponse(
            shard_incarnation=host.incarnation,
            sequence_done_max=closed,
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
                for sequence, entry in entries.items()
                if sequence > closed
            ],
        )

    async def await_contribution(
        self, request: messages.AwaitContributionRequest, context: Context
    ) -> messages.AwaitContributionResponse:
        """Returns once a clock waits only for workers without data."""
        return await step_calls.await_contribution(self._host, request)

    async def commit(
        self, request: messages.CommitRequest, context: Context
    ) -> messages.CommitResponse:
        """Applies a clock, or a push, of which every shard holds all."""
        return await step_calls.commit(self._host, request)

    async def ready(
        self, request: messages.ReadyRequest, context: Context
    ) -> messages.ReadyResponse:
        """Takes word that every shard holds a push; says whose pushes count."""
        return await step_calls.ready(self._host, request)

    async def pull_optimizer_state(
        self, request: messages.PullOptimizerStateRequest, context: Context
    ) -> AsyncIterator[bytes]:
        """Sends an optimizer's state once it has reached a clock."""
        async for response in optimizer_state_calls.pull(self._host, request):
            yield response.SerializeToString()

    async def stage_optimizer_state(
        self, requests: AsyncIterator[bytes], context: Context
    ) -> messages.StageOptimizerStateResponse:
        """Takes state that the caller's next push will load."""
        return await optimizer_state_calls.stage(self._host, requests)

    async def open_segments(
        self, request: messages.OpenSegmentsRequest, context: Context
    ) -> messages.OpenSegmentsResponse:
        """Says where a worker on this machine hands segments over."""
        return await step_calls.open_segments(self._host, request)

    async def pull_snapshot(
        self, request: messages.PullSnapshotRequest, context: Context
    ) -> AsyncIterator[bytes]:
        """Sends this shard's part of a snapshot, but for what the reader has."""
        host = self._host
        check_target(host, request)
        host.images.image(request.snapshot_id)
        wanted = _chunks_wanted(host, request.chunk_indexes)
        if request.chunk_indexes and wanted != [*request.chunk_indexes]:
            raise Refusal(
                ErrorReason.CHUNK_INVALID,
                f"{len(request.chunk_indexes)} chunks of a snapshot are asked for out "
                "of order, or twice",
            )
        check_held(host, len(request.held_digests), len(wanted))
        held = dict(zip(wanted, request.held_digests, strict=False))
        reader = machine_of(context)
        if not await host.snapshot_answers.is_free(reader, SLOT_TIMEOUT_S):
            raise Refusal(
                ErrorReason.WAIT_TIMEOUT,
                f"{host.snapshot_answers.count(reader)} answers with snapshots to "
                f"{reader} were not read within {SLOT_TIMEOUT_S:g} s",
            )
        with host.snapshot_answers.taken(reader):
            for chunk in map(host.model.engine.vectors.chunk, wanted):
                digest = self._snapshot_digest(request.snapshot_id, chunk, held)
                if digest is not None:
                    yield unchanged_message(
                        chunk, RESPONSE_CHUNK_FIELD, _all_of(chunk), digest
                    )
                    continue
                for part in range(part_count(chunk.byte_count)):
                    message = self._snapshot_part(request.snapshot_id, chunk, part)
                    host.sent_bytes += len(message)
                    yield message

    # Inside

    def _snapshot_digest(
        self, snapshot_id: int, chunk: Chunk, held: Mapping[int, int]
    ) -> int | None:
        """The digest of a chunk of an image, if its reader has the same."""
        if chunk.index not in held:
            return None
        digest = digest_of(self._host.images.image(snapshot_id)[chunk.index].values)
        return digest if digest == held[chunk.index] else None

    def _snapshot_part(self, snapshot_id: int, chunk: Chunk, part: int) -> bytes:
        """A message with a part of a chunk of an image.

        The image is looked up for each: an answer that nobody reads would keep all
        values of an image that was released long ago.

        Raises:
            Refusal: `SNAPSHOT_GONE`, which ends an answer that is read too slowly.
        """
        return encode_part(
            RESPONSE_CHUNK_FIELD,
            index=chunk.index,
            presence=bits_to_bytes(_all_of(chunk)),
            data=buffer_of(self._host.images.image(snapshot_id)[chunk.index].values),
            part=part,
        )

    async def _answer_whole(self, request: bytes) -> tuple[bytes, WorkerKey]:
        """The answer to a push that is one message, and its sender.

        Without a reply when the push waits, and when its values are too many for one
        message, as those of a clock to which its sender has added nothing: the sender
        asks for them by `PushPull`. So it does when it has not read earlier answers.
        """
        call = await PushCall.open_whole(self._host, request)
        worker = call.push.worker
        try:
            if not self._host.push_answers.has_one(worker):
                return b"", worker
            chunks: list[bytes] = []
            byte_count = 0
            while True:
                item = await call.next(WAITING_INTERVAL_MS / 1000)
                if isinstance(item, Outgoing):
                    parts = await self._chunk_messages(item, call.push)
                    byte_count += sum(map(len, parts))
                    if byte_count > QUEUED_BYTES_MAX:
                        return b"".join(chunks), worker
                    chunks += parts
                    continue
                if failpoints.armed and isinstance(item, Reply):
                    failpoints.hit("shard.before_reply")
                response = self._response(item, call.session.opened_ms, worker)
                # The fields are those of a stream's responses, and messages of
                # protobuf concatenate.
                return b"".join((*chunks, response.SerializeToString())), worker
        finally:
            await call.close()

    def _response(
        self, item: ClockChoice | Reply | None, started_ms: int, worker: WorkerKey
    ) -> messages.PushPullResponse:
        if item is None:
            waiting = waiting_message(self._host, now_ms() - started_ms)
            return messages.PushPullResponse(waiting=waiting)
        if isinstance(item, Reply):
            reply = reply_message(self._host, item, worker)
            return messages.PushPullResponse(reply=reply)
        return messages.PushPullResponse(staged=choice_message(item))

    async def _chunk_messages(self, item: Outgoing, push: PushId) -> Messages:
        if item.messages is not None:
            return item.messages
        return await self._host.values_messages(
            item.chunk_index, item.presence, push.worker, sequence=push.sequence
        )


def _all_of(chunk: Chunk) -> tuple[bool, ...]:
    return (True,) * len(chunk.slices)


def _chunks_wanted(host: ShardHost, named: Iterable[int]) -> list[int]:
    """Chunks of this shard that a pull asks for, all if it names none.

    Raises:
        Refusal: `CHUNK_INVALID` for one of another shard.
    """
    own = [chunk.index for chunk in host.model.chunks]
    wanted = set(named)
    if others := wanted.difference(own):
        raise Refusal(
            ErrorReason.CHUNK_INVALID,
            f"chunk {min(others)} is not one of shard {host.shard_index}'s "
            f"{len(own)} chunks",
        )
    return [index for index in own if index in wanted] if wanted else own
