"""One call that waits for the answer to a push."""

import asyncio
from collections import deque
from dataclasses import dataclass, replace

from psserver.shard.core.push import PushId, Reply, StagedChunk
from pswire.limits import CHUNK_BYTES_MAX, REFERENCES_BYTES_MAX
from pswire.membership import ClockChoice
from pswire.reasons import Refusal
from pswire.span_log import Recording, clock_us

QUEUED_BYTES_MAX = 4 << 20
"""Encoded chunks kept for a call that does not read, which costs 8 MiB in all: gRPC
holds up to 4 MiB more, of what it has sent and of the messages behind it. Beyond it
only the chunk's index is kept and the values are encoded again when they are wanted. In
SSP and ASP newer values are as good. In BSP they can't change before this worker has
answered with its next push, but with backup workers: then it was too late for the next
clock, whose reply has it pull again."""


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A chunk to send.

    Attributes:
        chunk_index: Which chunk.
        presence: Slices to send; None for all.
        messages: The encoded messages, None when they must be made.
        reference: A message that says where in shared memory it is; None when there is
            none.
    """

    chunk_index: int
    presence: tuple[bool, ...] | None
    messages: tuple[bytes, ...] | None = None
    reference: bytes | None = None

    @property
    def queued_bytes(self) -> int:
        """What its messages take."""
        return sum(map(len, self.messages or ()))


class PushSession:
    """Chunks and the reply on their way to one call; in one mode each chunk once.

    Args:
        wants_values: Whether the call asked for values.
        opened_ms: When it came.
        is_shared: Whether the values it wants are those in shared memory.
    """

    def __init__(
        self, *, wants_values: bool, opened_ms: int, is_shared: bool = False
    ) -> None:
        self.wants_values = wants_values
        self.is_shared = is_shared
        self.opened_ms = opened_ms
        self._chunks: deque[Outgoing] = deque()
        self._sent: set[int] = set()
        self._queued_bytes = 0
        self._late_count = 0  # of chunks whose messages are made when they are wanted
        self._under_way: Outgoing | None = None
        self._staged: ClockChoice | None = None
        self._reply: Reply | None = None
        self._failure: Refusal | None = None
        self._wake = asyncio.Event()
        self._recording: Recording | None = None
        self._step = self._since_us = 0

    # What it goes through, for a trace

    def begin_spans(self, recording: Recording | None, step: int) -> None:
        """Its push has begun to come."""
        if recording is not None:
            self._recording, self._step, self._since_us = recording, step, clock_us()

    def end_span(self, kind: str, worker_id: str) -> None:
        """Its push has gone through this, and goes on."""
        if self._recording is not None:
            since_us, self._since_us = self._since_us, clock_us()
            self._recording.note(kind, since_us, self._since_us, self._step, worker_id)

    def put(self, chunk: Outgoing) -> None:
        """Queues a chunk that the call has not had yet."""
        if not self.wants_values or chunk.chunk_index in self._sent:
            return
        self._sent.add(chunk.chunk_index)
        if self.is_shared and chunk.reference is not None:
            chunk = replace(chunk, messages=(chunk.reference,))
        elif chunk.reference is not None:
            chunk = replace(chunk, reference=None)
        size = chunk.queued_bytes
        is_full = self._queued_bytes + size > QUEUED_BYTES_MAX
        if is_full or (self._late_count and chunk.reference is None):
            chunk = Outgoing(chunk.chunk_index, chunk.presence)
        self._count(chunk, 1)
        self._chunks.append(chunk)
        self._wake.set()

    @property
    def has_room(self) -> bool:
        """Whether an encoded chunk would be kept. May be asked by another thread."""
        room = QUEUED_BYTES_MAX - self._queued_bytes
        return not self._late_count and room >= CHUNK_BYTES_MAX

    def send_anew(self) -> None:
        """Lets chunks that the call has had go again: they may be too old by now."""
        self._sent.clear()

    def put_staged(self, choice: ClockChoice) -> None:
        """Everything of the clock is there; replaces what was not sent yet."""
        self._staged = choice
        self._wake.set()

    def finish(self, reply: Reply) -> None:
        """The push is done; the reply goes out after the chunks."""
        self._reply = reply
        self._wake.set()

    def fail(self, refusal: Refusal) -> None:
        """The call ends with an error, before anything that is still queued."""
        self._failure = refusal
        self._wake.set()

    def check(self) -> None:
        """For whoever waits for something else meanwhile.

        Raises:
            Refusal: The call is over.
        """
        if self._failure is not None:
            raise self._failure

    async def next(self, timeout_s: float) -> Outgoing | ClockChoice | Reply | None:
        """What to send next; None when nothing came in time.

        What was returned before has been sent by then.

        Raises:
            Refusal: The call is over.
        """
        if self._under_way is not None:
            self._count(self._under_way, -1)
            self._under_way = None
        if not self._has_news:
            self._wake.clear()
            try:
                async with asyncio.timeout(timeout_s):
                    await self._wake.wait()
            except TimeoutError:
                return None
        self.check()
        if self._chunks:
            return self._take()
        if self._staged is not None:
            # Also when the push is done: other shards may wait for who hears it.
            staged, self._staged = self._staged, None
            return staged
        return self._reply

    def _take(self) -> Outgoing:
        """The next chunk. Where it is in shared memory, all that follow and are too."""
        chunk = self._chunks.popleft()
        if chunk.reference is None:
            self._under_way = chunk
            return chunk
        self._count(chunk, -1)
        joined = [chunk.reference]
        byte_count = len(chunk.reference)
        while self._chunks and (following := self._chunks[0].reference) is not None:
            byte_count += len(following)
            if byte_count > REFERENCES_BYTES_MAX:
                break
            joined.append(following)
            self._count(self._chunks.popleft(), -1)
        return replace(chunk, messages=(b"".join(joined),))

    def _count(self, chunk: Outgoing, sign: int) -> None:
        self._queued_bytes += sign * chunk.queued_bytes
        if chunk.messages is None:
            self._late_count += sign

    @property
    def _has_news(self) -> bool:
        return bool(self._chunks or self._staged or self._reply or self._failure)


class ProvisionalChunks:
    """What one call has sent ahead of its push's trailer.

    A worker sends chunks while it still computes, and may replace each until the
    trailer. Until then they are in no dedupe table, image or report, and nobody waits
    for them.

    Attributes:
        push: What it will be part of.
        session: The call.
        chunks: By index; a later one replaces an earlier one.
        is_ended: Whether the call was ended here: nothing of it counts any more.
    """

    def __init__(self, push: PushId, session: PushSession) -> None:
        self.push = push
        self.session = session
        self.chunks: dict[int, StagedChunk] = {}
        self.is_ended = False

    def put(self, chunk_index: int, chunk: StagedChunk) -> None:
        """Keeps a chunk in place of the one that was there."""
        if not self.is_ended:
            self.chunks[chunk_index] = chunk

    def fail(self, refusal: Refusal) -> None:
        """Ends the call, and frees its bytes at once."""
        self.is_ended = True
        self.chunks.clear()
        self.session.fail(refusal)
