"""Chunks of a snapshot put together into tensors.

Owned by one thread, the event loop's. Knows which bytes are still missing, so that a
shard that ends early is named instead of leaving zeros behind.
"""

import numpy as np
import numpy.typing as npt
import torch

from pswire.frames import ChunkFrame, bits_from_bytes
from pswire.placement import Chunk, place
from pswire.reasons import ErrorReason, Refusal
from pswire.schema import ModelSchema
from pswire.torch_types import tensor_from_buffer


class SnapshotImage:
    """Values of all tensors of a job, filled chunk by chunk."""

    def __init__(
        self, schema: ModelSchema, shard_count: int, chunk_bytes: int = 0
    ) -> None:
        self._schema = schema
        self._placement = place(schema, shard_count, chunk_bytes)
        self._bytes = [np.empty(entry.byte_count, np.uint8) for entry in schema.entries]
        self._received = [0] * len(self._placement.chunks)
        self._complete = [False] * len(self._placement.chunks)
        self.byte_count = 0

    def add(self, shard_index: int, frame: ChunkFrame) -> None:
        """Takes in a part of a chunk. Parts of one chunk come in order.

        Raises:
            Refusal: `CHUNK_DIGEST_MISMATCH`, or `CHUNK_INVALID` for one that the shard
                does not hold, that is too long or that lacks slices.
        """
        chunk = self._chunk(shard_index, frame)
        frame.verify()
        frame.check_whole()
        offset = self._received[chunk.index]
        if offset + len(frame.data) > chunk.byte_count:
            raise _invalid(shard_index, f"chunk {chunk.index} is longer than it should")
        self._write(chunk, offset, np.frombuffer(frame.data, np.uint8))
        self._received[chunk.index] += len(frame.data)
        self.byte_count += len(frame.data)
        if frame.last:
            if self._received[chunk.index] != chunk.byte_count:
                raise _invalid(shard_index, f"chunk {chunk.index} is too short")
            self._complete[chunk.index] = True

    def check_complete(self, shard_index: int) -> None:
        """Checks that all of a shard has come.

        Raises:
            Refusal: `CHUNK_INVALID`, with how many chunks are missing.
        """
        held = self._placement.chunks_by_shard[shard_index]
        missing_count = sum(not self._complete[chunk.index] for chunk in held)
        if missing_count:
            raise _invalid(
                shard_index, f"{missing_count} of {len(held)} chunks did not come"
            )

    def tensors(self) -> list[torch.Tensor]:
        """The tensors in schema order, sharing the image's memory."""
        return [
            tensor_from_buffer(data.data, entry.element_type).reshape(entry.shape)
            for entry, data in zip(self._schema.entries, self._bytes, strict=True)
        ]

    def _chunk(self, shard_index: int, frame: ChunkFrame) -> Chunk:
        chunks = self._placement.chunks
        if frame.index >= len(chunks) or (
            chunks[frame.index].shard_index != shard_index
        ):
            raise _invalid(shard_index, f"chunk {frame.index} is not one of its own")
        chunk = chunks[frame.index]
        if self._complete[chunk.index]:
            raise _invalid(shard_index, f"chunk {chunk.index} came twice")
        if not all(bits_from_bytes(frame.presence, len(chunk.slices))):
            raise _invalid(shard_index, f"chunk {chunk.index} lacks slices")
        return chunk

    def _write(self, chunk: Chunk, offset: int, data: npt.NDArray[np.uint8]) -> None:
        """Spreads bytes, from `offset` of the chunk on, over its slices."""
        size = chunk.element_type.byte_count
        slice_offset = 0
        for piece in chunk.slices:
            length = piece.element_count * size
            first = max(offset, slice_offset)
            last = min(offset + len(data), slice_offset + length)
            if first < last:
                start = piece.start * size + first - slice_offset
                self._bytes[piece.entry_index][start : start + last - first] = data[
                    first - offset : last - offset
                ]
            slice_offset += length


def _invalid(shard_index: int, what: str) -> Refusal:
    return Refusal(
        ErrorReason.CHUNK_INVALID,
        f"shard {shard_index} sent a wrong snapshot: {what}",
        shard_index=shard_index,
    )
