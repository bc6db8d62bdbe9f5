"""One push or pull, as the user's thread drives it.

The loop's thread moves bytes; this one turns gradients into chunks while the first
ones are under way, and writes values as they come. So arithmetic and copies neither
delay the network nor need locks: only the user's thread touches the user's tensors.
(When steps overlap, one beside it does, which takes turns with it:
`psworker.steps.overlap`.)
"""

import logging
import math
import queue
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final, Self

from pswire.activity import Activity
from pswire.frames import decode_chunk
from pswire.leased_data import DataRange
from pswire.placement import Chunk, Placement
from pswire.reasons import ErrorReason, Refusal
from psworker.errors import StepTimeoutError, error_of_refusal
from psworker.event_loop import EventLoop
from psworker.member.ahead_calls import AheadCalls
from psworker.member.core import NextPush
from psworker.member.outgoing_push import OutgoingPush
from psworker.optim.push_result import PushResult
from psworker.optim.step_contents import StepContents
from psworker.tensors.push_compression import PushEncoder
from psworker.tensors.tensor_chunks import ChunkSource
from psworker.tensors.value_store import ValueStore
from psworker.transport.calls import CallError
from psworker.transport.ports import Receiver
from psworker.transport.shard_segments import NO_SEGMENTS, Segments, SharedValues
from psworker.transport.values import PushHeader, PushReply, Waiting
from psworker.transport.waiting_log import WaitingLog
from psworker.work_log import WorkLog

logger: Final = logging.getLogger("psworker")

_EAGER_BYTES: Final = 256 << 10
"""What is made before the calls begin. Two threads that work at once trade the
interpreter's lock, which costs a small push more than the overlap saves."""

_UNWRITTEN_COUNT_MAX: Final = 64
"""Values that came and are not written yet, in messages of at most a chunk each, while
the gradient is encoded: a large model would be held a second time."""

Delivery = Callable[[Receiver], Coroutine[Any, Any, Sequence[PushReply]]]


