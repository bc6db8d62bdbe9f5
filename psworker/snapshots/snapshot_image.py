"""Chunks of a snapshot put together into tensors.

Owned by one thread, the event loop's. Knows which chunks are still missing, so that a
download that was interrupted goes on with them, and a shard that ends early is named
instead of leaving zeros behind.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from pswire.frames import ENCODING_UNCHANGED, ChunkFrame, bits_from_bytes
from pswire.placement import Chunk, place
from pswire.reasons import ErrorReason, Refusal
from pswire.schema import ModelSchema
from pswire.torch_types import tensor_from_buffer
from psworker.tensors.tensor_chunks import ChunkSource


class SnapshotImage:
    """Values of all tensors of a job, filled chunk by chunk.

    Attributes:
        received_byte_count: Bytes of values that have come so far.
    """

    def __init__(
        self, schema: ModelSchema, shard_count: int, chunk_bytes: int = 0
    ) -> None:
        self._schema = schema
        self._placement = place(schema, shard_count, chunk_bytes)
        self._bytes = [np.empty(entry.byte_count, np.uint8) for entry in schema.entries]
        self._tensors = [
            tensor_from_buffer(data.data, entry.element_type).reshape(entry.shape)
            for entry, data in zip(schema.entries, self._bytes, strict=True)
        ]
        self._source = ChunkSource(self._tensors)
        self._received = [0] * len(self._placement.chunks)
        self._complete = [False] * len(self._placement.chunks)
        self._has_held = False
        self.received_byte_count = 0

    def hold(self, states: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Copies values by model and name, of which the snapshot may have some too.

        Copies, so that whoever edits the one snapshot changes nothing of the other, be
        it while this one is read. Tensors that the job has otherwise are left out.
        """
        for entry, tensor in zip(self._schema.entries, self._tensors, strict=True):
            held = states.get(entry.model, {}).get(entry.name)
            if held is not None and (held.shape, held.dtype) == (
                tensor.shape,
                tensor.dtype,
            ):
                tensor.copy_(held.detach())
        self._has_held = True

    def lacking(self, shard_index: int) -> list[int]:
        """Chunks of a shard that have not come whole."""
        held = self._placement.chunks_by_shard[shard_index]
        return [chunk.index for chunk in held if not self._complete[chunk.index]]

    def expect(self, chunk_indexes: Sequence[int]) -> list[int]:
        """Some chunks are asked for; those of which a part has come begin anew.

        Returns:
            Digests of their elements as they are here now, if any were held at first.
        """
        for index in chunk_indexes:
            self._received[index] = 0
        if not self._has_held:
            return []
        return [self._digest(self._placement.chunks[each]) for each in chunk_indexes]

    def add(self, shard_index: int, frame: ChunkFrame) -> None:
        """Takes in a part of a chunk. Parts of one chunk come in order.

        Raises:
            Refusal: `CHUNK_DIGEST_MISMATCH`, or `CHUNK_INVALID` for one that the shard
                does not hold, that is too long or that lacks slices.
        """
        chunk = self._chunk(shard_index, frame)
        offset = self._received[chunk.index]
        if frame.encoding == ENCODING_UNCHANGED and self._has_held and not offset:
            # The digest that was sent: the values here are those that it is of.
            if frame.digest != self._digest(chunk):
                raise self._damaged(chunk, "they have changed here meanwhile")
            self._complete[chunk.index] = True
            return
        frame.check_whole()
        try:
            frame.verify()
        except Refusal as refusal:
            raise self._damaged(chunk, refusal.message) from None
        if offset + len(frame.data) > chunk.byte_count:
            raise _invalid(shard_index, f"chunk {chunk.index} is longer than it should")
        self._write(chunk, offset, np.frombuffer(frame.data, np.uint8))
        self._received[chunk.index] += len(frame.data)
        self.received_byte_count += len(frame.data)
        if frame.last:
            if self._received[chunk.index] != chunk.byte_count:
                raise _invalid(shard_index, f"chunk {chunk.index} is too short")
            self._complete[chunk.index] = True

    def check_complete(self, shard_index: int) -> None:
        """Checks that all of a shard has come.

        Raises:
            Refusal: `CHUNK_INVALID`, with how many chunks are missing.
        """
        if missing := self.lacking(shard_index):
            held = self._placement.chunks_by_shard[shard_index]
            raise _invalid(
                shard_index, f"{len(missing)} of {len(held)} chunks did not come"
            )

    def tensors(self) -> list[torch.Tensor]:
        """The tensors in schema order, sharing the image's memory."""
        return self._tensors

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

    def _digest(self, chunk: Chunk) -> int:
        return self._source.digest(chunk) or 0

    def _damaged(self, chunk: Chunk, what: str) -> Refusal:
        names = [
            repr(self._schema.entries[each.entry_index].name) for each in chunk.slices
        ]
        also = f" and {len(names) - 3} more" if len(names) > 3 else ""
        return Refusal(
            ErrorReason.CHUNK_DIGEST_MISMATCH,
            f"values of {', '.join(names[:3])}{also} are not those that shard "
            f"{chunk.shard_index} has: {what}",
            cure="ask for a snapshot again; if it recurs, check the memory of both "
            "machines and the network",
            shard_index=chunk.shard_index,
            chunk_index=chunk.index,
        )

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
