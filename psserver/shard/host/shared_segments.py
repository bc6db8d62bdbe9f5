"""Memory that a shard shares with workers on its machine.

In the event loop. A gradient segment is kept until its worker's incarnation has ended,
or has pushed from a newer one; what is staged of it keeps the memory for longer by
itself.
"""

import logging
import time
from collections.abc import Collection
from dataclasses import dataclass, replace

from pswire.frames import ENCODING_RAW, ChunkFrame
from pswire.membership import WorkerKey
from pswire.memory_segments import MemorySegment
from pswire.placement import Placement
from pswire.reasons import ErrorReason, Refusal
from pswire.segment_handshake import HANDSHAKE_TIMEOUT_S
from pswire.shared_layout import GradientLayout

log = logging.getLogger("psserver.shard")


@dataclass(slots=True)
class _Expected:
    """A worker that was told a token."""

    worker: WorkerKey
    until_s: float


@dataclass(slots=True)
class _Gradients:
    """A worker's segments.

    Attributes:
        used: Where its chunks are.
        offered: Handed over later, and nothing was pushed from it yet.
    """

    used: MemorySegment
    offered: MemorySegment | None = None

    def numbered(self, number: int) -> MemorySegment | None:
        """The one with a number."""
        for segment in (self.used, self.offered):
            if segment is not None and segment.header.number == number:
                return segment
        return None

    def use(self, segment: MemorySegment) -> None:
        """A chunk is in it. The one before is not needed any more."""
        if segment is self.offered:
            self.used, self.offered = segment, None


class SharedSegments:
    """Gradient segments of a shard's workers, and which of them read values.

    Attributes:
        is_wanted: Whether this shard shares memory at all.
        socket_name: Where segments are handed over, empty while nobody listens.
    """

    def __init__(self, *, is_wanted: bool = False) -> None:
        self.is_wanted = is_wanted
        self.socket_name = ""
        self._layout: GradientLayout | None = None
        self._expected: dict[bytes, _Expected] = {}
        self._gradients: dict[WorkerKey, _Gradients] = {}
        self._readers: set[WorkerKey] = set()

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
        """Whom a token was told to, and the layout of its gradient. Good for once."""
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
        known = self._gradients.get(worker)
        if known is None:
            self._gradients[worker] = _Gradients(segment)
        else:
            known.offered = segment

    def note_reader(self, worker: WorkerKey) -> None:
        """A worker can read values in shared memory from now on."""
        if worker in self._gradients:
            self._readers.add(worker)
            log.info("worker %s shares memory with this shard", worker)

    def reads_values(self, worker: WorkerKey) -> bool:
        """Whether a worker is told where values are, in place of the values."""
        return worker in self._readers

    @property
    def workers(self) -> Collection[WorkerKey]:
        """Workers whose tensors go through shared memory."""
        return self._readers

    def resolve(self, worker: WorkerKey, frame: ChunkFrame) -> ChunkFrame:
        """A chunk with its elements, which a message has said to be in shared memory.

        Raises:
            Refusal: `SEGMENT_GONE` or `CHUNK_INVALID`; no state changed.
        """
        shared = frame.shared
        if shared is None:
            return frame
        known = self._gradients.get(worker)
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

    def keep_only(self, members: Collection[WorkerKey]) -> None:
        """Forgets the segments of workers that are no members any more."""
        for worker in self._gradients.keys() - set(members):
            del self._gradients[worker]
            self._readers.discard(worker)
