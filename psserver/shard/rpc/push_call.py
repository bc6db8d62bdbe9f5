"""One call that carries a push: its messages in, its answers out."""

import asyncio
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from psserver.edge.guard import REFUSED_REST_TIMEOUT_S, as_refusal, discard
from psserver.edge.monotonic import now_ms
from psserver.shard.core.push import PushId, Reply, StagedChunk, Trailer
from psserver.shard.host.push_session import (
    Outgoing,
    ProvisionalChunks,
    PushSession,
)
from psserver.shard.host.shard_host import ShardHost
from psserver.shard.rpc.push_codec import (
    PushFields,
    PushMessage,
    check_caller,
    check_frame,
    check_window,
    push_id,
    read_trailer,
    value_entries_of,
)
from psserver.shard.rpc.readiness import catch_up, declaration_known
from psserver.shard.tensors.compressed_gradients import raw_byte_count
from psserver.shard.tensors.contribution import SparsePayload
from pswire import failpoints
from pswire.frames import (
    ENCODING_RAW,
    ENCODING_SPARSE_ROWS,
    ChunkFrame,
    bits_from_bytes,
)
from pswire.membership import ClockChoice, Outcome
from pswire.reasons import ErrorReason, Refusal
from pswire.v1 import push_pb2

if TYPE_CHECKING:
    from psserver.shard.core.push import PushEntry


