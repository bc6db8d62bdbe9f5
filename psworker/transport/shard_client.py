"""Calls to one start of one shard.

Gradients and values go through as bytes: the generated messages are used for what is
small only. Whoever reads the values gets views of what gRPC received.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, cast

import grpc.aio
from typing_extensions import override

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
from pswire.shared_memory.segments import boot_id
from pswire.v1 import membership_pb2, push_pb2
from pswire.v1 import parameter_service_pb2 as pb
from pswire.v1.parameter_service_pb2_grpc import ParameterServiceStub
from psworker.transport import messages, values
from psworker.transport.calls import CallError, calling, translated
from psworker.transport.ports import Receiver, ShardPort, Traffic
from psworker.transport.shard_segments import (
    Declined,
    ShardSegments,
    SharedValues,
    from_thread,
    hand_over,
)

if TYPE_CHECKING:
    from pswire.v1.parameter_service_pb2_grpc import ParameterServiceAsyncStub

    _PushCall = grpc.aio.StreamStreamCall[bytes, bytes]
    _PullCall = grpc.aio.UnaryStreamCall[bytes, bytes]
    _SeedCall = grpc.aio.StreamUnaryCall[bytes, pb.SeedResponse]
    _WholeCalls = grpc.aio.StreamStreamMultiCallable[bytes, bytes]

CLOSE_TIMEOUT_S: Final = 1.0
"""Longest wait for a shard to end a call that has no push any more."""

_FETCH_TIMEOUT_S = 30.0
"""Longest time for one chunk of values. The step that it is for was answered."""

_SERVICE = "/pswire.v1.ParameterService/"


class ShardClient(ShardPort):
    """Calls by gRPC. Made and used on the event loop."""

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

    @override
    async def close(self) -> None:
        await self._whole_pushes.close()
        await self._channel.close()

    @override
    async def push_pull(
        self,
        requests: AsyncGenerator[bytes, None],
        receiver: Receiver,
        *,
        timeout_s: float | None,
    ) -> values.PushReply:
        async with calling(
            self._peer, lambda: self._push_pull(timeout=timeout_s)
        ) as call:
            writing = asyncio.ensure_future(self._write(call, requests))
            try:
                reply = await self._read_to_reply(call, receiver)
            finally:
                writing.cancel()
                await asyncio.gather(writing, return_exceptions=True)
            return reply

    @override
    async def push_pull_once(
        self, message: bytes, receiver: Receiver, *, timeout_s: float
    ) -> values.PushReply | None:
        self._traffic.sent_bytes += len(message)
        answer = await self._whole_pushes.push(message, timeout_s=timeout_s)
        with translated(self._peer):
            return self._take(answer, receiver)

    @override
    async def open_segments(
        self, generation: int, placement: Placement, *, timeout_s: float
    ) -> ShardSegments | Declined:
        request = pb.OpenSegmentsRequest(
            **self._addressed(), generation=generation, boot_id=boot_id()
        )
        with translated(self._peer):
            response = await self._stub.OpenSegments(request, timeout=timeout_s)
        opened = await hand_over(response, placement, self.shard.shard_index)
        if isinstance(opened, ShardSegments):
            self.segments = opened
        return opened

    @override
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
        request = pb.PullRequest(
            **self._addressed(),
            generation=generation,
            clock=clock,
            held_digests=held_digests,
            chunk_indexes=chunk_indexes,
        ).SerializeToString()
        self._traffic.sent_bytes += len(request)
        async with calling(
            self._peer, lambda: self._pull(request, timeout=timeout_s)
        ) as call:
            return await self._read_to_reply(call, receiver)

    @override
    async def seed(
        self, fence_number: int, chunks: Iterable[bytes], *, timeout_s: float
    ) -> None:
        header = pb.SeedHeader(
            **self._addressed(),
            fence_number=fence_number,
        ).SerializeToString()

        async def requests() -> AsyncGenerator[bytes, None]:
            yield join_fields((REQUEST_HEADER_FIELD, header))
            for chunk in chunks:
                yield chunk

        async with calling(self._peer, lambda: self._seed(timeout=timeout_s)) as call:
            # A refusal ends the call under the writer; awaiting it says why.
            with contextlib.suppress(asyncio.InvalidStateError):
                await self._write(call, requests())
            await call

    @override
    async def get_session(
        self, worker: WorkerKey, *, timeout_s: float
    ) -> values.ShardSession:
        with translated(self._peer):
            response = await self._stub.GetSession(
                pb.GetSessionRequest(
                    **self._addressed(worker),
                ),
                timeout=timeout_s,
            )
            return messages.session_of(response)

    @override
    async def commit(
        self, generation: int, choice: ClockChoice, *, timeout_s: float
    ) -> bool:
        with translated(self._peer):
            response = await self._stub.Commit(
                pb.CommitRequest(
                    **self._addressed(),
                    generation=generation,
                    choice=choice_message(choice),
                ),
                timeout=timeout_s,
            )
            return response.committed

    @override
    async def ready(
        self, generation: int, clock: int, sequence: int, *, timeout_s: float
    ) -> ClockChoice:
        with translated(self._peer):
            response = await self._stub.Ready(
                pb.ReadyRequest(
                    **self._addressed(),
                    generation=generation,
                    clock=clock,
                    sequence=sequence,
                ),
                timeout=timeout_s,
            )
            return read_choice(response.choice)

    @override
    async def await_contribution(
        self, generation: int, clock: int, sequence: int, *, timeout_s: float
    ) -> values.ContributionAwaited:
        with translated(self._peer):
            response = await self._stub.AwaitContribution(
                pb.AwaitContributionRequest(
                    **self._addressed(),
                    generation=generation,
                    clock=clock,
                    sequence=sequence,
                ),
                timeout=timeout_s,
            )
            return values.ContributionAwaited(response.clock, response.optimizer)

    @override
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
        request = pb.PullOptimizerStateRequest(
            **self._addressed(),
            generation=generation,
            clock=clock,
            optimizer=optimizer,
            only_settings=only_settings,
            optimizer_digest=spec_digest,
        )
        parts: list[tuple[int, bytes]] = []
        async with calling(
            self._peer,
            lambda: self._stub.PullOptimizerState(request, timeout=timeout_s),
        ) as call:
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

    @override
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
        header = pb.StageOptimizerStateHeader(
            **self._addressed(),
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

        async with calling(
            self._peer, lambda: self._stub.StageOptimizerState(timeout=timeout_s)
        ) as call:
            # A refusal ends the call under the writer; awaiting it says why.
            with contextlib.suppress(asyncio.InvalidStateError):
                for request in requests():
                    self._traffic.sent_bytes += request.ByteSize()
                    await call.write(request)
                await call.done_writing()
            await call

    def _addressed(self, worker: WorkerKey | None = None) -> dict[str, Any]:
        """What every request begins with: who calls which start of which shard."""
        return {
            "protocol_version": PROTOCOL_VERSION,
            "job_id": self._job_id,
            "worker": identity_message(worker or self._worker),
            "shard_incarnation": self.shard.incarnation,
        }

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


class WholePushes:
    """Pushes of one message each to one start of one shard, on one call.

    A message on a call that is open costs about a third of a call of its own. To
    whoever pushes it is a call for each push all the same: any end of it but an answer,
    be it a refusal, a time-out or a cancellation, ends the call with that push, and the
    next push opens another one.
    """

    def __init__(self, calls: "_WholeCalls", peer: str) -> None:
        """Opens nothing yet.

        Args:
            calls: Opens calls of `PushPullOnce`.
            peer: The shard, for the text of errors.
        """
        self._calls = calls
        self._peer = peer
        self._open: _PushCall | None = None

    async def push(self, message: bytes, *, timeout_s: float) -> bytes:
        """Sends a push; the answer.

        Raises:
            CallError: The shard refused it, or it is unknown what became of it.
        """
        # Removed meanwhile: a push that is being cancelled is no hindrance.
        call, self._open = self._open, None
        if call is None or call.done():
            with translated(self._peer):
                call = self._calls()
        try:
            with translated(self._peer):
                async with asyncio.timeout(timeout_s):
                    answer = await self._exchange(call, message)
        except TimeoutError:
            call.cancel()
            raise CallError(
                self._peer,
                "DEADLINE_EXCEEDED",
                "Deadline Exceeded",
                refusal=None,
                decided=False,
            ) from None
        except BaseException:
            call.cancel()
            raise
        self._open = call
        return answer

    async def close(self) -> None:
        """Ends the call that is open, and carries no push, by saying that none follows.

        What a shard awaits of a call that is cancelled is never freed there
        (grpc/grpc#43360).
        """
        call, self._open = self._open, None
        if call is None:
            return
        # However it ends, nothing is lost with it.
        with contextlib.suppress(
            asyncio.InvalidStateError, TimeoutError, grpc.aio.AioRpcError
        ):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await call.done_writing()
                await call.read()
        call.cancel()

    async def _exchange(self, call: "_PushCall", message: bytes) -> bytes:
        # A call that has ended refuses to write; reading says why.
        with contextlib.suppress(asyncio.InvalidStateError):
            await call.write(message)
        answer = await call.read()
        if isinstance(answer, bytes):
            return answer
        raise CallError(
            self._peer, "UNAVAILABLE", "it ended the call", refusal=None, decided=False
        )
