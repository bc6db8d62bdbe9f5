"""The shared memory of a host group: each process adds up its share, and copies.

In the user's thread. Every process writes to a segment of its own and reads those of
the others; what a lost process has written stays as it was.
"""

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import accumulate
from typing import Final, NamedTuple

import torch

from pswire.schema import EntryKind, ModelSchema
from pswire.shared_memory.segments import (
    CHUNK_ALIGNMENT_BYTES,
    HEADER_BYTES,
    MemorySegment,
    SegmentHeader,
    SegmentKind,
)
from pswire.torch_types import tensor_from_buffer
from psworker.backends.host.messages import ProcessId, StepPart
from psworker.optim.buffer_policies import BufferPolicy
from psworker.tensors.value_store import same_bytes

_CUT_ELEMENTS: Final = 64
"""A tensor is cut at a multiple of this many elements: no cache line has two owners."""


@dataclass(frozen=True, slots=True)
class HostLayout:
    """One process's segment: three areas, each with a place for every entry.

    Memory that is never written to costs nothing: only a leader's has values.

    Attributes:
        byte_count: Size of the segment.
        gradients: First byte of each entry's gradient, as this process has it.
        shares: First byte of each entry of the mean; a process writes its share.
        values: First byte of each entry's value.
    """

    byte_count: int
    gradients: tuple[int, ...]
    shares: tuple[int, ...]
    values: tuple[int, ...]

    @classmethod
    def of(cls, schema: ModelSchema) -> "HostLayout":
        """The layout for a model."""
        sizes = [_aligned(entry.byte_count) for entry in schema.entries]
        ends = list(accumulate(sizes * 3, initial=_aligned(HEADER_BYTES)))
        count = len(sizes)
        return cls(
            ends[-1],
            tuple(ends[:count]),
            tuple(ends[count : 2 * count]),
            tuple(ends[2 * count : 3 * count]),
        )


class Run(NamedTuple):
    """Elements `[start, stop)` of an entry, in C order."""

    entry_index: int
    start: int
    stop: int


