"""The values that changes of values are added to, and decoding in whatever encoding.

Where shards send changes, the values that they sent last are kept beside the user's
tensors: a script may write into these, and they may be on a device. A digest shows
whether a change fits. One that does not is dropped, and the worker pulls all values.
"""

from collections.abc import Collection, Sequence
from itertools import compress
from typing import Final, TypeVar

import torch

from pswire.compression import Compression
from pswire.encodings.change import Change, digest_of, unpack_change
from pswire.encodings.known import BY_NUMBER
from pswire.frames import ENCODING_CHANGE, ChunkFrame
from pswire.placement import Chunk
from pswire.reasons import ErrorReason, Refusal
from pswire.torch_types import TORCH_DTYPES, tensor_from_buffer

Bits = Sequence[bool]
Item = TypeVar("Item")

FEWER_BYTES: Final = frozenset({*BY_NUMBER, ENCODING_CHANGE})
"""Encodings that are decoded here."""


class DeltaBase:
    """Decodes values; keeps those of parameters by chunk, if changes are sent.

    Attributes:
        is_lost: Whether a change did not fit; the owner pulls and clears it.
        is_rounded: Whether values are sent in fewer bytes than they have.
    """

    def __init__(self, compression: Compression, buffers: Collection[int]) -> None:
        encoding = compression.pull_encoding
        self.is_rounded = encoding is not None
        kept = encoding if encoding and encoding.sends_changes else None
        self._kept_types = kept.element_types if kept else frozenset()
        self._buffers = frozenset(buffers)
        self._held: dict[int, torch.Tensor] = {}
        self._digests: dict[int, int] = {}  # of those last sent as changes
        self.is_lost = False

    @property
    def byte_count(self) -> int:
        """Bytes of the values kept."""
        return sum(held.nbytes for held in self._held.values())

    def keeps(self, chunk: Chunk) -> bool:
        """Whether values of a chunk are kept."""
        return chunk.element_type in self._kept_types

    def is_wanted(self, chunk: Chunk) -> bool:
        """Whether the values of a chunk must be kept, and are not yet."""
        return self.keeps(chunk) and chunk.index not in self._held

    @torch.no_grad()
    def take(self, chunk: Chunk, presence: Bits, values: torch.Tensor) -> None:
        """Keeps the values of a chunk's present slices: all their elements, 1-D."""
        if not self.keeps(chunk):
            return
        self._digests.pop(chunk.index, None)
        kinds = self._kinds(chunk)
        counts = [piece.element_count for piece in chunk.slices]
        parts = values.cpu().split(list(compress(counts, presence)))
        own = [
            part
            for part, is_buffer in zip(parts, compress(kinds, presence), strict=True)
            if not is_buffer
        ]
        if all(
            bit or is_buffer for bit, is_buffer in zip(presence, kinds, strict=True)
        ):
            self._held[chunk.index] = torch.cat(own) if own else values[:0].clone()
        elif chunk.index in self._held:
            mine = self._held[chunk.index].split(_without(kinds, counts))
            for target, part in zip(
                compress(mine, _without(kinds, presence)), own, strict=True
            ):
                target.copy_(part)

    @torch.no_grad()
    def decoded(
        self, chunk: Chunk, presence: Bits, frame: ChunkFrame
    ) -> torch.Tensor | None:
        """Elements of a chunk's present slices, out of a verified frame.

        Returns:
            Of the chunk's type, 1-D, valid until the next call for this chunk; None for
            a change that does not fit.

        Raises:
            Refusal: `CHUNK_INVALID`.
        """
        kinds = self._kinds(chunk)
        counts = [piece.element_count for piece in chunk.slices]
        is_sent = list(compress(kinds, presence))
        raw = sum(compress(compress(counts, presence), is_sent))
        raw *= chunk.element_type.byte_count
        change = (
            unpack_change(frame.data) if frame.encoding == ENCODING_CHANGE else None
        )
        data = frame.data if change is None else change.data
        if sorted(is_sent) != is_sent or len(data) < raw:
            raise Refusal(
                ErrorReason.CHUNK_INVALID,
                f"chunk {chunk.index} has {len(data)} bytes in encoding "
                f"{frame.encoding}, and buffers of {raw} bytes before parameters",
            )
        bits = _without(kinds, presence)
        sizes = _without(kinds, counts)
        values: torch.Tensor | None
        if change is None:
            count = sum(compress(sizes, bits))
            values = BY_NUMBER[frame.encoding].codec().decode(data[raw:], count)
            values = values.to(TORCH_DTYPES[chunk.element_type])
        else:
            values = self._changed(chunk, change, data[raw:], sizes, bits)
        if values is None or not raw:
            return values
        return torch.cat((values, tensor_from_buffer(data[:raw], chunk.element_type)))

    def _changed(
        self,
        chunk: Chunk,
        change: Change,
        data: memoryview,
        sizes: list[int],
        is_sent: list[bool],
    ) -> torch.Tensor | None:
        """Parameters after a change, which is added once, however often it is sent."""
        held = self._held.get(chunk.index)
        if held is None:
            raise Refusal(
                ErrorReason.CHUNK_INVALID,
                f"chunk {chunk.index} is a change, and this job sends whole values",
            )
        now = self._digests.pop(chunk.index, None) or digest_of(held)
        is_whole = all(is_sent)
        parts = [] if is_whole else list(compress(held.split(sizes), is_sent))
        sent = held if is_whole else torch.cat(parts) if parts else held[:0]
        if now == change.before:
            change.encoding.codec().add_to(sent, data)
            if parts:
                torch._foreach_copy_(parts, sent.split([len(part) for part in parts]))
            now = digest_of(held)
        if now != change.after:
            self.is_lost = True
            del self._held[chunk.index]
            return None
        self._digests[chunk.index] = now
        return sent

    def _kinds(self, chunk: Chunk) -> list[bool]:
        """Which slices are of buffers."""
        return [piece.entry_index in self._buffers for piece in chunk.slices]


def _without(kinds: Bits, items: Sequence[Item]) -> list[Item]:
    """Items of slices that are of parameters."""
    return [item for item, is_buffer in zip(items, kinds, strict=True) if not is_buffer]
