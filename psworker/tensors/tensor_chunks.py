"""Chunks out of tensors.

A chunk's slices are runs of elements of tensors in C order, whatever the layout and
device of the tensors. Copies are made where they can't be avoided: none to send one
slice of a contiguous CPU tensor but the one into the message.
"""

import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
import xxhash

from pswire.frames import (
    ENCODING_RAW,
    ENCODING_SPARSE_ROWS,
    bits_to_bytes,
    encode_chunk,
)
from pswire.placement import Chunk, Slice
from pswire.slice_rows import Int64s, SliceRows, pack_rows
from pswire.torch_types import TORCH_DTYPES, buffer_of, tensor_from_buffer

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

    `data` has the elements of the slices that are present, as they are.
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
        """Bytes of each present slice of a dense chunk, in place.

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


def bytes_in_host(flat: torch.Tensor) -> Bytes:
    """The bytes of a contiguous 1-D tensor on the CPU, sharing memory."""
    return flat.view(torch.uint8).numpy()


def run_of(flat: torch.Tensor, piece: Slice) -> torch.Tensor:
    """The elements of a slice, out of all of its tensor in C order."""
    # Most tensors are smaller than a chunk: a view saved is microseconds.
    if piece.element_count == flat.numel():
        return flat
    return flat[piece.start : piece.stop]