def receive(loop: EventLoop, deliver: Delivery, store: ValueStore) -> list[PushReply]:
    """Runs a delivery and writes the values it brings.

    Args:
        loop: Where it runs.
        deliver: Makes the calls, with a receiver of what they bring.
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
        self._inbox: queue.SimpleQueue[memoryview | SharedValues | Waiting | None] = (
            queue.SimpleQueue()
        )
        self._log = WaitingLog()
        receiver = Receiver(self._inbox.put, self._inbox.put)
        # The end comes after everything else that the loop has put in.
        self._delivery = loop.submit(
            lambda: deliver(receiver), lambda: self._inbox.put(None)
        )

    def write_next(self, store: ValueStore) -> bool:
        """Writes what comes next, waiting for it; `False` once the delivery is done."""
        item = self._inbox.get()
        if item is None:
            self._inbox.put(None)  # for whoever asks again
            return False
        if isinstance(item, Waiting):
            self._log.note(item)
            return True
        try:
            if isinstance(item, SharedValues):
                item.write(store)
            else:
                store.write(decode_chunk(item))
        except CallError as error:
            if not error.is_retryable:
                raise error.to_ps_error() from None
            raise StepTimeoutError(
                f"values that change too often to be read could not be fetched: "
                f"{error}; step() again goes on with the same push",
                reason=ErrorReason.WAIT_TIMEOUT,
            ) from None
        except Refusal as refusal:
            raise error_of_refusal(refusal) from None
        return True

    def write_surplus(self, store: ValueStore) -> None:
        """Writes what there is of values beyond `_UNWRITTEN_COUNT_MAX` messages."""
        while self._inbox.qsize() > _UNWRITTEN_COUNT_MAX:
            self.write_next(store)

    def finish(self, store: ValueStore) -> list[PushReply]:
        """Writes values until the delivery is done; the answers of all shards."""
        while self.write_next(store):
            pass
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
        contents: What it carries; without its tensors once they are encoded.
        ranges: Data behind the gradient, until it is accounted for.
        replies: The answers, once they are there.
        ahead: Calls that have sent chunks of it before it was begun, if any have.
        encoder: Encodes its chunks in fewer bytes, if the job sends them so.
        segments: Memory shared with shards.
        has_timed_out: Whether an error has said that it goes on with the next step.
        is_left: Whether its step has returned, and left it under way on purpose.
        asks_first: Whether another process may have sent some of it: shards are asked
            what they have.
    """

    pushes: Sequence[OutgoingPush]
    source: ChunkSource
    chunks: Sequence[Chunk]
    contents: StepContents
    ranges: tuple[DataRange, ...]
    replies: Sequence[PushReply] | None = None
    ahead: AheadCalls | None = None
    encoder: PushEncoder | None = None
    segments: Segments = NO_SEGMENTS
    asks_first: bool = False
    has_timed_out: bool = False
    is_left: bool = False
    _encoded_count: int = 0
    _incoming: Incoming | None = None

    @classmethod
    def begin(
        cls,
        header: PushHeader,
        contents: StepContents,
        *,
        placement: Placement,
        incarnations: Sequence[int],
        loop: EventLoop,
        segments: Segments = NO_SEGMENTS,
        encoder: PushEncoder | None = None,
        is_forward_order: bool = False,
    ) -> Self:
        """A push of which nothing is sent yet.

        Args:
            header: Its identity.
            contents: What it carries.
            placement: How tensors are cut.
            incarnations: Start of each shard that it is for.
            loop: Where it will run.
            segments: Memory shared with shards.
            encoder: Makes fewer bytes of its chunks, if the job sends them so.
            is_forward_order: Whether the first layers go first, and not the last.
        """
        source = ChunkSource(contents.tensors)
        source.encoder = encoder
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
                    contents.trailer,
                    shard_incarnation=incarnation,
                    chunk_bitmap=bitmap,
                    chunk_indexes=[chunk.index for chunk in sent],
                    notify=loop.notify,
                )
            )
        # As a backward pass makes them, the last layers' first, or as the next forward
        # pass wants the values.
        chunks.sort(key=lambda chunk: chunk.index, reverse=not is_forward_order)
        return cls(
            pushes,
            source,
            chunks,
            contents,
            contents.ranges,
            encoder=encoder,
            segments=segments,
        )

    @property
    def optimizer(self) -> str:
        """Name of the optimizer that it is for."""
        return self.contents.optimizer

    @property
    def sequence(self) -> int:
        """Number of the push."""
        return self.pushes[0].header.sequence

    def run(
        self, loop: EventLoop, deliver: Delivery, store: ValueStore, work: WorkLog
    ) -> Sequence[PushReply]:
        """Sends what is not acknowledged, writes values, and returns the answers."""
        if self._incoming is None:
            self.start(loop, deliver, store)
        assert self._incoming is not None, "it is started"
        work.enter(Activity.WAITING)
        with self._ended_by_errors(self._incoming):
            self.replies = self._incoming.finish(store)
        self._incoming = None
        return self.replies

    def start(
        self, loop: EventLoop, deliver: Delivery, store: ValueStore | None = None
    ) -> None:
        """Sends what is not acknowledged, and waits for nothing.

        Gradients have been read when it returns, and may be changed.

        Args:
            loop: Where it runs.
            deliver: Makes the calls.
            store: Where values may go at once: of a large model some come before all
                gradients are sent. None: they are kept until they are asked for.
        """
        try:
            self._encode(_EAGER_BYTES)
            self._incoming = incoming = Incoming(loop, deliver)
            while self._encoded_count < len(self.chunks):
                self._encode(_EAGER_BYTES)
                if store is not None:
                    incoming.write_surplus(store)
        except BaseException:
            self.cancel()
            # The script may go on with other gradients in the same memory.
            self._encode()
            raise
        self.source = ChunkSource(())  # frees the gradients
        self.contents = replace(self.contents, tensors=())

    def readdress(self, place: NextPush) -> None:
        """The same push for another clock, since its own closed without it."""
        assert self._encoded_count == len(self.chunks), "it was sent"
        self.replies = None
        for push in self.pushes:
            push.readdress(place)

    def write_next(self, store: ValueStore) -> bool:
        """Writes what comes next; `False` when only `run` can go on."""
        if self._incoming is None:
            return False
        with self._ended_by_errors(self._incoming):
            return self._incoming.write_next(store)

    def cancel(self) -> None:
        """Ends the calls; what became of the push is unknown then."""
        if self._incoming is not None:
            self._incoming.cancel()
            self._incoming = None

    def end(self, result: PushResult) -> PushResult:
        """What is reported of it to its worker, once it is settled.

        State that it carried was loaded, unless the shards dropped the push: also by
        one of weight 0, and also where the gradient was thrown away here.
        """
        has_come = not (result.dropped or result.missed)
        if self.contents.on_loaded is not None and has_come:
            self.contents.on_loaded()
        if self.encoder is not None:
            self.encoder.settle(is_counted=has_come and not result.skipped)
        is_discarded = self.contents.is_discarded
        return replace(result, outcome="dropped") if is_discarded else result

    def take_ahead(self) -> AheadCalls | None:
        """The calls that sent ahead, for the first attempt to deliver."""
        ahead, self.ahead = self.ahead, None
        return ahead

    @contextmanager
    def _ended_by_errors(self, incoming: Incoming) -> Iterator[None]:
        try:
            yield
        except BaseException:
            incoming.cancel()
            self._incoming = None
            raise

    def _encode(self, byte_count: float = math.inf) -> None:
        """Makes the next chunks, up to about `byte_count`, and hands them over."""
        while self._encoded_count < len(self.chunks) and byte_count > 0:
            chunk = self.chunks[self._encoded_count]
            message = self.segments.encode(self.source, chunk)
            self.pushes[chunk.shard_index].append(
                chunk.index, message, chunk.byte_count
            )
            self._encoded_count += 1
            byte_count -= chunk.byte_count
