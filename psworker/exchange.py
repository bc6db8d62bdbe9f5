"""One push or pull, as the user's thread drives it.

The loop's thread moves bytes; this one turns gradients into chunks while the first
ones are under way, and writes values as they come. So arithmetic and copies neither
delay the network nor need locks: only the user's thread touches the user's tensors.
"""

import logging
import math
import queue
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

from pswire.frames import REQUEST_CHUNK_FIELD, decode_chunk
from pswire.placement import Chunk, Placement
from pswire.reasons import Refusal
from psworker.errors import error_of_refusal
from psworker.event_loop import EventLoop
from psworker.outgoing_push import OutgoingPush
from psworker.pending import DataRange
from psworker.tensor_chunks import ChunkSource, ValueStore
from psworker.transport.shard_client import Receiver
from psworker.transport.values import PushHeader, PushReply, PushTrailer, Waiting
from psworker.waiting_log import WaitingLog

logger: Final = logging.getLogger("psworker")

_EAGER_BYTES: Final = 256 << 10
"""What is made before the calls begin. Two threads that work at once trade the
interpreter's lock, which costs a small push more than the overlap saves."""

Delivery = Callable[[Receiver], Coroutine[Any, Any, Sequence[PushReply]]]


def receive(loop: EventLoop, deliver: Delivery, store: ValueStore) -> list[PushReply]:
    """Runs a delivery and writes the values it brings.

    Args:
        loop: Where it runs.
        deliver: Makes the calls, given who takes what they bring.
        store: Where values go.
    """
    incoming = Incoming(loop, deliver)
    try:
        return incoming.finish(store)
    except BaseException:
        incoming.cancel()
        raise


class Incoming:
    """A delivery that runs, and what it has brought so far."""

    def __init__(self, loop: EventLoop, deliver: Delivery) -> None:
        self._inbox: queue.SimpleQueue[memoryview | Waiting | None] = (
            queue.SimpleQueue()
        )
        receiver = Receiver(self._inbox.put, self._inbox.put)
        self._delivery = loop.submit(deliver(receiver))
        # After everything else that the loop has put in.
        self._delivery.add_done_callback(lambda _: self._inbox.put(None))

    def finish(self, store: ValueStore) -> list[PushReply]:
        """Writes values until the delivery is done; the answers of all shards."""
        log = WaitingLog()
        while (item := self._inbox.get()) is not None:
            if isinstance(item, Waiting):
                log.note(item)
                continue
            try:
                store.write(decode_chunk(item))
            except Refusal as refusal:
                raise error_of_refusal(refusal) from None
        store.flush()
        return list(self._delivery.result())

    def cancel(self) -> None:
        """Ends the calls."""
        self._delivery.cancel()


@dataclass(slots=True)
class PushExchange:
    """A push on its way to all shards, until each has answered.

    When it ends early its outcome is unknown: `run` again goes on with the same bytes.

    Attributes:
        pushes: Each shard's part.
        source: Where chunks come from.
        chunks: All chunks of the push, in the order to send them.
        ranges: Data behind the gradient.
        is_discarded: Whether the gradient was thrown away here, and the push carries
            nothing of it.
        replies: The answers, once they are there.
    """

    pushes: Sequence[OutgoingPush]
    source: ChunkSource
    chunks: Sequence[Chunk]
    ranges: tuple[DataRange, ...]
    is_discarded: bool = False
    replies: Sequence[PushReply] | None = None
    _encoded_count: int = 0

    @classmethod
    def begin(
        cls,
        header: PushHeader,
        trailer: PushTrailer,
        source: ChunkSource,
        *,
        placement: Placement,
        incarnations: Sequence[int],
        loop: EventLoop,
    ) -> Self:
        """A push of which nothing is sent yet.

        Args:
            header: Its identity.
            trailer: What completes it.
            source: Where its chunks come from.
            placement: How tensors are cut.
            incarnations: Start of each shard that it is for.
            loop: Where it will run.
        """
        pushes = []
        chunks = []
        for own, incarnation in zip(
            placement.chunks_by_shard, incarnations, strict=True
        ):
            bitmap = tuple(any(source.presence(chunk)) for chunk in own)
            sent = [chunk for chunk, bit in zip(own, bitmap, strict=True) if bit]
            chunks += sent
            pushes.append(
                OutgoingPush(
                    header,
                    trailer,
                    shard_incarnation=incarnation,
                    chunk_bitmap=bitmap,
                    chunk_indexes=[chunk.index for chunk in sent],
                    notify=loop.notify,
                )
            )
        # As a backward pass makes them: the last layers' first.
        chunks.sort(key=lambda chunk: -chunk.index)
        return cls(pushes, source, chunks, trailer.ranges)

    @property
    def sequence(self) -> int:
        """Number of the push."""
        return self.pushes[0].header.sequence

    def run(
        self, loop: EventLoop, deliver: Delivery, store: ValueStore
    ) -> Sequence[PushReply]:
        """Sends what is not acknowledged, writes values, and returns the answers."""
        self._encode(_EAGER_BYTES)
        incoming = Incoming(loop, deliver)
        try:
            self._encode()
            self.replies = incoming.finish(store)
            return self.replies
        except BaseException:
            incoming.cancel()
            raise

    def _encode(self, byte_count: float = math.inf) -> None:
        """Makes the next chunks, up to about `byte_count`, and hands them over."""
        while self._encoded_count < len(self.chunks) and byte_count > 0:
            chunk = self.chunks[self._encoded_count]
            message = self.source.encode(chunk, REQUEST_CHUNK_FIELD)
            self.pushes[chunk.shard_index].append(chunk.index, message)
            self._encoded_count += 1
            byte_count -= len(message)