def share_out(
    schema: ModelSchema, presence: Sequence[bool], count: int
) -> list[list[Run]]:
    """Cuts the present entries into shares of about as many bytes.

    Buffers are not cut.

    Args:
        schema: What is trained.
        presence: Entries that anybody brings.
        count: Number of shares.

    Returns:
        The runs of each share; together every element once.
    """
    present = [
        (index, entry)
        for index, (entry, is_present) in enumerate(
            zip(schema.entries, presence, strict=True)
        )
        if is_present and entry.element_count
    ]
    total = sum(entry.byte_count for _, entry in present)
    shares: list[list[Run]] = [[] for _ in range(count)]
    owner, before = 0, 0
    for index, entry in present:
        size = entry.element_type.byte_count
        start = 0
        while start < entry.element_count:
            limit = total * (owner + 1) // count
            stop = entry.element_count
            if owner + 1 < count and entry.kind is not EntryKind.BUFFER:
                room = -(-max(0, limit - before) // size)
                stop = min(stop, start + -(-room // _CUT_ELEMENTS) * _CUT_ELEMENTS)
            if stop > start:
                shares[owner].append(Run(index, start, stop))
            before += (stop - start) * size
            start = stop
            if before >= limit and owner + 1 < count:
                owner += 1
    return shares


def _aligned(size: int) -> int:
    return -(-size // CHUNK_ALIGNMENT_BYTES) * CHUNK_ALIGNMENT_BYTES


_BLOCK_ELEMENTS: Final = 1 << 16
"""Summed at a time: so many stay in the cache while all processes' are added."""

Parts = Mapping[ProcessId, StepPart]


class _Areas:
    """Views of one process's segment, 1-D, one for each entry of the schema."""

    def __init__(
        self, schema: ModelSchema, layout: HostLayout, data: memoryview
    ) -> None:
        def views(starts: Sequence[int]) -> list[torch.Tensor]:
            return [
                tensor_from_buffer(
                    data[start : start + entry.byte_count], entry.element_type
                )
                for start, entry in zip(starts, schema.entries, strict=True)
            ]

        self.gradients = views(layout.gradients)
        self.shares = views(layout.shares)
        self.values = views(layout.values)


class HostMemory:
    """The segments of all processes that this one has met."""

    def __init__(
        self,
        schema: ModelSchema,
        process: ProcessId,
        policies: Mapping[int, BufferPolicy],
        *,
        adds_up: bool = False,
    ) -> None:
        """Makes this process's own segment.

        Args:
            schema: What is trained.
            process: Which process.
            policies: Of every buffer, by its entry.
            adds_up: Whether gradients are added up instead of averaged.

        Raises:
            SegmentError: The system has no such memory.
        """
        self._schema = schema
        self._own = process
        self._policies = policies
        self._adds_up = adds_up
        self._layout = HostLayout.of(schema)
        self.segment = MemorySegment.create(SegmentKind.HOST, self._layout.byte_count)
        mine = _Areas(schema, self._layout, self.segment.data)
        self._areas = {process: mine}

    def adopt(self, process: ProcessId, header: SegmentHeader, descriptor: int) -> None:
        """Maps the segment of another process.

        Raises:
            SegmentError: It is not what it should be.
        """
        segment = MemorySegment.adopt(header, descriptor)
        self._areas[process] = _Areas(self._schema, self._layout, segment.data)

    def forget(self, processes: Set[ProcessId]) -> None:
        """Unmaps the memory of processes that no step needs any more."""
        for process in processes:
            del self._areas[process]

    @property
    def processes(self) -> frozenset[ProcessId]:
        """Whose memory is here."""
        return frozenset(self._areas)

    @torch.no_grad()
    def offer(self, gradients: Sequence[torch.Tensor | None]) -> tuple[bool, ...]:
        """Writes this process's gradient; returns which entries it has."""
        targets = self._areas[self._own].gradients
        for target, gradient in zip(targets, gradients, strict=True):
            if gradient is not None:
                target.copy_(gradient.detach().reshape(-1))
        return tuple(each is not None for each in gradients)

    @torch.no_grad()
    def reduce(self, parts: Parts) -> float:
        """Adds up this process's share of the mean or sum; returns its square sum."""
        presence = self.presence(parts)
        own = self._shares_of(parts, presence)[self._own]
        counted = {process: part for process, part in parts.items() if part.weight > 0}
        total = sum(part.weight for part in counted.values())
        square_sum = 0.0
        for run in own:
            who = {
                s: p.weight for s, p in counted.items() if p.presence[run.entry_index]
            }
            if self._schema.entries[run.entry_index].kind is EntryKind.BUFFER:
                self._average(run, who)
            else:
                square_sum += self._add(run, who, total)
        return square_sum

    @torch.no_grad()
    def mean(self, parts: Parts, *, with_leaders: bool) -> list[torch.Tensor | None]:
        """The mean that all have added up, one for each entry, of its shape.

        Views of shared memory, but for the few entries that are cut.

        Args:
            parts: Of each contributor.
            with_leaders: Whether the job takes buffers of this group where it takes
                those of one worker.
        """
        presence = self.presence(parts)
        pieces: dict[int, list[torch.Tensor]] = {}
        for process, runs in self._shares_of(parts, presence).items():
            for run in runs:
                found = self._areas[process].shares[run.entry_index][
                    run.start : run.stop
                ]
                pieces.setdefault(run.entry_index, []).append(found)
        found_all: list[torch.Tensor | None] = []
        for index, entry in enumerate(self._schema.entries):
            is_kept = presence[index] and (
                with_leaders or self._policies.get(index) is not BufferPolicy.LEADER
            )
            if not is_kept:
                found_all.append(None)
                continue
            own = pieces.get(index, [])
            if not own:
                own = [self._areas[self._own].shares[index]]  # of no elements
            flat = own[0] if len(own) == 1 else torch.cat(own)
            found_all.append(flat.view(entry.shape))
        return found_all

    def presence(self, parts: Parts) -> tuple[bool, ...]:
        """Which entries the mean has."""
        counted = [part.presence for part in parts.values() if part.weight > 0]
        if not counted:
            return (False,) * len(self._schema.entries)
        return tuple(any(bits) for bits in zip(*counted, strict=True))

    def values(self) -> list[torch.Tensor]:
        """This process's own area of values, one for each entry, of its shape."""
        own = self._areas[self._own].values
        return [
            flat.view(entry.shape)
            for flat, entry in zip(own, self._schema.entries, strict=True)
        ]

    @torch.no_grad()
    def fill(self, tensors: Sequence[torch.Tensor]) -> None:
        """Copies a model into this process's own area of values."""
        for target, tensor in zip(self.values(), tensors, strict=True):
            target.copy_(tensor.detach())

    @torch.no_grad()
    def copy(
        self, source: ProcessId, tensors: Sequence[torch.Tensor], entries: Set[int]
    ) -> None:
        """Copies values of some entries from a process's area into a model."""
        values = self._areas[source].values
        for index in sorted(entries):
            tensor = tensors[index].detach()
            if not same_bytes(tensor, values[index]):  # graphs may hold it
                tensor.copy_(values[index].view(tensor.shape))

    def close(self) -> None:
        """Unmaps all memory, and frees this process's own."""
        self._areas.clear()
        self.segment.close()

    def _shares_of(
        self, parts: Parts, presence: Sequence[bool]
    ) -> dict[ProcessId, list[Run]]:
        processes = sorted(parts)
        shares = share_out(self._schema, presence, len(processes))
        return dict(zip(processes, shares, strict=True))

    def _add(self, run: Run, who: Mapping[ProcessId, float], total: float) -> float:
        """The mean or sum of a run, in the order of process ids; its sum of squares."""
        index, start, stop = run
        target = self._areas[self._own].shares[index]
        sources = [
            (
                self._areas[s].gradients[index],
                1.0 if self._adds_up else who[s] / total,
            )
            for s in sorted(who)
        ]
        wide = torch.float64 if target.dtype == torch.float64 else torch.float32
        squares: list[float] = []
        for begin in range(start, stop, _BLOCK_ELEMENTS):
            block = slice(begin, min(stop, begin + _BLOCK_ELEMENTS))
            first, share = sources[0]
            mean = first[block].to(wide) * share
            for source, share in sources[1:]:
                mean.add_(source[block], alpha=share)
            target[block].copy_(mean)
            norm = float(torch.linalg.vector_norm(mean))
            squares.append(norm * norm)
        return math.fsum(squares) if all(map(math.isfinite, squares)) else math.inf

    def _average(self, run: Run, who: Mapping[ProcessId, float]) -> None:
        """A buffer, as shards average those of workers: in float64, rounded once."""
        index, start, stop = run
        target = self._areas[self._own].shares[index][start:stop]
        processes = sorted(who)
        found = [
            self._areas[process].gradients[index][start:stop] for process in processes
        ]
        if self._policies.get(index) is not BufferPolicy.MEAN or len(found) == 1:
            target.copy_(found[0])
            return
        total = sum(who.values())
        mean = torch.zeros(stop - start, dtype=torch.float64)
        for process, values in zip(processes, found, strict=True):
            mean.add_(values.double(), alpha=who[process] / total)
        if not target.is_floating_point():
            mean.round_()
        agreed = torch.stack([each == found[0] for each in found]).all(0)
        target.copy_(torch.where(agreed, found[0], mean.to(target.dtype)))
