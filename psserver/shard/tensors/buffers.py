"""What a push has on a shard beside a gradient: buffers, and values of parameters.

Buffers are what no optimizer updates, such as running statistics.

A push of any optimizer may hold values of buffers. Those of a clock of BSP become
their mean, weighted over the workers that sent the slice; the value of a single one is
taken bit for bit. A push of SSP and ASP is taken by itself, see `BufferAverage`. Which
worker sends which buffer is the workers' own business. Values are never looked at:
they count in no norm and in no check for finite numbers.

A push may say of any tensor that it has its values, and no gradient: they replace the
shard's. Where several of a clock have different ones, those of the worker count whose
hyperparameters do, without any mean.

Threads that work on different chunks may call at once; calls for one chunk are
serialised by the caller.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby, pairwise

import torch

from psserver.shard.core.effects import BufferAverage
from psserver.shard.tensors.contribution import Contribution
from psserver.shard.tensors.robust_aggregate import median_of
from pswire.placement import Chunk
from pswire.schema import EntryKind, ModelSchema

Presence = tuple[bool, ...]


@dataclass(slots=True)
class _ChunkBuffers:
    """Buffers in one chunk: which slices they are, and which have ever changed.

    Of a parameter, changed by values that were pushed of it.
    """

    bits: Presence
    changed: Presence


class ShardBuffers:
    """Which slices of a shard are buffers, and the rule of their values.

    Attributes:
        entry_indexes: All buffers of the schema, in its order.
    """

    def __init__(self, schema: ModelSchema, chunks: Sequence[Chunk]) -> None:
        self.entry_indexes = tuple(
            index
            for index, entry in enumerate(schema.entries)
            if entry.kind is EntryKind.BUFFER
        )
        known = frozenset(self.entry_indexes)
        self._chunks: dict[int, _ChunkBuffers] = {}
        for chunk in chunks:
            bits = tuple(piece.entry_index in known for piece in chunk.slices)
            if any(bits):
                self._chunks[chunk.index] = _ChunkBuffers(bits, (False,) * len(bits))

    def with_all(self, chunk_index: int, presence: Presence) -> Presence:
        """These slices, and all of buffers."""
        held = self._chunks.get(chunk_index)
        return presence if held is None else _union(presence, held.bits)

    def with_changed(self, chunk_index: int, presence: Presence) -> Presence:
        """These slices, and those of buffers that were pushed since the seed."""
        held = self._chunks.get(chunk_index)
        return presence if held is None else _union(presence, held.changed)

    def part(
        self, chunk: Chunk, contributions: Sequence[Contribution]
    ) -> tuple[Sequence[Contribution], Sequence[Contribution]]:
        """Parts contributions: what they hold of gradients, and those with values."""
        held = self._chunks.get(chunk.index)
        if held is None and not any(each.value_entries for each in contributions):
            return contributions, ()
        with_values = []
        gradients = []
        for each in contributions:
            bits = self._valued(chunk, each)
            if each.weight > 0 and any(_both(each.presence, bits)):
                with_values.append(each)
            part = _gradient_of(chunk, each, bits)
            if any(part.presence):
                gradients.append(part)
        return gradients, with_values

    def _valued(self, chunk: Chunk, each: Contribution) -> Presence:
        """Slices that count as no gradient where a contribution has them."""
        held = self._chunks.get(chunk.index)
        bits = (False,) * len(chunk.slices) if held is None else held.bits
        return _union(bits, each.values(chunk)) if each.value_entries else bits

    def take(
        self,
        chunk: Chunk,
        values: torch.Tensor,
        contributions: Sequence[Contribution],
        average: BufferAverage | None,
        *,
        is_robust: bool = False,
    ) -> Presence:
        """Replaces buffers, and other values, by what was pushed.

        Args:
            chunk: Where they are.
            values: Elements of the chunk, 1-D, written to.
            contributions: Those with values, as `part` returns them.
            average: For a push that is taken by itself; None for a clock.
            is_robust: Whether buffers become the median of each element and not the
                mean.

        Returns:
            The slices that were replaced.
        """
        none = (False,) * len(chunk.slices)
        held = self._chunks.setdefault(chunk.index, _ChunkBuffers(none, none))
        taken = [False] * len(chunk.slices)
        for run in _runs(chunk, held.bits, contributions, average):
            for position in range(run.first, run.stop):
                taken[position] = True
            old = values[run.start : run.start + run.element_count]
            if run.member_count > 1:
                new = old.double().lerp(run.parts[0].double(), 1 / run.member_count)
                old.copy_(new)
            else:
                old.copy_(_mean(run.parts, run.weights, old, is_robust=is_robust))
        held.changed = _union(held.changed, tuple(taken))
        return tuple(taken)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """Adjacent slices that the same workers have sent.

    Attributes:
        first: First slice, by its position in the chunk.
        stop: One past the last slice.
        start: Where it begins in the chunk, in elements.
        element_count: Elements in it.
        parts: What each worker has sent, 1-D.
        weights: Of these workers.
        member_count: Members of a running average; 1 where the value is replaced.
    """

    first: int
    stop: int
    start: int
    element_count: int
    parts: Sequence[torch.Tensor]
    weights: Sequence[float]
    member_count: int


def _runs(
    chunk: Chunk,
    bits: Presence,
    contributions: Sequence[Contribution],
    average: BufferAverage | None,
) -> Iterator[_Run]:
    starts = [0, *accumulate(piece.element_count for piece in chunk.slices)]
    sent = [
        (
            each.elements(chunk),
            _positions_in_data(chunk, each),
        )
        for each in contributions
    ]

    replacing = [each.values(chunk) for each in contributions]

    def treatment(position: int) -> tuple[Presence, int]:
        """Who has sent a slice, and how many share its average."""
        own = [index for index, valued in enumerate(replacing) if valued[position]]
        if own:
            counted = next((i for i in own if contributions[i].is_source), own[0])
            return tuple(i == counted for i in range(len(contributions))), 1
        if not bits[position]:
            return (), 1
        senders = tuple(each.presence[position] for each in contributions)
        return senders, _member_count(chunk, position, average)

    for (senders, member_count), group in groupby(range(len(bits)), treatment):
        if not any(senders):
            continue
        positions = list(group)
        first, stop = positions[0], positions[-1] + 1
        count = starts[stop] - starts[first]
        yield _Run(
            first=first,
            stop=stop,
            start=starts[first],
            element_count=count,
            parts=[
                data[begins[first] : begins[first] + count]
                for (data, begins), is_sent in zip(sent, senders, strict=True)
                if is_sent
            ],
            weights=[
                each.weight
                for each, is_sent in zip(contributions, senders, strict=True)
                if is_sent
            ],
            member_count=member_count,
        )


def _member_count(chunk: Chunk, position: int, average: BufferAverage | None) -> int:
    """Integers have no running average: a share of a small step is none at all."""
    if (
        average is None
        or not chunk.element_type.is_floating
        or chunk.slices[position].entry_index not in average.entry_indexes
    ):
        return 1
    return average.member_count


def _mean(
    parts: Sequence[torch.Tensor],
    weights: Sequence[float],
    old: torch.Tensor,
    *,
    is_robust: bool,
) -> torch.Tensor:
    """The weighted mean of buffers, or their median; where all agree, their value.

    In float64, and rounded once: integers to the nearest, between two to the even one.
    Of booleans the majority, and as it was when there is none.
    """
    first, *others = parts
    if not others:
        return first
    if first.dtype is torch.bool:
        votes = sum(
            (part.double() * 2 - 1) * weight
            for part, weight in zip(parts, weights, strict=True)
        )
        assert isinstance(votes, torch.Tensor)
        return torch.where(votes == 0, old, votes > 0)
    if is_robust:
        median = median_of(parts)
        if not first.is_floating_point():
            median.round_()
        return median.to(first.dtype)
    total = sum(weights)
    mean = torch.zeros(first.numel(), dtype=torch.float64)
    agreed = torch.ones(first.numel(), dtype=torch.bool)
    for part, weight in zip(parts, weights, strict=True):
        mean.add_(part.double(), alpha=weight / total)
        agreed &= part == first
    if not first.is_floating_point():
        mean.round_()
    return torch.where(agreed, first, mean.to(first.dtype))


def _gradient_of(chunk: Chunk, each: Contribution, bits: Presence) -> Contribution:
    """A contribution without its buffers."""
    presence = tuple(
        present and not is_buffer
        for present, is_buffer in zip(each.presence, bits, strict=True)
    )
    if presence == each.presence:
        return each
    size = (each.element_type or chunk.element_type).byte_count
    begins = _positions_in_data(chunk, each)
    ends = [
        (begin * size, stop * size)
        for (begin, stop), is_kept in zip(pairwise(begins), presence, strict=True)
        if is_kept
    ]
    byte_count = sum(stop - start for start, stop in ends)
    if not ends or ends[-1][1] == byte_count:
        # Buffers come after all parameters in a schema: nothing is to be joined.
        data = each.data[:byte_count]
    else:
        data = memoryview(b"".join(each.data[start:stop] for start, stop in ends))
    return replace(each, presence=presence, data=data)


def _positions_in_data(chunk: Chunk, each: Contribution) -> list[int]:
    """Where each slice begins in a contribution's data, and where the last one ends."""
    return [0, *accumulate(each.element_counts(chunk))]


def _both(one: Presence, other: Presence) -> Presence:
    return tuple(a and b for a, b in zip(one, other, strict=True))


def _union(one: Presence, other: Presence) -> Presence:
    return tuple(a or b for a, b in zip(one, other, strict=True))
