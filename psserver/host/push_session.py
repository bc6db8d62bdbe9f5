"""One call that waits for the answer to a push."""

import asyncio
from collections import deque
from dataclasses import dataclass

from psserver.core.push import Reply
from pswire.reasons import Refusal

QUEUED_BYTES_MAX = 8 << 20
"""Encoded chunks kept for a call that does not read. Beyond it only the chunk's index
is kept and the values are encoded again when they are wanted, which is right since
they can't change before this worker has answered with its next push."""


@dataclass(slots=True)
class Outgoing:
    """A chunk to send.

    Attributes:
        chunk_index: Which chunk.
        presence: Slices to send; None for all.
        message: The encoded message, None when it must be made.
    """

    chunk_index: int
    presence: tuple[bool, ...] | None
    message: bytes | None


class PushSession:
    """Chunks and the reply on their way to one call.

    Args:
        wants_values: Whether the call asked for values.
    """

    def __init__(self, *, wants_values: bool) -> None:
        self.wants_values = wants_values
        self._chunks: deque[Outgoing] = deque()
        self._queued_bytes = 0
        self._reply: Reply | None = None
        self._failure: Refusal | None = None
        self._wake = asyncio.Event()

    def put(self, chunk: Outgoing) -> None:
        """Queues a chunk."""
        if not self.wants_values:
            return
        size = len(chunk.message or b"")
        if self._queued_bytes + size > QUEUED_BYTES_MAX:
            chunk = Outgoing(chunk.chunk_index, chunk.presence, None)
            size = 0
        self._queued_bytes += size
        self._chunks.append(chunk)
        self._wake.set()

    def finish(self, reply: Reply) -> None:
        """The push is done; the reply goes out after the chunks."""
        self._reply = reply
        self._wake.set()

    def fail(self, refusal: Refusal) -> None:
        """The call ends with an error, before anything that is still queued."""
        self._failure = refusal
        self._wake.set()

    async def next(self, timeout_s: float) -> Outgoing | Reply | None:
        """What to send next; None when nothing came in time.

        Raises:
            Refusal: The call is over.
        """
        if not (self._chunks or self._reply or self._failure):
            self._wake.clear()
            try:
                async with asyncio.timeout(timeout_s):
                    await self._wake.wait()
            except TimeoutError:
                return None
        if self._failure is not None:
            raise self._failure
        if self._chunks:
            chunk = self._chunks.popleft()
            self._queued_bytes -= len(chunk.message or b"")
            return chunk
        return self._reply
