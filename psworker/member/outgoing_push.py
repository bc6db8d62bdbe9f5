"""A push on its way to one shard: built by the user's thread, sent by the loop.

Its messages are kept until every shard has answered, so that what is sent again is
the same bytes.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from dataclasses import replace

from pswire import failpoints
from pswire.frames import (
    REQUEST_HEADER_FIELD,
    REQUEST_TRAILER_FIELD,
    bits_to_bytes,
    is_shared_chunk,
    join_fields,
)
from pswire.limits import REFERENCES_BYTES_MAX
from psworker.member.core import NextPush
from psworker.transport import messages
from psworker.transport.values import PushHeader, PushTrailer

_JOINED_BYTES_MAX = 64 << 10
"""A first chunk of at most this size shares the first message with the header. Above
it, copying costs more than a message."""

_ANNOUNCED_BYTES = 7 << 19
"""Least bytes of chunks in shared memory that are announced to the shard at a time."""


def header_message(header: PushHeader, shard_incarnation: int) -> bytes:
    """A message that holds only a push's header."""
    return join_fields(
        (REQUEST_HEADER_FIELD, messages.header_bytes(header, shard_incarnation))
    )


class OutgoingPush:
    """One shard's part of a push.

    Attributes:
        header: Identity of the push.
        chunk_indexes: Chunks that are part of it.
        trailer_message: A message that holds only its trailer.
        is_finite: Whether the whole gradient is finite.
        is_sent: Whether all of it has been sent; kept only for failpoints.
        in_message: Makes a message that holds a chunk of one that says where in shared
            memory it is; set when the shard has not that memory any more.
    """

    def __init__(
        self,
        header: PushHeader,
        trailer: PushTrailer,
        *,
        shard_incarnation: int,
        chunk_bitmap: tuple[bool, ...],
        chunk_indexes: Collection[int],
        notify: Callable[[asyncio.Event], None],
    ) -> None:
        """Begins a push without chunks.

        Args:
            header: Identity of the push.
            trailer: What completes it.
            shard_incarnation: Start of the shard it goes to.
            chunk_bitmap: Which of the shard's chunks are part of it.
            chunk_indexes: The same as indices in the placement.
            notify: Sets an event of the loop from the user's thread.
        """
        self.header = header
        self.chunk_indexes = frozenset(chunk_indexes)
        self.is_finite = trailer.is_finite
        self.is_sent = False
        self.in_message: Callable[[bytes], bytes] | None = None
        self.trailer_message = join_fields(
            (
                REQUEST_TRAILER_FIELD,
                messages.trailer_bytes(trailer, bits_to_bytes(chunk_bitmap)),
            )
        )
        self._shard_incarnation = shard_incarnation
        self._opening = header_message(header, shard_incarnation) + self.trailer_message
        self._notify = notify
        self._chunks: list[tuple[int, bytes]] = []
        self._grown = asyncio.Event()
        self._has_reader = False
        self._unannounced_bytes = 0

    def append(self, index: int, message: bytes, byte_count: int) -> None:
        """Adds a chunk of so many bytes, from the user's thread.

        The newest one again changes nothing: whoever added it was interrupted.
        """
        if self._chunks and self._chunks[-1][0] == index:
            return
        self._chunks.append((index, message))
        self._unannounced_bytes += byte_count
        # Each time the loop's thread is woken it takes the interpreter's lock from
        # the one that copies, which costs more than a small message waits.
        is_awaited = (
            len(self._chunks) == len(self.chunk_indexes)
            or self._unannounced_bytes >= _ANNOUNCED_BYTES
            or not is_shared_chunk(message)
        )
        # Set before the reader looks: it sees the chunk, or is woken for it.
        if self._has_reader and is_awaited:
            self._unannounced_bytes = 0
            self._notify(self._grown)

    def readdress(self, place: NextPush) -> None:
        """Sends the same bytes as another push."""
        self.header = replace(
            self.header,
            generation=place.generation,
            sequence=place.sequence,
            sequence_unacknowledged_min=place.sequence_unacknowledged_min,
            clock=place.clock,
        )
        header = header_message(self.header, self._shard_incarnation)
        self._opening = header + self.trailer_message
        self.is_sent = False

    @property
    def whole_message(self) -> bytes | None:
        """All of it as one message, where it is small and of one chunk at most."""
        chunks = self._chunks
        if len(self.chunk_indexes) > 1 or len(chunks) < len(self.chunk_indexes):
            return None
        message = b"".join(message for _, message in chunks)
        return message + self._opening if len(message) <= _JOINED_BYTES_MAX else None

    async def requests(self, held: frozenset[int]) -> AsyncGenerator[bytes, None]:
        """The messages, as they are built.

        Args:
            held: Chunks that the shard has already.
        """
        opening = self._opening
        # Where the shard has them all, none needs to be built: of a push that a process
        # of the same group has sent, another one asks what became of it.
        position = len(self.chunk_indexes) if self.chunk_indexes <= held else 0
        self._has_reader = True
        while position < len(self.chunk_indexes):
            while position == len(self._chunks):
                self._grown.clear()
                await self._grown.wait()
            index, message = self._chunks[position]
            position += 1
            if index in held:
                continue
            if is_shared_chunk(message) and self.in_message is not None:
                message = self.in_message(message)
            elif is_shared_chunk(message):
                message, position = self._joined(message, position, held)
            if opening and len(message) <= _JOINED_BYTES_MAX:
                message += opening  # the chunk stays at the start, where it is aligned
            elif opening:
                yield opening
            opening = b""
            yield message
        if opening:
            yield opening

    def _joined(
        self, message: bytes, position: int, held: frozenset[int]
    ) -> tuple[bytes, int]:
        """A message with all that are there by now and go with it.

        Args:
            message: Says where one chunk is.
            position: Of the next message.
            held: Chunks that the shard has already.
        """
        joined = [message]
        byte_count = len(message)
        for index, following in self._chunks[position:]:
            byte_count += len(following)
            if not is_shared_chunk(following) or byte_count > REFERENCES_BYTES_MAX:
                break
            position += 1
            if index not in held:
                joined.append(following)
        return b"".join(joined), position


async def requests_with_failpoints(
    pushes: Sequence[OutgoingPush], shard_index: int, held: frozenset[int]
) -> AsyncGenerator[bytes, None]:
    """As `requests` of one shard's part, through the failpoints of sending.

    Args:
        pushes: Each shard's part.
        shard_index: Whose messages.
        held: Chunks that the shard has already.
    """
    push = pushes[shard_index]
    async with contextlib.aclosing(push.requests(held)) as requests:
        async for request in requests:
            yield request  # comes back when it is on its way
            failpoints.hit("worker.chunk_sent")
    push.is_sent = True
    failpoints.hit("worker.push_sent")
    if all(each.is_sent for each in pushes):
        failpoints.hit("worker.in_barrier")
