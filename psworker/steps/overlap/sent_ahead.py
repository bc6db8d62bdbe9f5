"""The chunks of one push that went before its step, and what the step makes of them.

Until the step the shards hold them as replaceable. The script may have changed
gradients since, in ways that nothing announces: so the bytes that were sent are
compared with those of the gradient as it is, by their digest, and what differs goes
again before the trailer.

In the thread that computes, with a `Copier` beside it for gradients in host memory.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

import torch
import xxhash

from pswire.frames import (
    REQUEST_CHUNK_FIELD,
    ChunkFrame,
    bits_to_bytes,
    decode_chunk,
    split_fields,
)
from pswire.placement import Chunk, Placement
from pswire.torch_types import buffer_of
from psworker.event_loop import EventLoop
from psworker.member.ahead_calls import AheadCalls
from psworker.member.outgoing_push import OutgoingPush, header_message
from psworker.steps.overlap.copier import Copier, StagedCopy
from psworker.tensors.push_compression import PushEncoder
from psworker.tensors.tensor_chunks import ChunkSource, dense_message
from psworker.transport.shard_segments import NO_SEGMENTS, Segments
from psworker.transport.values import PushHeader, PushTrailer

if TYPE_CHECKING:
    from psworker.event_loop import LoopFuture

_WASTED_COUNT_MAX: Final = 10
"""Steps in a row, each of which sends most of its bytes again, before sending ahead is
given up: a script that clips or unscales every gradient will do so for ever."""


@dataclass(frozen=True, slots=True)
class _SentChunk:
    """A message, what it says, and the digest of the elements before any encoding."""

    message: bytes
    frame: ChunkFrame
    digest: int


@dataclass(frozen=True, slots=True)
class _StagedChunk:
    chunk: Chunk
    presence: tuple[bool, ...]
    copy: StagedCopy


@dataclass(frozen=True, slots=True)
class CompletedPush:
    """A push of which all chunks are made and on their way.

    Attributes:
        pushes: Each shard's part.
        is_wasted: Whether most of what went ahead went in vain.
    """

    pushes: list[OutgoingPush]
    is_wasted: bool


class SentAhead:
    """One push on its way before its step.

    Attributes:
        header: Its identity, as of when it was begun.
        incarnations: Start of each shard that it is for.
        calls: The calls that carry it.
        encoder: Makes fewer bytes of its chunks, if the job sends them so.
    """

    def __init__(
        self,
        header: PushHeader,
        incarnations: Sequence[int],
        placement: Placement,
        loop: EventLoop,
        copier: Copier,
        encoder: PushEncoder | None = None,
        segments: Segments = NO_SEGMENTS,
    ) -> None:
        """Sends nothing yet.

        Args:
            header: Identity of the push.
            incarnations: Start of each shard.
            placement: How tensors are cut.
            loop: Where the calls run.
            copier: Copies gradients.
            encoder: Makes fewer bytes of them.
            segments: Memory shared with shards, which each chunk is written into once.
        """
        self.header = header
        self.encoder = encoder
        self.incarnations = list(incarnations)
        self.calls = AheadCalls(
            [header_message(header, incarnation) for incarnation in incarnations], loop
        )
        self._placement = placement
        self._loop = loop
        self._copier = copier
        self._segments = segments
        self._copying: list[LoopFuture[None]] = []
        self._is_dropped = False
        self._staged: deque[_StagedChunk] = deque()
        self._sent: dict[int, _SentChunk] = {}

    def send(
        self, chunks: Sequence[Chunk], tensors: Sequence[torch.Tensor | None]
    ) -> None:
        """Sends chunks as they are soon after; from CUDA devices once they are there.

        Those with a sparse gradient go with the step: it is not coalesced yet.

        Args:
            chunks: The chunks.
            tensors: The gradient of each entry, `None` where there is none.
        """
        self.send_staged()
        source = ChunkSource(tensors)
        source.encoder = self.encoder
        in_host_memory: dict[int, torch.Tensor] = {}
        for chunk in chunks:
            held = {
                piece.entry_index: gradient
                for piece in chunk.slices
                if (gradient := tensors[piece.entry_index]) is not None
            }
            if any(gradient.is_sparse for gradient in held.values()):
                continue
            if all(gradient.device.type == "cpu" for gradient in held.values()):
                in_host_memory.update(held)
                work = partial(self._send_copy, chunk, in_host_memory)
                self._copying.append(self._copier.submit(work))
                continue
            data = source.gather(chunk)
            if data.device.type == "cuda":
                presence = source.presence(chunk)
                copy = self._copier.staging.begin(data)
                self._staged.append(_StagedChunk(chunk, presence, copy))
            else:
                message = source.encode(chunk, REQUEST_CHUNK_FIELD)
                self._send(chunk, message, source.digest(chunk))

    def send_staged(self, *, waits: bool = False) -> None:
        """Sends chunks of CUDA devices that have come to the host, in order.

        Args:
            waits: Whether to wait for those that have not.
        """
        while self._staged and (waits or self._staged[0].copy.is_there):
            staged = self._staged.popleft()
            data = buffer_of(staged.copy.wait())
            message = dense_message(
                REQUEST_CHUNK_FIELD, staged.chunk, staged.presence, data, self.encoder
            )
            digest = None if self.encoder is None else xxhash.xxh3_64_intdigest(data)
            self._send(staged.chunk, message, digest)

    def drop(self) -> None:
        """Ends the calls: nothing of it counts.

        Nothing is copied any more when it returns: the next push writes into the same
        shared memory.
        """
        self._is_dropped = True
        self.calls.drop()
        for copying in self._copying:
            copying.wait()

    def _send_copy(self, chunk: Chunk, gradients: dict[int, torch.Tensor]) -> None:
        if self._is_dropped:
            return
        # The shard may read what was announced first: what differs goes in a message.
        is_first = chunk.index not in self._sent
        segments = self._segments.of(chunk.shard_index) if is_first else None
        message = self._copier.copies.encode(chunk, gradients, self.encoder, segments)
        self._send(chunk, message, self._copier.copies.digest)

    def _send(self, chunk: Chunk, message: bytes, digest: int | None = None) -> None:
        """Sends a chunk, whose elements have this digest, or else its data."""
        ((_, view),) = split_fields(message)
        frame = decode_chunk(view)
        digest = frame.digest if digest is None else digest
        self._sent[chunk.index] = _SentChunk(message, frame, digest)
        self.calls.append(chunk.shard_index, message)

    def complete(self, trailer: PushTrailer, source: ChunkSource) -> CompletedPush:
        """Sends what differs from what was sent, and what was not sent.

        The trailer goes when the push is delivered.
        """
        for copying in self._copying:
            copying.result()
        self.send_staged(waits=True)
        unchanged = self._unchanged(source)
        sent_bytes = sum(len(sent.message) for sent in self._sent.values())
        kept_bytes = 0
        pushes = []
        for shard_index, own in enumerate(self._placement.chunks_by_shard):
            bitmap = tuple(any(source.presence(chunk)) for chunk in own)
            present = [chunk for chunk, bit in zip(own, bitmap, strict=True) if bit]
            push = OutgoingPush(
                self.header,
                trailer,
                shard_incarnation=self.incarnations[shard_index],
                chunk_bitmap=bitmap,
                chunk_indexes=[chunk.index for chunk in present],
                notify=self._loop.notify,
            )
            for chunk in present:  # in ascending order, as the next forward pass reads
                if chunk.index in unchanged:
                    kept_bytes += len(self._sent[chunk.index].message)
                else:
                    self._send(chunk, source.encode(chunk, REQUEST_CHUNK_FIELD))
                push.append(
                    chunk.index, self._sent[chunk.index].message, chunk.byte_count
                )
            pushes.append(push)
        return CompletedPush(pushes, is_wasted=2 * kept_bytes < sent_bytes)

    def _unchanged(self, source: ChunkSource) -> set[int]:
        """Chunks that were sent as their gradient is now. Both threads look."""
        sent = [self._placement.chunks[index] for index in sorted(self._sent)]

        def unchanged_of(chunks: Sequence[Chunk]) -> set[int]:
            return {each.index for each in chunks if self._is_unchanged(each, source)}

        beside = self._copier.submit(partial(unchanged_of, sent[1::2]))
        return unchanged_of(sent[::2]) | beside.result()

    def _is_unchanged(self, chunk: Chunk, source: ChunkSource) -> bool:
        sent = self._sent[chunk.index]
        is_present = sent.frame.presence == bits_to_bytes(source.presence(chunk))
        return is_present and sent.digest == source.digest(chunk)


class Usefulness:
    """Whether sending ahead still pays."""

    def __init__(self) -> None:
        self._wasted_count = 0

    @property
    def is_over(self) -> bool:
        """Whether it has been in vain for too many steps in a row."""
        return self._wasted_count >= _WASTED_COUNT_MAX

    def note(self, *, is_wasted: bool) -> bool:
        """A step has used or wasted what went ahead; whether that ends it now."""
        self._wasted_count = self._wasted_count + 1 if is_wasted else 0
        return self._wasted_count == _WASTED_COUNT_MAX
