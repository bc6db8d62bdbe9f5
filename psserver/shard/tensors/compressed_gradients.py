"""Gradients of fewer bytes, as workers send them."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NoReturn

import torch

from pswire.encodings.known import Encoding
from pswire.placement import Chunk
from pswire.reasons import ErrorReason, Refusal
from pswire.schema import ElementType
from pswire.torch_types import buffer_of, tensor_from_buffer


@dataclass(frozen=True, slots=True)
class CompressedPayload:
    """What is staged of a compressed chunk: the bytes as they came, checked.

    Attributes:
        data: Raw elements of the chunk's buffers, then encoded ones of its parameters.
        encoding: Of parameters.
        parameter_count: Elements of parameters.
        buffer_bytes: Bytes of buffers.
        element_type: Type of the chunk.
        chunk_bytes: Bytes of the whole chunk, decoded.
    """

    data: memoryview
    encoding: Encoding
    parameter_count: int
    buffer_bytes: int
    element_type: ElementType
    chunk_bytes: int

    @property
    def byte_count(self) -> int:
        """Bytes that are held."""
        return len(self.data)

    def decoded(self) -> memoryview:
        """All elements as float32, in schema order. Takes as long as an update."""
        encoded = self.data[self.buffer_bytes :]
        values = self.encoding.codec().decode(encoded, self.parameter_count)
        if self.buffer_bytes:
            raw = self.data[: self.buffer_bytes]
            buffers = tensor_from_buffer(raw, self.element_type)
            values = torch.cat((values, buffers.float()))
        return buffer_of(values)


class CompressedGradients:
    """Checks compressed chunks of pushes before they are staged.

    Args:
        encoding: How the workers of the job send gradients.
        buffer_entries: Entries of the schema that are buffers.
    """

    def __init__(
        self, encoding: Encoding | None, buffer_entries: Collection[int]
    ) -> None:
        self._encoding = encoding
        self._buffers = frozenset(buffer_entries)

    def payload(
        self, chunk: Chunk, presence: Sequence[bool], number: int, data: memoryview
    ) -> CompressedPayload:
        """What is to be staged of a chunk.

        Args:
            chunk: The chunk.
            presence: Which of its slices came.
            number: Of the encoding.
            data: As it came.

        Raises:
            Refusal: `CHUNK_INVALID`, with what was expected.
        """
        encoding = self._encoding
        if encoding is None or number != encoding.number:
            name = f"as {encoding.name}" if encoding else "as they are"
            _refuse(
                chunk,
                f"comes in encoding {number}, and gradients of this job go {name}",
            )
        if not encoding.takes(chunk.element_type):
            _refuse(
                chunk,
                f"comes as {encoding.name}, and its elements of "
                f"{chunk.element_type.name.lower()} go as they are",
            )
        pieces = [
            (piece.entry_index in self._buffers, piece.element_count)
            for piece, present in zip(chunk.slices, presence, strict=True)
            if present
        ]
        if any(before > after for (before, _), (after, _) in pairwise(pieces)):
            _refuse(
                chunk, f"comes as {encoding.name}, and has a buffer before a parameter"
            )
        buffer_count = sum(count for is_buffer, count in pieces if is_buffer)
        parameter_count = sum(count for _, count in pieces) - buffer_count
        buffer_bytes = buffer_count * chunk.element_type.byte_count
        if len(data) < buffer_bytes:
            _refuse(
                chunk,
                f"has {len(data)} bytes, and its buffers alone take {buffer_bytes}",
            )
        encoding.codec().check(data[buffer_bytes:], parameter_count)
        return CompressedPayload(
            data=data,
            encoding=encoding,
            parameter_count=parameter_count,
            buffer_bytes=buffer_bytes,
            element_type=chunk.element_type,
            chunk_bytes=chunk.byte_count,
        )


def raw_byte_count(chunk: Chunk, presence: Sequence[bool]) -> int:
    """Bytes that slices of a chunk take as they are."""
    count = sum(
        piece.element_count
        for piece, present in zip(chunk.slices, presence, strict=False)
        if present
    )
    return count * chunk.element_type.byte_count


def _refuse(chunk: Chunk, what: str) -> NoReturn:
    raise Refusal(ErrorReason.CHUNK_INVALID, f"chunk {chunk.index} {what}")
