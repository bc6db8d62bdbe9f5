"""Tensors into which chunks of values are written.

A chunk's slices are runs of elements of tensors in C order, whatever the layout and
device of the tensors.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Final, NamedTuple, Self, TypeVar

import numpy as np
import torch

from pswire.compression import NO_COMPRESSION, Compression
from pswire.encodings.change import Change, digest_of, unpack_change
from pswire.encodings.known import BY_NUMBER
from pswire.frames import (
    ENCODING_CHANGE,
    ENCODING_UNCHANGED,
    ChunkFrame,
    bits_from_bytes,
)
from pswire.limits import VALUES_PART_BYTES
from pswire.placement import Chunk, Placement, Slice
from pswire.reasons import ErrorReason, Refusal
from pswire.torch_types import TORCH_DTYPES, tensor_from_buffer
from psworker.tensors.tensor_chunks import Bytes, ChunkSource, bytes_in_host, run_of

Bits = Sequence[bool]
Item = TypeVar("Item")

FEWER_BYTES: Final = frozenset({*BY_NUMBER, ENCODING_CHANGE})
"""Encodings that are decoded here."""


class DeltaBase:
    """Decodes values; keeps those of parameters by chunk, if changes are sent.

    Changes are added to the values that shards sent last. These are kept beside the
    user's tensors: a script may write into those, and they may be on a device. A digest
    shows whether a change fits. One that does not is dropped, and the worker pulls all
    values.

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
        part: Number of the part that it is.
        is_last: Whether the chunk is there with it.
    """

    chunk: Chunk
    mark: int
    pieces: list[Slice]
    sizes: list[int]
    values: torch.Tensor
    part: int = 0
    is_last: bool = True


def checked_chunk(
    chunk: Chunk, presence: Sequence[bool], values: torch.Tensor, mark: int
) -> CheckedChunk:
    """A chunk whose present slices have as many elements as they should.

    `values` are all of these, 1-D, and `mark` is that of `CheckedChunk`.
    """
    pieces = list(compress(chunk.slices, presence))
    sizes = [piece.element_count for piece in pieces]
    return CheckedChunk(chunk, mark, pieces, sizes, values)


class Scope(NamedTuple):
    """What the values that answer a push may change.

    Attributes:
        updated: Entries that the push updates: their values are others.
        withheld: Buffers that are not to be written.
    """

    updated: frozenset[int]
    withheld: frozenset[int]


class ValueStore:
    """The user's tensors, into which values are written.

    Attributes:
        tensors: One for each entry of the schema.
        placement: How they are cut.
        written: Entries of buffers into which values were written; the owner clears it.
        passed_over: Entries of buffers whose values were not written, as the push was
            not theirs; the owner clears it.
        is_in_host: Whether all tensors are in host memory.
        base: Decodes values, and keeps those that changes are added to.
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        placement: Placement,
        *,
        buffers: Collection[int] = (),
        local: Collection[int] = (),
        compression: Compression = NO_COMPRESSION,
        base: DeltaBase | None = None,
    ) -> None:
        """Takes the user's tensors as they are.

        Args:
            tensors: One for each entry of the schema.
            placement: How they are cut.
            buffers: Entries that are buffers.
            local: Of these, entries that are never written to.
            compression: How values are sent.
            base: That of another store, for a copy of it.
        """
        self.tensors = list(tensors)
        self.placement = placement
        self.written: set[int] = set()
        self.passed_over: set[int] = set()
        self.is_in_host = all(each.device.type == "cpu" for each in self.tensors)
        self._scope: Scope | None = None
        self._types = [(each.dtype, each.shape) for each in self.tensors]
        self._buffers = frozenset(buffers)
        self._local = frozenset(local)
        self.base = base or DeltaBase(compression, buffers)
        self._chunks_with_buffers = frozenset(
            chunk.index
            for chunk in placement.chunks
            if any(piece.entry_index in self._buffers for piece in chunk.slices)
        )
        self._flat: dict[int, _Target] = {}
        self._staged: dict[int, _Target] = {}

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
            if self.base.keeps(chunk):
                source = ChunkSource(self.tensors)
                everything = (True,) * len(chunk.slices)
                self.base.take(chunk, everything, source.gather(chunk))
            return CheckedChunk(chunk, frame.digest, [], [], torch.empty(0))
        if frame.encoding in FEWER_BYTES:
            frame.verify()
            self._know(chunk)
            decoded = self.base.decoded(chunk, presence, frame)
            if decoded is None:  # to be pulled
                return CheckedChunk(chunk, frame.digest, [], [], torch.empty(0))
            values = decoded
        else:
            frame.check_whole()
            if frame.part or not frame.last:
                return self._checked_part(chunk, presence, frame)
            count = sum(
                piece.element_count for piece in compress(chunk.slices, presence)
            )
            check_byte_count(chunk, count, len(frame.data))
            frame.verify()
            values = tensor_from_buffer(frame.data, chunk.element_type)
            self.base.take(chunk, presence, values)
        return checked_chunk(chunk, presence, values, frame.digest)

    def _checked_part(
        self, chunk: Chunk, presence: Sequence[bool], frame: ChunkFrame
    ) -> CheckedChunk:
        """A part of a chunk of raw elements, as `encode_parts` makes them."""
        if self.base.keeps(chunk):
            raise Refusal(
                ErrorReason.CHUNK_INVALID,
                f"chunk {chunk.index} comes in parts, and in a job that pulls changes "
                "each chunk comes whole",
            )
        pieces = list(compress(chunk.slices, presence))
        size = chunk.element_type.byte_count
        start = frame.part * VALUES_PART_BYTES // size
        count = sum(piece.element_count for piece in pieces)
        stop = count if frame.last else start + VALUES_PART_BYTES // size
        if start >= count or (stop >= count and not frame.last):
            raise Refusal(
                ErrorReason.CHUNK_INVALID,
                f"part {frame.part} of chunk {chunk.index} lies beyond its {count} "
                "elements, or is said to have others behind it",
            )
        check_byte_count(chunk, stop - start, len(frame.data))
        frame.verify()
        pieces = pieces_between(pieces, start, stop)
        return CheckedChunk(
            chunk,
            frame.digest,
            pieces,
            [piece.element_count for piece in pieces],
            tensor_from_buffer(frame.data, chunk.element_type),
            frame.part,
            frame.last,
        )

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
            if not self._is_as_declared(entry_index):
                continue
            if self._is_new(entry_index) or not same_bytes(tensor, staged.flat):
                tensor.copy_(staged.flat.view(tensor.shape))
        self._staged.clear()

    def narrow(self, scope: Scope | None) -> None:
        """Takes values for those that answer a push, from now on; None for others.

        Of a tensor that the push has not updated, and whose bytes stay the same, no
        write is counted: a graph may hold it.
        """
        self._scope = scope

    def digests(self) -> list[list[int]]:
        """Of the elements of each chunk of each shard, as they are here now."""
        source = ChunkSource([each.detach() for each in self.tensors])
        return [
            [source.digest(chunk) or 0 for chunk in chunks]
            for chunks in self.placement.chunks_by_shard
        ]

    def copy(self) -> "ValueStore":
        """A store with memory of its own, and the same values."""
        return ValueStore(
            [tensor.detach().clone() for tensor in self.tensors],
            self.placement,
            buffers=self._buffers,
            local=self._local,
            base=self.base,
        )

    @torch.no_grad()
    def take_from(self, other: "ValueStore") -> None:
        """Writes the values of a copy of this store back.

        Of buffers only those that were written into the copy: others may have changed
        here since.
        """
        pairs = zip(self.tensors, other.tensors, strict=True)
        for index, (mine, theirs) in enumerate(pairs):
            is_due = index not in self._buffers or index in other.written
            if is_due and not same_bytes(mine.detach(), theirs):
                mine.detach().copy_(theirs)
        self.written |= other.written
        self.passed_over |= other.passed_over

    def put(self, entry_index: int, tensor: torch.Tensor) -> None:
        """Exchanges the tensor of an entry for one of the same shape and type."""
        self.tensors[entry_index] = tensor
        self._flat.pop(entry_index, None)
        if self.is_in_host != (tensor.device.type == "cpu"):
            self.is_in_host = all(each.device.type == "cpu" for each in self.tensors)

    def _is_new(self, entry_index: int) -> bool:
        """Whether values of an entry can be taken to differ from those before."""
        if self._scope is None:
            return True
        return entry_index in self._scope.updated

    def _is_as_declared(self, entry_index: int) -> bool:
        """Whether a tensor has its type and shape still; else the next step refuses."""
        tensor = self.tensors[entry_index]
        return (tensor.dtype, tensor.shape) == self._types[entry_index]

    def _know(self, chunk: Chunk) -> None:
        """Keeps the values before the first change, if this worker has seeded."""
        if self.base.is_wanted(chunk):
            source = ChunkSource(self.tensors)
            self.base.take(chunk, (True,) * len(chunk.slices), source.gather(chunk))

    def _chunk_of(self, frame: ChunkFrame) -> Chunk:
        if frame.index >= len(self.placement.chunks):
            raise Refusal(
                ErrorReason.CHUNK_INVALID,
                f"chunk {frame.index} is none of the {len(self.placement.chunks)}",
            )
        return self.placement.chunks[frame.index]

    def _copy_with_buffers(
        self, pieces: list[Slice], values: torch.Tensor, sizes: list[int]
    ) -> None:
        """As `_copy`, without local buffers; notes the others."""
        parts = torch.split(values, sizes)
        kept = [
            (piece, part)
            for piece, part in zip(pieces, parts, strict=True)
            if piece.entry_index not in self._local
            and not self._is_withheld(piece.entry_index)
        ]
        self.written.update(
            piece.entry_index for piece, _ in kept if piece.entry_index in self._buffers
        )
        if len(kept) == len(pieces):
            self._copy(pieces, values, sizes)
        elif kept:
            data = torch.cat([part for _, part in kept])
            self._copy([p for p, _ in kept], data, [len(part) for _, part in kept])

    def _is_withheld(self, entry_index: int) -> bool:
        is_withheld = self._scope is not None and entry_index in self._scope.withheld
        if is_withheld:
            self.passed_over.add(entry_index)
        return is_withheld

    def _copy(
        self, pieces: list[Slice], values: torch.Tensor, sizes: list[int]
    ) -> None:
        targets = [self._target(piece.entry_index) for piece in pieces]
        unsure = [not self._is_new(piece.entry_index) for piece in pieces]
        if all(each.data is not None for each in targets):
            _copy_in_host(pieces, targets, values, unsure)
            return
        # One transfer for the whole chunk, however many tensors it spans.
        device = targets[0].flat.device
        runs = [
            run_of(each.flat, piece)
            for each, piece in zip(targets, pieces, strict=True)
        ]
        parts = list(values.to(device).split_with_sizes(sizes))
        if any(unsure):
            differ = _differences(runs, parts)
            runs, parts = list(compress(runs, differ)), list(compress(parts, differ))
        if runs:
            torch._foreach_copy_(runs, parts)

    def _target(self, entry_index: int) -> "_Target":
        """All elements of a tensor in C order, to be written to."""
        tensor = self.tensors[entry_index]
        known = self._flat.get(entry_index)
        # `tensor.data = ...` gives it other memory, and so does `share_memory_()`, also
        # to the view of it that is known.
        is_contiguous = tensor.is_contiguous()
        if known and known.address == tensor.data_ptr() and is_contiguous:
            return known
        if not self._is_as_declared(entry_index):
            dtype, shape = self._types[entry_index]
            return _Target.of(torch.empty(shape, dtype=dtype).view(-1))
        if is_contiguous:
            made = self._flat[entry_index] = _Target.of(tensor.detach().view(-1))
            return made
        staged = self._staged.get(entry_index)
        if staged is None:
            staged = _Target.of(tensor.detach().contiguous().view(-1))
            self._staged[entry_index] = staged
        return staged


