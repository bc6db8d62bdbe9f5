"""Chunks out of tensors and into them.

A chunk's slices are runs of elements of tensors in C order, whatever the layout and
device of the tensors. Copies are made where they can't be avoided: none to send one
slice of a contiguous CPU tensor but the one into the message.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Protocol

import numpy as np
import torch
import xxhash

from pswire.compression import NO_COMPRESSION, Compression
from pswire.frames import (
    ENCODING_RAW,
    ENCODING_SPARSE_ROWS,
    ENCODING_UNCHANGED,
    ChunkFrame,
    bits_from_bytes,
    bits_to_bytes,
    encode_chunk,
)
from pswire.placement import Chunk, Placement, Slice
from pswire.reasons import ErrorReason, Refusal
from pswire.slice_rows import Int64s, SliceRows, pack_rows
from pswire.torch_types import TORCH_DTYPES, buffer_of, tensor_from_buffer
from psworker.held_values import FEWER_BYTES, HeldValues

Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]


class ChunkEncoder(Protocol):
    """Turns the elements of a dense chunk into fewer bytes; see `PushEncoder`."""

    def encode(
        self, chunk: Chunk, presence: Sequence[bool], data: torch.Tensor
    ) -> tuple[int, bytes] | None:
        """The number of an encoding and its data; None for a chunk as it is."""
        ...


def dense_message(
    outer_field: int,
    chunk: Chunk,
    presence: Sequence[bool],
    data: memoryview,
    encoder: ChunkEncoder | None,
) -> bytes:
    """A message that holds only a dense chunk, in fewer bytes if there is an encoder.

    Args:
        outer_field: Field number of the chunk in the message.
        chunk: The chunk.
        presence: Which of its slices there are.
        data: Their elements as they are.
        encoder: Makes fewer bytes of them.
    """
    encoding, payload = ENCODING_RAW, data
    if encoder is not None:
        elements = tensor_from_buffer(data, chunk.element_type)
        if (fewer := encoder.encode(chunk, presence, elements)) is not None:
            encoding, payload = fewer[0], memoryview(fewer[1])
    return encode_chunk(
        outer_field,
        index=chunk.index,
        presence=bits_to_bytes(presence),
        data=payload,
        encoding=encoding,
    )


class ChunkSource:
    """Encodes chunks of a set of tensors, some of which may be absent.

    Of a tensor that is sparse by rows and coalesced, only the rows go.

    Attributes:
        tensors: One for each entry of the schema, `None` where it is absent.
        encoder: Makes fewer bytes of dense chunks, if the job sends gradients so.
    """

    def __init__(self, tensors: Sequence[torch.Tensor | None]) -> None:
        self.tensors = tensors
        self.encoder: ChunkEncoder | None = None
        self._flat: dict[int, torch.Tensor] = {}
        self._bytes: dict[int, Bytes] = {}
        self._rows: dict[int, Int64s] = {}

    def presence(self, chunk: Chunk) -> tuple[bool, ...]:
        """Which slices of a chunk are there."""
        return tuple(
            self.tensors[piece.entry_index] is not None for piece in chunk.slices
        )

    def is_dense(self, chunk: Chunk) -> bool:
        """Whether no tensor of a chunk is sparse."""
        tensors = (self.tensors[piece.entry_index] for piece in chunk.slices)
        return not any(each is not None and each.is_sparse for each in tensors)

    @torch.no_grad()
    def encode(self, chunk: Chunk, outer_field: int) -> bytes:
        """A message that holds only this chunk, with its present slices."""
        presence = self.presence(chunk)
        elements, row_indices = self._gathered(chunk, presence)
        data = buffer_of(elements.cpu())
        if row_indices is None:
            return dense_message(outer_field, chunk, presence, data, self.encoder)
        return encode_chunk(
            outer_field,
            index=chunk.index,
            presence=bits_to_bytes(presence),
            data=data,
            encoding=ENCODING_SPARSE_ROWS,
            row_indices=row_indices,
        )

    @torch.no_grad()
    def gather(self, chunk: Chunk) -> torch.Tensor:
        """Elements of a dense chunk's present slices, 1-D, on the device they are on.

        On the host where they are on several.
        """
        data, _ = self._gathered(chunk, self.presence(chunk))
        return data

    @torch.no_grad()
    def host_parts(self, chunk: Chunk) -> list[Bytes] | None:
        """Bytes of each present slice of a dense chunk, where they are.

        None if some are not in host memory, or are of another type than is sent.
        """
        size = chunk.element_type.byte_count
        parts = []
        for piece in chunk.slices:
            if self.tensors[piece.entry_index] is None:
                continue
            whole = self._bytes.get(piece.entry_index)
            if whole is None:
                flat = self._flat_tensor(piece.entry_index)
                if (
                    flat.device.type != "cpu"
                    or flat.dtype != TORCH_DTYPES[chunk.element_type]
                ):
                    return None
                whole = self._bytes[piece.entry_index] = bytes_in_host(flat)
            parts.append(whole[piece.start * size : piece.stop * size])
        return parts

    @torch.no_grad()
    def digest(self, chunk: Chunk) -> int | None:
        """The digest of a chunk's elements as they are; None for rows only.

        That of its message too, unless the elements are encoded in fewer bytes.
        """
        data, row_indices = self._gathered(chunk, self.presence(chunk))
        if row_indices is not None:
            return None
        return xxhash.xxh3_64_intdigest(buffer_of(data.cpu()))

    def _gathered(
        self, chunk: Chunk, presence: tuple[bool, ...]
    ) -> tuple[torch.Tensor, bytes | None]:
        parts = [
            self._part(piece)
            for piece, is_present in zip(chunk.slices, presence, strict=True)
            if is_present
        ]
        runs = [run for run, _ in parts]
        rows = [each for _, each in parts]
        is_sparse = any(each is not None for each in rows)
        dtype = TORCH_DTYPES[chunk.element_type]
        if len({run.device for run in runs}) > 1:
            runs = [run.cpu() for run in runs]
        data = torch.cat(runs) if len(runs) > 1 else runs[0]
        return data.to(dtype), pack_rows(rows) if is_sparse else None

    def _part(self, piece: Slice) -> tuple[torch.Tensor, SliceRows | None]:
        """Elements of a slice, 1-D, and of a sparse tensor the rows they are of."""
        flat = self._flat_tensor(piece.entry_index)
        numbers = self._rows.get(piece.entry_index)
        if numbers is None:
            return run_of(flat, piece), None
        tensor = self.tensors[piece.entry_index]
        assert tensor is not None, "only present slices are read"
        row_length = math.prod(tensor.shape[1:])
        rows, first = SliceRows.among(piece, row_length, numbers)
        start = first * row_length + rows.skipped
        return flat[start : start + rows.element_count], rows

    def _flat_tensor(self, entry_index: int) -> torch.Tensor:
        flat = self._flat.get(entry_index)
        if flat is None:
            tensor = self.tensors[entry_index]
            assert tensor is not None, "only present slices are read"
            if tensor.is_sparse:
                self._rows[entry_index] = tensor._indices()[0].cpu().numpy()
                tensor = tensor._values()
            flat = self._flat[entry_index] = tensor.reshape(-1).contiguous()
        return flat


@dataclass(frozen=True, slots=True)
class CheckedChunk:
    """A received chunk that can be written.

    Attributes:
        chunk: What it is of.
        mark: The same for the same values: their digest, or in shared memory their
            version.
        pieces: Slices that are present.
        sizes: Elements of each.
        values: Elements of all, 1-D, over the bytes that were received.
    """

    chunk: Chunk
    mark: int
    pieces: list[Slice]
    sizes: list[int]
    values: torch.Tensor


def checked_chunk(
    chunk: Chunk, presence: Sequence[bool], values: torch.Tensor, mark: int
) -> CheckedChunk:
    """A chunk whose elements are known to be as many as they should.

    Args:
        chunk: What it is of.
        presence: Which of its slices there are.
        values: Elements of all of these, 1-D.
        mark: As that of `CheckedChunk`.
    """
    pieces = list(compress(chunk.slices, presence))
    sizes = [piece.element_count for piece in pieces]
    return CheckedChunk(chunk, mark, pieces, sizes, values)


class ValueStore:
    """The user's tensors, into which values are written.

    Attributes:
        tensors: One for each entry of the schema.
        placement: How they are cut.
        written: Entries of buffers into which values were written; the owner clears it.
        held: Values as they came; says whether some are lost, to be pulled.
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        placement: Placement,
        *,
        buffers: Collection[int] = (),
        local: Collection[int] = (),
        compression: Compression = NO_COMPRESSION,
        held: HeldValues | None = None,
    ) -> None:
        """Takes the user's tensors as they are.

        Args:
            tensors: One for each entry of the schema.
            placement: How they are cut.
            buffers: Entries that are buffers.
            local: Of these, entries that are never written to.
            compression: How values come.
            held: Values that came before, for a copy of another store.
        """
        self.tensors = list(tensors)
        self.placement = placement
        self.written: set[int] = set()
        self._buffers = frozenset(buffers)
        self._local = frozenset(local)
        self.held = held or HeldValues(compression, buffers)
        self._chunks_with_buffers = frozenset(
            chunk.index
            for chunk in placement.chunks
            if any(piece.entry_index in self._buffers for piece in chunk.slices)
        )
        self._flat: dict[int, torch.Tensor] = {}
        self._bytes: dict[int, tuple[torch.Tensor, Bytes]] = {}
        self._staged: dict[int, torch.Tensor] = {}

    def write(self, frame: ChunkFrame) -> None:
        """Writes the present slices of a received chunk.

        Tensors with gaps get theirs with `flush`.

        Raises:
            Refusal: The chunk is none of this placement, has another size than it
                should, or arrived other than it was sent.
        """
        self.write_checked(self.check(frame))

    def check(self, frame: ChunkFrame) -> "CheckedChunk":
        """Checks a received chunk, and touches no tensor.

        Raises:
            Refusal: As `write`.
        """
        chunk = self._chunk_of(frame)
        presence = bits_from_bytes(frame.presence, len(chunk.slices))
        if frame.encoding == ENCODING_UNCHANGED:
            source = ChunkSource(self.tensors)
            everything = (True,) * len(chunk.slices)
            self.held.take(chunk, everything, source.gather(chunk))
            return CheckedChunk(chunk, frame.digest, [], [], torch.empty(0))
        if frame.encoding in FEWER_BYTES:
            frame.verify()
            self._know(chunk)
            decoded = self.held.decoded(chunk, presence, frame)
            if decoded is None:  # to be pulled
                return CheckedChunk(chunk, frame.digest, [], [], torch.empty(0))
            values = decoded
        else:
            frame.check_whole()
            count = sum(
                piece.element_count for piece in compress(chunk.slices, presence)
            )
            check_byte_count(chunk, count, len(frame.data))
            frame.verify()
            values = tensor_from_buffer(frame.data, chunk.element_type)
            self.held.take(chunk, presence, values)
        return checked_chunk(chunk, presence, values, frame.digest)

    @torch.no_grad()
    def write_checked(self, checked: "CheckedChunk") -> None:
        """Writes a chunk that `check` has returned."""
        pieces, sizes, values = checked.pieces, checked.sizes, checked.values
        if not pieces:
            return
        if checked.chunk.index in self._chunks_with_buffers:
            self._copy_with_buffers(pieces, values, sizes)
        else:
            self._copy(pieces, values, sizes)

    @torch.no_grad()
    def flush(self) -> None:
        """Writes what had to be put together first."""
        for entry_index, staged in self._staged.items():
            tensor = self.tensors[entry_index].detach()
            tensor.copy_(staged.view(tensor.shape))
        self._staged.clear()

    def digests(self) -> list[list[int]]:
        """Of the elements of each chunk of each shard, as they are here now."""
        source = ChunkSource([each.detach() for each in self.tensors])
        return [
            [source.digest(chunk) or 0 for chunk in chunks]
            for chunks in self.placement.chunks_by_shard
        ]

    def copy(self) -> "ValueStore":
        """A store of its own memory, with the same values."""
        return ValueStore(
            [tensor.detach().clone() for tensor in self.tensors],
            self.placement,
            buffers=self._buffers,
            local=self._local,
            held=self.held,
        )

    @torch.no_grad()
    def take_from(self, other: "ValueStore") -> None:
        """Writes the values of a copy of this store back.

        Of buffers those that were written into the copy: the others may have gone on
        here.
        """
        pairs = zip(self.tensors, other.tensors, strict=True)
        for index, (mine, theirs) in enumerate(pairs):
            if index not in self._buffers or index in other.written:
                mine.detach().copy_(theirs)
        self.written |= other.written

    def put(self, entry_index: int, tensor: torch.Tensor) -> None:
        """From now on another tensor of the same shape and type is an entry's."""
        self.tensors[entry_index] = tensor
        self._flat.pop(entry_index, None)

    def _know(self, chunk: Chunk) -> None:
        """Before the first change: this worker gave the job its first values."""
        if self.held.is_wanted(chunk):
            source = ChunkSource(self.tensors)
            self.held.take(chunk, (True,) * len(chunk.slices), source.gather(chunk))

    def _chunk_of(self, frame: ChunkFrame) -> Chunk:
        if frame.index >= len(self.placement.chunks):
            raise Refusal(
                ErrorReason.CHUNK_INVALID,
                f"chunk {frame.index} is none of the {len(self.placement.chunks)}",
            )
        if frame.part or not frame.last:
            raise Refusal(
                ErrorReason.CHUNK_INVALID,
                f"chunk {frame.index} comes in parts, which this release does not read",
            )
        return self.placement.chunks[frame.index]

    def _copy_with_buffers(
        self, pieces: list[Slice], values: torch.Tensor, sizes: list[int]
    ) -> None:
        """As `_copy`, without the buffers that are nobody else's; notes the others."""
        parts = torch.split(values, sizes)
        kept = [
            (piece, part)
            for piece, part in zip(pieces, parts, strict=True)
            if piece.entry_index not in self._local
        ]
        self.written.update(
            piece.entry_index for piece, _ in kept if piece.entry_index in self._buffers
        )
        if len(kept) == len(pieces):
            self._copy(pieces, values, sizes)
        elif kept:
            data = torch.cat([part for _, part in kept])
            self._copy([p for p, _ in kept], data, [len(part) for _, part in kept])

    def _copy(
        self, pieces: list[Slice], values: torch.Tensor, sizes: list[int]
    ) -> None:
        flat = [self._target(piece.entry_index) for piece in pieces]
        if all(each.device.type == "cpu" for each in flat):
            self._copy_in_host(pieces, flat, values)
            return
        targets = list(map(run_of, flat, pieces))
        # One transfer for the whole chunk, however many tensors it spans.
        device = targets[0].device
        torch._foreach_copy_(targets, values.to(device).split_with_sizes(sizes))

    def _copy_in_host(
        self, pieces: list[Slice], targets: list[torch.Tensor], values: torch.Tensor
    ) -> None:
        """Copies in this thread alone, without the GIL.

        torch would hand half of it to another thread, which then spins while it waits
        for more and takes a core from the thread that moves bytes: a step of 64 MiB
        took twice as long, on two cores. And each of its calls lets go of the GIL, and
        waits for it again.
        """
        data = bytes_in_host(values.cpu())
        size = values.element_size()
        start = 0
        for piece, target in zip(pieces, targets, strict=True):
            stop = start + piece.element_count * size
            whole = self._bytes_of(piece.entry_index, target)
            np.copyto(whole[piece.start * size : piece.stop * size], data[start:stop])
            # As an operation of torch does: a backward pass over the old values must
            # fail.
            torch.autograd.graph.increment_version(target)
            start = stop

    def _bytes_of(self, entry_index: int, target: torch.Tensor) -> Bytes:
        known = self._bytes.get(entry_index)
        if known is None or known[0] is not target:
            known = self._bytes[entry_index] = target, bytes_in_host(target)
        return known[1]

    def _target(self, entry_index: int) -> torch.Tensor:
        """All elements of a tensor in C order, to be written to."""
        tensor = self.tensors[entry_index]
        flat = self._flat.get(entry_index)
        # `tensor.data = ...`, as `model.half()` does it, gives it other memory.
        if flat is not None and flat.data_ptr() == tensor.data_ptr():
            return flat
        if tensor.is_contiguous():
            flat = self._flat[entry_index] = tensor.detach().view(-1)
            return flat
        staged = self._staged.get(entry_index)
        if staged is None:
            staged = tensor.detach().contiguous().view(-1)
            self._staged[entry_index] = staged
        return staged


def check_byte_count(chunk: Chunk, element_count: int, byte_count: int) -> None:
    """Checks that elements of a chunk take as many bytes as they should.

    Raises:
        Refusal: `CHUNK_INVALID`.
    """
    if element_count * chunk.element_type.byte_count != byte_count:
        raise Refusal(
            ErrorReason.CHUNK_INVALID,
            f"chunk {chunk.index} has {byte_count} bytes for {element_count} "
            f"elements of {chunk.element_type.name.lower()}",
        )


def bytes_in_host(flat: torch.Tensor) -> Bytes:
    """The bytes of a contiguous 1-D tensor on the CPU, sharing memory."""
    return flat.view(torch.uint8).numpy()


def run_of(flat: torch.Tensor, piece: Slice) -> torch.Tensor:
    """The elements of a slice, out of all of its tensor in C order."""
    # Most tensors are smaller than a chunk: a view saved is microseconds.
    if piece.element_count == flat.numel():
        return flat
    return flat[piece.start : piece.stop]
