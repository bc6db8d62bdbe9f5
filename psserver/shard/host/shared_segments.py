"""Memory that a shard shares with workers on its machine.

In the event loop. A gradient segment is kept until its worker's incarnation has ended,
or has pushed from a newer one; what is staged of it keeps the memory for longer by
itself.
"""

import logging
import time
from dataclasses import dataclass, replace

from psserver.shard.host.hosted_members import GradientSegments, HostedMembers
from pswire.frames import ENCODING_RAW, ChunkFrame
from pswire.membership import WorkerKey
from pswire.placement import Placement
from pswire.reasons import ErrorReason, Refusal
from pswire.shared_memory.handshake import HANDSHAKE_TIMEOUT_S
from pswire.shared_memory.segments import GradientLayout, MemorySegment

log = logging.getLogger("psserver.shard")


@dataclass(slots=True)
class _Expected:
    """A worker that was sent a token."""

    worker: WorkerKey
    until_s: float


class SharedSegments:
    """Hands gradient segments of a shard's workers to what is kept for each.

    Args:
        members: Takes the segments.
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
