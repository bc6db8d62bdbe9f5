"""Memory that a shard shares with workers on its machine: handed over, and read.

In the event loop. Segments are handed over at a socket, by its callbacks: a connection
takes three packets and is closed. One of another user is closed as it is accepted,
before anything is kept for it. Nobody gets further than the first packet who does not
know a token, which the shard sends to members only.
"""

import asyncio
import errno
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

from psserver.logs import RefusalLog
from psserver.shard.host.hosted_members import GradientSegments, HostedMembers
from psserver.shard.tensors.shard_vectors import ValuesSegment
from pswire.frames import ENCODING_RAW, ChunkFrame
from pswire.membership import WorkerKey
from pswire.placement import Placement
from pswire.reasons import ErrorReason, Refusal
from pswire.shared_memory.handshake import (
    ACKNOWLEDGEMENT,
    HANDSHAKE_TIMEOUT_S,
    Answer,
    Offer,
    address_of,
    check_peer,
    send_refusal,
)
from pswire.shared_memory.segments import GradientLayout, MemorySegment, SegmentError

log = logging.getLogger("psserver.shard")

_NO_DESCRIPTOR_LEFT = frozenset({errno.EMFILE, errno.ENFILE})

_WAITING_COUNT_MAX = 64

_HANDOVER_COUNT_MAX = 64
"""Connections at a time, each for a millisecond. Others wait to be accepted."""

_PAUSE_S = 1.0
"""Time until connections are accepted again after the system had no descriptor left.
They wait meanwhile; to ask at once would keep the event loop busy."""


@dataclass(slots=True)
class _Expected:
    """A worker that was sent a token."""

    worker: WorkerKey
    until_s: float


class SharedSegments:
    """Who may hand segments over, and the chunks that are in them.

    A gradient segment is kept until its worker's incarnation has ended, or has pushed
    from a newer one; what is staged of it keeps the memory for longer by itself.

    Args:
        members: Has the segments of each worker.
        is_wanted: As the attribute.

    Attributes:
        is_wanted: Whether this shard shares memory at all.
        socket_name: Where segments are handed over, empty while nobody listens.
    """

    def __init__(self, members: HostedMembers, *, is_wanted: bool = False) -> None:
        self._members = members
        self.is_wanted = is_wanted
        self.socket_name = ""
        self._layout: GradientLayout | None = None
        self._expected: dict[bytes, _Expected] = {}

    def expect(
        self, token: bytes, worker: WorkerKey, placement: Placement, shard_index: int
    ) -> None:
        """A worker is about to hand its segment over, under a token."""
        now_s = time.monotonic()
        self._layout = self._layout or GradientLayout.of(placement, shard_index)
        self._expected = {
            known: each
            for known, each in self._expected.items()
            if each.until_s > now_s and each.worker != worker
        }
        self._expected[token] = _Expected(worker, now_s + HANDSHAKE_TIMEOUT_S)

    def claim(self, token: bytes) -> tuple[WorkerKey, GradientLayout] | None:
        """Whom a token was sent to, and the layout of its gradient. Good for once."""
        found = self._expected.pop(token, None)
        if found is None or found.until_s < time.monotonic() or self._layout is None:
            return None
        return found.worker, self._layout

    def put(self, worker: WorkerKey, segment: MemorySegment) -> None:
        """Takes a worker's gradient segment.

        One that it had before stays in use until a chunk is in the new one. The same
        incarnation hands over a second one when another process of its host's group
        comes to lead; whoever else does so leaves the worker its own.
        """
        member = self._members.of(worker)
        if member.segments is None:
            member.segments = GradientSegments(segment)
        else:
            member.segments.offered = segment

    def note_reader(self, worker: WorkerKey) -> None:
        """A worker can read values in shared memory from now on."""
        segments = self._members.of(worker).segments
        if segments is not None:
            segments.reads_values = True
            log.info("worker %s shares memory with this shard", worker)

    def resolve(self, worker: WorkerKey, frame: ChunkFrame) -> ChunkFrame:
        """A chunk with its elements, which a message has said to be in shared memory.

        Raises:
            Refusal: `SEGMENT_GONE` or `CHUNK_INVALID`; no state changed.
        """
        shared = frame.shared
        if shared is None:
            return frame
        known = self._members.of(worker).segments
        segment = known.numbered(shared.segment) if known is not None else None
        if known is None or segment is None:
            raise Refusal(
                ErrorReason.SEGMENT_GONE,
                f"chunk {frame.index} is said to be in the segment "
                f"{shared.segment:016x} of shared memory, which {worker} has not "
                "handed over, or has lost with its membership",
            )
        assert self._layout is not None, "whoever has a segment was expected"
        data = segment.data[self._layout.run(frame.index, shared.length)]
        known.use(segment)
        return replace(frame, encoding=ENCODING_RAW, data=data, shared=None)


