"""Calls to one start of one shard.

Gradients and values go through as bytes: the generated messages are used for what is
small only. Whoever reads the values gets views of what gRPC received.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from pswire.channels import ChannelKind, aio_channel
from pswire.frames import (
    REQUEST_HEADER_FIELD,
    RESPONSE_CHUNK_FIELD,
    RESPONSE_REPLY_FIELD,
    RESPONSE_STAGED_FIELD,
    RESPONSE_WAITING_FIELD,
    SHARED_CHUNKS_FIELD,
    ChunkFrame,
    decode_chunk,
    join_fields,
    split_fields,
)
from pswire.limits import PROTOCOL_VERSION
from pswire.membership import ClockChoice, WorkerKey
from pswire.membership_codec import choice_message, identity_message, read_choice
from pswire.placement import Placement
from pswire.reasons import ErrorReason, Refusal
from pswire.v1 import membership_pb2, push_pb2
from pswire.v1 import parameter_service_pb2 as pb
from pswire.v1.parameter_service_pb2_grpc import ParameterServiceStub
from psworker.transport import messages, values
from psworker.transport.call_error import cancelled_at_exit, translated
from psworker.transport.segment_opening import Declined, hand_over, segments_request
from psworker.transport.shard_segments import ShardSegments, SharedValues, from_thread
from psworker.transport.whole_pushes import WholePushes

if TYPE_CHECKING:
    import grpc.aio

    from pswire.v1.parameter_service_pb2_grpc import ParameterServiceAsyncStub

    _PushCall = grpc.aio.StreamStreamCall[bytes, bytes]
    _PullCall = grpc.aio.UnaryStreamCall[bytes, bytes]
    _SeedCall = grpc.aio.StreamUnaryCall[bytes, pb.SeedResponse]

_FETCH_TIMEOUT_S = 30.0
"""Longest time for one chunk of values. The step that it is for was answered."""

_SERVICE = "/pswire.v1.ParameterService/"


@dataclass(slots=True)
class Traffic:
    """Bytes of all messages of the data plane."""

    sent_bytes: int = 0
    received_bytes: int = 0


def _ignore(_: ClockChoice) -> None:
    """For calls that carry no push."""


@dataclass(frozen=True, slots=True)
class Receiver:
    """Takes what comes before the reply, in order, on the event loop.

    Attributes:
        on_chunk: Takes the bytes of a `ParameterChunk`, or where its values are.
        on_waiting: Takes whom the call waits for.
        on_staged: Takes that everything of the clock is there and waits for a commit.
    """

    on_chunk: Callable[[memoryview | SharedValues], None]
    on_waiting: Callable[[values.Waiting], None]
    on_staged: Callable[[ClockChoice], None] = _ignore


class ShardClient:
    """One start of one shard. Made and used on the event loop.

    Every call raises `CallError` when it fails.

    Attributes:
        segments: Memory shared with it, None where tensors go in messages.
    """

    def __init__(
        self,
        shard: values.ShardAddress,
        job_id: str,
        worker: WorkerKey,
        traffic: Traffic,
    ) -> None:
        self.shard = shard
        self.segments: ShardSegments | None = None
        self._peer = f"shard {shard.shard_index} at {shard.address}"
        self._job_id = job_id
        self._worker = worker
        self._traffic = traffic
        self._channel = aio_channel(shard.address, ChannelKind.DATA)
        self._stub = cast(
            "ParameterServiceAsyncStub", ParameterServiceStub(self._channel)
        )
        # `None` serializers: bytes go to gRPC and come from it as they are.
        self._push_pull: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = (
            self._channel.stream_stream(_SERVICE + "PushPull", None, None)
        )
        self._whole_pushes = WholePushes(
            self._channel.stream_stream(_SERVICE + "PushPullOnce", None, None),
            self._peer,
        )
        self._pull: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = (
            self._channel.unary_stream(_SERVICE + "Pull", None, None)
        )
        self._seed: grpc.aio.StreamUnaryMultiCallable[bytes, pb.SeedResponse] = (
            self._channel.stream_unary(
                _SERVICE + "Seed", None, pb.SeedResponse.FromString
            )
        )

    async def close(self) -> None:
        """Ends the channel and the calls on it."""
        await self._whole_pushes.close()
        await self._channel.close()

    async def push_pull(
        self,
        requests: AsyncGenerator[bytes, None],
        receiver: Receiver,
        *,
        timeout_s: float | None,
    ) -> values.PushReply:
        """Sends a push and receives values, in both directions at once.

        Args:
            requests: Serialized `PushPullRequest`s, the header in the first.
            receiver: Takes the values.
            timeout_s: Deadline of the call, `None` for one that whoever awaits it ends.
        """
        call = self._push_pull(timeout=timeout_s)
        async with cancelled_at_exit(call):
            with translated(self._peer):
                writing = asyncio.ensure_future(self._write(call, requests))
                try:
                    reply = await self._read_to_reply(call, receiver)
                finally:
                    writing.cancel()
                    await asyncio.gather(writing, return_exceptions=True)
                return reply

    async def push_pull_once(
        self, message: bytes, receiver: Receiver, *, timeout_s: float
    ) -> values.PushReply | None:
        """Sends a push that is one message and receives values.

        Args:
            message: A serialized `PushPullOnceRequest`.
            receiver: Takes the values.
            timeout_s: Longest time until the answer.

        Returns:
            The answer, `None` when the push waits at the shard for others or for a
            commit: it goes on by `push_pull`.
        """
        self._traffic.sent_bytes += len(message)
        answer = await self._whole_pushes.push(message, timeout_s=timeout_s)
        with translated(self._peer):
            return self._take(answer, receiver)

    async def open_segments(
        self, generation: int, placement: Placement, *, timeout_s: float
    ) -> ShardSegments | Declined:
        """Shares memory with the shard if both can; see `segment_opening`."""
        request = segments_request(
            self._job_id, self._worker, self.shard, generation=generation
        )
        with translated(self._peer):
            response = await self._stub.OpenSegments(request, timeout=timeout_s)
        opened = await hand_over(response, placement, self.shard.shard_index)
        if isinstance(opened, ShardSegments):
            self.segments = opened
        return opened

    async def pull(
        self,
        generation: int,
        clock: int,
        receiver: Receiver,
        *,
        held_digests: Sequence[int] = (),
        timeout_s: float,
        chunk_indexes: Iterable[int] = (),
    ) -> values.PushReply:
        """Receives the values that this member may see at a clock.

        Args:
            generation: Newest generation known here.
            clock: The clock.
            receiver: Takes the values.
            held_digests: Of the elements of each chunk of the shard as they are here.
            timeout_s: Deadline of the call.
            chunk_indexes: Only these, in messages; none for all.
        """
        request = pb.PullRequest(
            protocol_version=PROTOCOL_VERSION,
            job_id=self._job_id,
            worker=identity_message(self._worker),
            shard_incarnation=self.shard.incarnation,
            generation=generation,
            clock=clock,
            held_digests=held_digests,
            chunk_indexes=chunk_indexes,
        ).SerializeToString()
        self._traffic.sent_bytes += len(request)
        call = self._pull(request, timeout=timeout_s)
        async with cancelled_at_exit(call):
            with translated(self._peer):
                return await self._read_to_reply(call, receiver)

    async def seed(
        self, fence_number: int, chunks: Iterable[bytes], *, timeout_s: float
    ) -> None:
        """Stages first values.

        Args:
            fence_number: The fence that asked for them.
            chunks: Serialized `SeedRequest`s that hold only a chunk, all of the shard.
            timeout_s: Deadline of the call.
        """
        header = pb.SeedHeader(
            protocol_version=PROTOCOL_VERSION,
            job_id=self._job_id,
            worker=identity_message(self._worker),
            shard_incarnation=self.shard.incarnation,
            fence_number=fence_number,
        ).SerializeToString()

        async def requests() -> AsyncGenerator[bytes, None]:
            yield join_fields((REQUEST_HEADER_FIELD, header))
            for chunk in chunks:
                yield chunk

        call = self._seed(timeout=timeout_s)
        async with cancelled_at_exit(call):
            with translated(self._peer):
                # A refusal ends the call under the writer; awaiting it says why.
                with contextlib.suppress(asyncio.InvalidStateError):
                    await self._write(call, requests())
                await call

    async def get_session(
        self, worker: WorkerKey, *, timeout_s: float
    ) -> values.ShardSession:
        """Asks what became of the pushes of one start of a worker."""
        with translated(self._peer):
            response = await self._stub.GetSession(
                pb.GetSessionRequest(
                    protocol_version=PROTOCOL_VERSION,
                    job_id=self._job_id,
                    worker=identity_message(worker),
                    shard_incarnation=self.shard.incarnation,
                ),
                timeout=timeout_s,
            )
            return messages.session_of(response)

    async def commit(
        self, generation: int, choice: ClockChoice, *, timeout_s: float
    ) -> bool:
        """Commits a clock. False: its contributors are others, `staged` comes again."""
        with translated(self._peer):
            response = await self._stub.Commit(
                pb.CommitRequest(
                    protocol_version=PROTOCOL_VERSION,
                    job_id=self._job_id,
                    worker=identity_message(self._worker),
                    shard_incarnation=self.shard.incarnation,
                    generation=generation,
                    choice=choice_message(choice),
                ),
                timeout=timeout_s,
            )
            return response.committed

    async def ready(
        self, generation: int, clock: int, sequence: int, *, timeout_s: float
    ) -> ClockChoice:
        """Says that every shard has all of a push; returns when it's chosen who counts.

        Args:
            generation: Newest generation known here.
            clock: Clock of the push.
            sequence: Number of the push.
            timeout_s: Deadline of the call.
        """
        with translated(self._peer):
            response = await self._stub.Ready(
                pb.ReadyRequest(
                    protocol_version=PROTOCOL_VERSION,
                    job_id=self._job_id,
                    worker=identity_message(self._worker),
                    shard_incarnation=self.shard.incarnation,
                    generation=generation,
                    clock=clock,
                    sequence=sequence,
                ),
                timeout=timeout_s,
            )
            return read_choice(response.choice)

    async def await_contribution(
        self, generation: int, clock: int, sequence: int, *, timeout_s: float
    ) -> values.Contribution:
        """Returns once a clock waits for nobody but workers that make this call."""
        with translated(self._peer):
            response = await self._stub.AwaitContribution(
                pb.AwaitContributionRequest(
                    protocol_version=PROTOCOL_VERSION,
                    job_id=self._job_id,
                    worker=identity_message(self._worker),
                    shard_incarnation=self.shard.incarnation,
                    generation=generation,
                    clock=clock,
                    sequence=sequence,
                ),
                timeout=timeout_s,
            )
            return values.Contribution(response.clock, response.optimizer)

    async def pull_optimizer_state(
        self,
        optimizer: str,
        generation: int,
        clock: int,
        *,
        spec_digest: str,
        only_settings: bool,
        on_waiting: Callable[[values.Waiting], None],
        timeout_s: float,
    ) -> tuple[list[tuple[int, bytes]], values.OptimizerSettings]:
        """Reads the state of an optimizer at a clock.

        Args:
            optimizer: Its name.
            generation: Newest generation known here.
            clock: Clock that the state must have reached.
            spec_digest: Declaration of the optimizer, empty for the first.
            only_settings: Whether the settings will do.
            on_waiting: Takes whom the call waits for.
            timeout_s: Deadline of the call.

        Returns:
            Chunk and safetensors file of each part, and the newest settings.
        """
        request = pb.PullOptimizerStateRequest(
            protocol_version=PROTOCOL_VERSION,
            job_id=self._job_id,
            worker=identity_message(self._worker),
            shard_incarnation=self.shard.incarnation,
            generation=generation,
            clock=clock,
            optimizer=optimizer,
            only_settings=only_settings,
            optimizer_digest=spec_digest,
        )
        parts: list[tuple[int, bytes]] = []
        call = self._stub.PullOptimizerState(request, timeout=timeout_s)
        async with cancelled_at_exit(call):
            with translated(self._peer):
                async for response in call:
                    self._traffic.received_bytes += response.ByteSize()
                    if response.HasField("part"):
                        parts.append((response.part.chunk_index, response.part.tensors))
                    elif response.HasField("waiting"):
                        on_waiting(messages.waiting_of(response.waiting))
                    elif response.HasField("settings"):
                        return parts, messages.settings_used_of(response.settings)
                raise Refusal(
                    ErrorReason.MALFORMED_MESSAGE, f"{self._peer} ended without a reply"
                )

    async def stage_optimizer_state(
        self,
        optimizer: str,
        generation: int,
        sequence: int,
        parts: Iterable[tuple[int, bytes]],
        *,
        spec_digest: str,
        timeout_s: float,
    ) -> None:
        """Stages state of an optimizer for a push.

        Args:
            optimizer: Its name.
            generation: Newest generation known here.
            sequence: The push.
            parts: Chunk and safetensors file of each.
            spec_digest: Declaration of the optimizer, empty for the first.
            timeout_s: Deadline of the call.
        """
        header = pb.StageOptimizerStateHeader(
            protocol_version=PROTOCOL_VERSION,
            job_id=self._job_id,
            worker=identity_message(self._worker),
            shard_incarnation=self.shard.incarnation,
            generation=generation,
            sequence=sequence,
            optimizer=optimizer,
            optimizer_digest=spec_digest,
        )

        def requests() -> Iterator[pb.StageOptimizerStateRequest]:
            yield pb.StageOptimizerStateRequest(header=header)
            for chunk_index, tensors in parts:
                part = push_pb2.OptimizerStatePart(
                    chunk_index=chunk_index, optimizer=optimizer, tensors=tensors
                )
                yield pb.StageOptimizerStateRequest(part=part)

        call = self._stub.StageOptimizerState(timeout=timeout_s)
        async with cancelled_at_exit(call):
            with translated(self._peer):
                # A refusal ends the call under the writer; awaiting it says why.
                with contextlib.suppress(asyncio.InvalidStateError):
                    for request in requests():
                        self._traffic.sent_bytes += request.ByteSize()
                        await call.write(request)
                    await call.done_writing()
                await call

    def _shared_values(self, frame: ChunkFrame) -> SharedValues:
        if self.segments is None:
            raise Refusal(
                ErrorReason.MALFORMED_MESSAGE,
                f"{self._peer} says that chunk {frame.index} is in shared memory, of "
                "which there is none",
            )
        return SharedValues(self.segments, frame, from_thread(self._fetch))

    async def _fetch(self, chunk_index: int) -> list[ChunkFrame]:
        """The values of a chunk, in messages."""
        found: list[memoryview | SharedValues] = []
        receiver = Receiver(on_chunk=found.append, on_waiting=lambda _: None)
        await self.pull(
            0, 0, receiver, timeout_s=_FETCH_TIMEOUT_S, chunk_indexes=(chunk_index,)
        )
        return [decode_chunk(view) for view in found if isinstance(view, memoryview)]

    async def _write(
        self,
        call: "_PushCall | _SeedCall",
        requests: AsyncGenerator[bytes, None],
    ) -> None:
        async with contextlib.aclosing(requests):
            async for request in requests:
                self._traffic.sent_bytes += len(request)
                await call.write(request)
        await call.done_writing()

    async def _read_to_reply(
        self,
        call: "_PushCall | _PullCall",
        receiver: Receiver,
    ) -> values.PushReply:
        reply: values.PushReply | None = None
        while True:
            response = await call.read()
            if not isinstance(response, bytes):
                break  # grpc.aio.EOF
            reply = self._take(response, receiver) or reply
        if reply is None:
            raise Refusal(
                ErrorReason.MALFORMED_MESSAGE, f"{self._peer} ended without a reply"
            )
        return reply

    def _take(self, response: bytes, receiver: Receiver) -> values.PushReply | None:
        """Gives away what a response holds, but for the reply."""
        self._traffic.received_bytes += len(response)
        reply: values.PushReply | None = None
        for number, view in split_fields(response):
            if number == RESPONSE_CHUNK_FIELD:
                receiver.on_chunk(view)
            elif number == SHARED_CHUNKS_FIELD:
                receiver.on_chunk(self._shared_values(decode_chunk(view)))
            elif number == RESPONSE_REPLY_FIELD:
                message = push_pb2.PushReply.FromString(bytes(view))
                reply = messages.reply_of(message)
            elif number == RESPONSE_WAITING_FIELD:
                waiting = push_pb2.Waiting.FromString(bytes(view))
                receiver.on_waiting(messages.waiting_of(waiting))
            elif number == RESPONSE_STAGED_FIELD:
                choice = membership_pb2.ClockChoice.FromString(bytes(view))
                receiver.on_staged(read_choice(choice))
        return reply