class PushCall:
    """One call that carries a push.

    Chunks that come before the trailer are provisional: the core hears of the push
    with its trailer, and then of all of it at once.
    """

    def __init__(
        self,
        host: ShardHost,
        push: PushId,
        header: push_pb2.PushHeader,
        *,
        wants_values: bool,
    ) -> None:
        self.session = PushSession(
            wants_values=wants_values,
            opened_ms=now_ms(),
            is_shared=host.members.reads_values(push.worker),
        )
        self.session.begin_spans(host.spans.recording, header.clock)
        self._host = host
        self.push = push
        self._header = header
        self._value_entries = value_entries_of(host.model, header)
        self._entry: PushEntry | None = None
        self._ahead: ProvisionalChunks | None = ProvisionalChunks(push, self.session)
        self._reader: asyncio.Task[None] | None = None

    @classmethod
    async def open(
        cls, host: ShardHost, requests: AsyncIterator[bytes], *, wants_values: bool
    ) -> "PushCall":
        """Admits a push by its first message and starts to read the others.

        Raises:
            Refusal: With no state changed.
        """
        fields = await _first_message(host, requests)
        try:
            header = await fields.header()
            call = await cls._admit(host, header, wants_values=wants_values)
            try:
                await call._receive(fields)
                call.start_reading(requests)
            except BaseException:
                await call.close()
                raise
        except Refusal:
            await discard(requests, REFUSED_REST_TIMEOUT_S)
            raise
        return call

    @classmethod
    async def open_whole(cls, host: ShardHost, data: bytes) -> "PushCall":
        """Admits a push that is one message.

        Raises:
            Refusal: With no state changed.
        """
        host.received_bytes += len(data)
        fields = PushFields(data)
        if not fields.is_whole:
            raise Refusal(
                ErrorReason.MALFORMED_MESSAGE,
                "a push in one message has a header and a trailer",
            )
        call = await cls._admit(host, await fields.header(), wants_values=True)
        try:
            await call._receive(fields)
        except BaseException:
            await call.close()
            raise
        return call

    @classmethod
    async def _admit(
        cls, host: ShardHost, header: push_pb2.PushHeader, *, wants_values: bool
    ) -> "PushCall":
        check_caller(host, header)
        if not wants_values and host.model.core.state.has_two_phase_clocks:
            raise Refusal(
                ErrorReason.UNSUPPORTED,
                "with two-phase steps a push goes by PushPull, on which its worker is "
                "told when to commit",
            )
        push = push_id(header.worker, header.sequence)
        await catch_up(host, header.generation)
        host.model.core.check_push(
            push, header.clock, now_ms(), generation=header.generation
        )
        check_window(header)
        call = cls(host, push, header, wants_values=wants_values)
        assert call._ahead is not None
        host.members.of(push.worker).begin_call(call._ahead)
        return call

    @property
    def is_ahead(self) -> bool:
        """Whether the trailer is still to come: nobody waits for the push."""
        return self._ahead is not None

    def take(self, message: PushMessage) -> None:
        """Takes one message.

        Raises:
            Refusal: With no state changed by this message. What earlier ones have
                brought of the push stays: the rest may come with another call.
        """
        if self._ahead is None and self._entry is None:
            return  # done and acknowledged: nothing of it can matter any more
        if failpoints.armed:
            failpoints.hit("shard.push_received")
        optimizer = self._header.optimizer
        for chunk in message.chunks:
            # Before the trailer: a push that comes at once is whole, or is refused.
            self._take_chunk(chunk)
        if message.trailer is not None:
            trailer = read_trailer(
                self._host, optimizer, message.trailer, self._value_entries
            )
            if trailer.loads_state:
                self._host.members.of(self.push.worker).check_state(
                    self._host.model.core, self.push.sequence, optimizer
                )
            if self._ahead is not None:
                self._enter(self._ahead, trailer)
            elif self._entry is not None:
                self._host.model.core.add_trailer(self.push, self._entry, trailer)
        entry = self._entry
        if entry is not None and entry.outcome is None and entry.is_complete:
            self._host.note_complete(self.push)
        self._host.pump()

    def _take_chunk(self, frame: ChunkFrame) -> None:
        check_frame(frame)
        window = self._host.model.core.on_shard.window_of(self.push.worker)
        if window.has_chunk(self.push.sequence, frame.index, frame.digest):
            return  # sent again
        frame = self._host.shared.resolve(self.push.worker, frame)
        presence = self._presence_of(frame.index, frame.presence)
        model = self._host.model
        is_sparse = frame.encoding == ENCODING_SPARSE_ROWS
        is_whole = is_sparse or frame.encoding == ENCODING_RAW
        placed = model.placement.chunks[frame.index]
        rows = model.engine.check_chunk(
            frame.index,
            presence,
            len(frame.data) if is_whole else raw_byte_count(placed, presence),
            optimizer=self._header.optimizer,
            row_indices=frame.row_indices if is_sparse else None,
            value_entries=self._value_entries,
        )
        payload: object = frame.data
        if is_sparse:
            payload = SparsePayload(frame.data, rows, placed.byte_count)
        elif not is_whole:
            if self._value_entries.intersection(
                piece.entry_index for piece in placed.slices
            ):
                raise Refusal(
                    ErrorReason.CHUNK_INVALID,
                    f"chunk {frame.index} has values in encoding {frame.encoding}: "
                    "they go as they are",
                )
            payload = model.compressed.payload(
                placed, presence, frame.encoding, frame.data
            )
        chunk = StagedChunk(digest=frame.digest, presence=presence, payload=payload)
        if self._ahead is not None:
            self._ahead.put(frame.index, chunk)
        elif self._entry is not None:
            model.core.add_chunk(self.push, self._entry, frame.index, chunk)

    def _enter(self, ahead: ProvisionalChunks, trailer: Trailer) -> None:
        """The push begins to count: with its trailer, and all that went ahead of it."""
        if ahead.is_ended:
            return  # the call is about to hear why
        host, header, push = self._host, self._header, self.push
        core = host.model.core
        entry = core.open_push(
            push,
            header.clock,
            now_ms(),
            generation=header.generation,
            is_last=trailer.is_last,
        )
        core.acknowledge(push.worker, header.sequence_unacknowledged_min)
        host.history.opened(push, header.clock)
        self.session.opened_ms = now_ms()
        self.session.end_span("receive", push.worker.worker_id)
        host.attach(push, self.session)
        self._entry, self._ahead = entry, None
        if entry is not None:
            core.add_push(push, entry, trailer, ahead.chunks)
            host.history.trailer(push, trailer)
            if host.recorder is not None:
                host.recorder.pushed(push, header.clock, trailer)

    def start_reading(self, requests: AsyncIterator[bytes]) -> None:
        """Reads the rest of the call while answers go out."""
        self._reader = asyncio.create_task(self._read(requests))

    async def next(self, timeout_s: float) -> Outgoing | ClockChoice | Reply | None:
        """What to send next; None when nothing came in time.

        The answer to a push that was done before this call waits for the rest of the
        call: an answer that overtook a chunk with other bytes would hide that the same
        id was given to another push.

        Raises:
            Refusal: The call is over.
        """
        item = await self.session.next(timeout_s)
        if item is None:
            self._check_may_be_completed()
        is_resend = isinstance(item, Reply) and item.outcome is Outcome.DUPLICATE
        if not is_resend or self._reader is None or self._reader.done():
            return item
        read, _ = await asyncio.wait((self._reader,), timeout=timeout_s)
        return await self.session.next(timeout_s) if read else None

    def _check_may_be_completed(self) -> None:
        """Refuses a call whose sender has said all, but for the trailer.

        Asked when a call has been quiet: of a sender that ends its call reading ends
        too, just before gRPC ends the call, and it is sent nothing.
        """
        self.session.check()  # it may have failed while the wait ended
        if self.is_ahead and self._reader is not None and self._reader.done():
            raise Refusal(
                ErrorReason.MALFORMED_MESSAGE, "the push ended without its trailer"
            )

    async def close(self) -> None:
        """Ends reading; what was staged stays, and what came ahead is dropped."""
        member = self._host.members.of(self.push.worker)
        member.end_call(self.push.sequence, self.session)
        self.session.end_span("answer", self.push.worker.worker_id)
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)

    async def _read(self, requests: AsyncIterator[bytes]) -> None:
        messages = aiter(requests)
        try:
            while (data := await self._next_message(messages)) is not None:
                self._host.received_bytes += len(data)
                await self._receive(PushFields(data))
        except Refusal as refusal:
            if refusal.reason is not ErrorReason.WAIT_TIMEOUT:
                await discard(requests, REFUSED_REST_TIMEOUT_S)
            self.session.fail(refusal)
        except Exception as error:  # the call must end, whatever it was
            self.session.fail(as_refusal(error, "push"))

    async def _next_message(self, messages: AsyncIterator[bytes]) -> bytes | None:
        # A sender that has sent its trailer has it all; before that it still computes.
        limits = self._host.limits
        limit_s = limits.step_s if self.is_ahead else limits.message_s
        try:
            async with asyncio.timeout(limit_s):
                return await anext(messages)
        except StopAsyncIteration:
            return None
        except TimeoutError:
            # Its worker asks what has come, and sends the rest by another call.
            raise Refusal(
                ErrorReason.WAIT_TIMEOUT,
                f"the rest of push {self.push.sequence} of {self.push.worker} did not "
                f"come within {limit_s:g} s",
            ) from None

    async def _receive(self, fields: PushFields) -> None:
        message = await fields.message()
        await self._await_declaration(message)
        self.take(message)

    async def _await_declaration(self, message: PushMessage) -> None:
        if message.trailer is not None and message.trailer.optimizer_digest:
            await declaration_known(
                self._host, self._header.optimizer, message.trailer.optimizer_digest
            )

    def _presence_of(self, chunk_index: int, presence: bytes) -> tuple[bool, ...]:
        chunks = self._host.model.placement.chunks
        if chunk_index >= len(chunks):
            raise Refusal(
                ErrorReason.CHUNK_INVALID, f"the placement has no chunk {chunk_index}"
            )
        return bits_from_bytes(presence, len(chunks[chunk_index].slices))


async def _first_message(host: ShardHost, requests: AsyncIterator[bytes]) -> PushFields:
    first = await anext(aiter(requests), None)
    if first is None:
        raise Refusal(ErrorReason.MALFORMED_MESSAGE, "the push is empty")
    host.received_bytes += len(first)
    return PushFields(first)