class SegmentListener:
    """Listens until it is closed. In the event loop."""

    def __init__(
        self,
        segments: SharedSegments,
        values: Callable[[], ValuesSegment | None],
    ) -> None:
        """Listens from now on.

        Args:
            segments: Takes what comes, and has the socket's name.
            values: Memory of the shard's values.

        Raises:
            OSError: The system has no such sockets.
        """
        self._segments = segments
        self._values = values
        self._loop = asyncio.get_running_loop()
        self._refusals = RefusalLog(log)
        self._resuming: asyncio.TimerHandle | None = None
        self._connections: set[_Handover] = set()
        name = f"paramserver-{secrets.token_hex(16)}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._socket.setblocking(False)
            self._socket.bind(address_of(name))
            self._socket.listen(_WAITING_COUNT_MAX)
        except OSError:
            self._socket.close()
            raise
        self._resume()
        segments.socket_name = name

    def close(self) -> None:
        """Ends all connections."""
        self._segments.socket_name = ""
        self._pause()
        self._socket.close()
        for connection in list(self._connections):
            connection.close()

    def _resume(self) -> None:
        if self._socket.fileno() >= 0:
            self._pause()
            self._loop.add_reader(self._socket, self._accept)

    def _pause(self) -> None:
        self._loop.remove_reader(self._socket)
        if self._resuming is not None:
            self._resuming.cancel()
            self._resuming = None

    def _accept(self) -> None:
        try:
            peer, _ = self._socket.accept()
        except OSError as error:
            if error.errno in _NO_DESCRIPTOR_LEFT:
                self._refusals.warning("no worker can hand segments over: %s", error)
                self._pause()
                self._resuming = self._loop.call_later(_PAUSE_S, self._resume)
            return  # closed before it was taken
        try:
            check_peer(peer)
        except SegmentError as error:
            with peer, suppress(OSError):  # it may be closed
                peer.setblocking(False)
                send_refusal(peer, str(error))
            self._refusals.warning("segments of shared memory are refused: %s", error)
            return
        handover = _Handover(
            peer, self._loop, self._take, self._segments.note_reader, self._refusals
        )
        self._connections.add(handover)
        handover.on_close = self._closed
        if len(self._connections) >= _HANDOVER_COUNT_MAX:
            self._pause()

    def _closed(self, handover: "_Handover") -> None:
        self._connections.discard(handover)
        if self._resuming is None:
            self._resume()

    def _take(self, offer: Offer) -> tuple[WorkerKey, Answer]:
        """Maps what a worker offers; which one it is, and what it is sent.

        Raises:
            SegmentError: Why not.
        """
        claimed = self._segments.claim(offer.token)
        values = self._values()
        if claimed is None or values is None:
            os.close(offer.descriptor)
            raise SegmentError("this token was not told, or too long ago")
        worker, layout = claimed
        if offer.header.byte_count != layout.byte_count:
            os.close(offer.descriptor)
            raise SegmentError(
                f"a gradient segment of this shard has {layout.byte_count} bytes, "
                f"{offer.header.byte_count} were offered"
            )
        self._segments.put(worker, MemorySegment.adopt(offer.header, offer.descriptor))
        return worker, Answer(values.segment.header, values.segment.descriptor)


class _Handover:
    """One connection."""

    def __init__(
        self,
        peer: socket.socket,
        loop: asyncio.AbstractEventLoop,
        take: Callable[[Offer], tuple[WorkerKey, Answer]],
        acknowledged: Callable[[WorkerKey], None],
        refusals: RefusalLog,
    ) -> None:
        self._peer = peer
        self._loop = loop
        self._take = take
        self._acknowledged = acknowledged
        self._refusals = refusals
        self._worker: WorkerKey | None = None
        self.on_close: Callable[[_Handover], None] = lambda _: None
        peer.setblocking(False)
        loop.add_reader(peer, self._read)
        self._timeout = loop.call_later(2 * HANDSHAKE_TIMEOUT_S, self.close)

    def close(self) -> None:
        """Ends it; may be called again."""
        if self._peer.fileno() >= 0:
            self._loop.remove_reader(self._peer)
            self._peer.close()
            self._timeout.cancel()
            self.on_close(self)

    def _read(self) -> None:
        try:
            if self._worker is None:
                self._answer()
                return
            if self._peer.recv(len(ACKNOWLEDGEMENT)) == ACKNOWLEDGEMENT:
                self._acknowledged(self._worker)
        except OSError as error:
            self._refusals.warning(
                "a worker's segments were not handed over: %s", error
            )
        self.close()

    def _answer(self) -> None:
        try:
            offer = Offer.receive(self._peer)
            self._worker, answer = self._take(offer)
            answer.send(self._peer)
        except SegmentError as error:
            self._refusals.warning("segments of shared memory are refused: %s", error)
            send_refusal(self._peer, str(error))
            self.close()


@contextmanager
def listening(
    segments: SharedSegments, values: Callable[[], ValuesSegment | None]
) -> Iterator[None]:
    """Lets workers on this machine hand segments to a shard meanwhile, if it wants.

    Args:
        segments: Takes them.
        values: Memory of the shard's values.
    """
    listener = None
    if segments.is_wanted:
        try:
            listener = SegmentListener(segments, values)
        except OSError as error:
            log.warning("tensors go over gRPC: no Unix socket can be made: %s", error)
    try:
        yield
    finally:
        if listener is not None:
            listener.close()