class _Target(NamedTuple):
    """A tensor that is written to.

    Attributes:
        flat: Its elements in C order, 1-D.
        data: Their bytes, `None` on a device.
        address: Of its memory when it was looked up.
    """

    flat: torch.Tensor
    data: Bytes | None
    address: int

    @classmethod
    def of(cls, flat: torch.Tensor) -> Self:
        data = bytes_in_host(flat) if flat.device.type == "cpu" else None
        return cls(flat, data, flat.data_ptr())


def _copy_in_host(
    pieces: list[Slice],
    targets: list[_Target],
    values: torch.Tensor,
    unsure: list[bool],
) -> None:
    """Copies in this thread alone, without the GIL.

    torch would hand half of it to another thread, which then spins while it waits for
    more and takes a core from the thread that moves bytes: a step of 64 MiB took twice
    as long, on two cores. And each of its calls releases the GIL, and waits for it.
    `unsure` says of each piece whether its bytes may be there already.
    """
    data = bytes_in_host(values.cpu())
    size = values.element_size()
    start = 0
    for piece, target, may_be_there in zip(pieces, targets, unsure, strict=True):
        assert target.data is not None, "they are on the CPU"
        stop = start + piece.element_count * size
        run = slice(piece.start * size, piece.stop * size)
        if not (may_be_there and np.array_equal(target.data[run], data[start:stop])):
            np.copyto(target.data[run], data[start:stop])
            # As an operation of torch does: a backward pass over the old values fails.
            torch.autograd.graph.increment_version(target.flat)
        start = stop


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one type and size have the same bytes, in C order."""
    flat, theirs = one.reshape(-1).contiguous(), other.reshape(-1).contiguous()
    return torch.equal(flat.view(torch.uint8), theirs.to(flat.device).view(torch.uint8))


def _differences(
    runs: Sequence[torch.Tensor], parts: Sequence[torch.Tensor]
) -> list[bool]:
    """Which runs have other bytes than the new parts, with one wait for a device."""
    flags = [
        (run.view(torch.uint8) != part.view(torch.uint8)).any()
        for run, part in zip(runs, parts, strict=True)
    ]
    found: list[bool] = torch.stack(flags).tolist()
    return found


def pieces_between(pieces: Sequence[Slice], start: int, stop: int) -> list[Slice]:
    """What lies in a range of elements, counted over all pieces in their order."""
    found = []
    position = 0
    for piece in pieces:
        first = max(start - position, 0)
        last = min(stop - position, piece.element_count)
        if first < last:
            found.append(
                Slice(piece.entry_index, piece.start + first, piece.start + last)
            )
        position += piece.element_count
    return found


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
