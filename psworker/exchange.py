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
from typing import Any, Final

from pswire.frames import REQUEST_CHUNK_FIELD, decode_chunk
from pswire.placement import Chunk
from pswire.reasons import Refusal
from psworker.errors import error_of_refusal
from psworker.event_loop import EventLoop
from psworker.outgoing_push import OutgoingPush
from psworker.pending import DataRange
from psworker.tensor_chunks import ChunkSource, ValueStore
from psworker.transport.shard_client import Receiver
from psworker.transport.values import PushReply, Waiting
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
                raise error_of_refusal(refusal) from refusal
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
        optimizer: Name of the optimizer.
        pushes: Each shard's part.
        source: Where chunks come from.
        chunks: All chunks of the push, in the order to send them.
        ranges: Data behind it.
    """

    optimizer: str
    pushes: Sequence[OutgoingPush]
    source: ChunkSource
    chunks: Sequence[Chunk]
    ranges: tuple[DataRange, ...]
    _encoded_count: int = 0

    def run(
        self, loop: EventLoop, deliver: Delivery, store: ValueStore
    ) -> list[PushReply]:
        """Sends what is not acknowledged, writes values, and returns the answers."""
        self._encode(_EAGER_BYTES)
        incoming = Incoming(loop, deliver)
        try:
            self._encode()
            return incoming.finish(store)
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
