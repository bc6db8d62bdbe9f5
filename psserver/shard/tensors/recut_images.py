"""Images of chunks, put together from those of another placement of the same schema.

Values, masters and elements of optimizer state keep their bits. Numbers of state are of
slices, and a slice that is made of several has theirs, which are alike.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from operator import attrgetter

import torch

from psserver.shard.tensors.chunk_image import ChunkImage, HeldState
from psserver.shard.tensors.optimizer_state import Span, part_of, spans_of
from psserver.shard.tensors.shard_optimizers import DeclaredOptimizers
from pswire.checkpoint.recut import Run
from pswire.optimizer_states import SCALARS, StateKey
from pswire.placement import Chunk


@dataclass(frozen=True, slots=True)
class Source:
    """A chunk of the other placement, with its image."""

    chunk: Chunk
    image: ChunkImage


def put_together(
    chunk: Chunk,
    runs: Sequence[Run],
    sources: Mapping[int, Source],
    declared: DeclaredOptimizers,
) -> ChunkImage:
    """Makes the image of a chunk.

    Args:
        chunk: The chunk.
        runs: What it is made of.
        sources: The chunks that these are of, checked.
        declared: Optimizers of the job.

    Raises:
        Refusal: `OPTIMIZER_MISMATCH`.
    """
    first, *others = sources.values()
    if not others and first.chunk.slices == chunk.slices:
        return first.image
    images = [source.image for source in sources.values()]
    names = dict.fromkeys(name for image in images for name in image.states)

    def joined(whole_of: Callable[[ChunkImage], torch.Tensor]) -> torch.Tensor:
        wholes = {index: whole_of(each.image) for index, each in sources.items()}
        return torch.cat(
            [
                wholes[run.chunk_index][run.start : run.start + run.element_count]
                for run in runs
            ]
        )

    has_master = any(image.master is not None for image in images)
    return ChunkImage(
        values=joined(attrgetter("values")),
        master=joined(_master_of) if has_master else None,
        states={name: _state(runs, sources, name, declared) for name in names},
    )


def _master_of(image: ChunkImage) -> torch.Tensor:
    """Its masters; parameters that nobody updates share a chunk with others now."""
    return image.values.float() if image.master is None else image.master


def _state(
    runs: Sequence[Run],
    sources: Mapping[int, Source],
    name: str,
    declared: DeclaredOptimizers,
) -> HeldState:
    """State of an optimizer, under its newest declaration that any source has.

    State that this declaration does not go on from is left out: the next update would
    not go on from it either.
    """
    held = {
        index: source.image.states[name]
        for index, source in sources.items()
        if name in source.image.states
    }
    digests = {each.spec_digest for each in held.values()}
    specs = {digest: declared.spec(name, digest) for digest in digests}
    order = list(declared.all_of(name))
    newest = max(digests, key=lambda digest: order.index(specs[digest]))
    states = {
        index: _SourceState(sources[index].chunk, each)
        for index, each in held.items()
        if specs[newest].goes_on_from(specs[each.spec_digest])
    }
    return HeldState(newest, dict(_joined_spans(runs, states)))


class _SourceState:
    """State of a chunk, by slices."""

    def __init__(self, chunk: Chunk, held: HeldState) -> None:
        self._starts = [0, *accumulate(each.element_count for each in chunk.slices)]
        self._spans: list[Span | None] = [None] * len(chunk.slices)
        for span in spans_of(held.state):
            self._spans[span.first : span.stop] = [span] * (span.stop - span.first)

    def part(self, run: Run) -> dict[str, torch.Tensor]:
        """State of a run's elements; empty where there is none."""
        span = self._spans[run.slice_index]
        if span is None:
            return {}
        start = run.start - self._starts[span.first]
        return {
            name: part_of(value, start, run.element_count)
            for name, value in span.state.items()
        }


@dataclass(slots=True)
class _JoinedSpan:
    """Neighbouring slices whose state differs in nothing but elements."""

    first: int
    stop: int
    numbers: dict[str, float]
    elements: dict[str, list[torch.Tensor]]

    def is_continued_by(self, other: "_JoinedSpan") -> bool:
        """Whether the slice that comes next can share its state."""
        return (
            self.stop == other.first
            and self.elements.keys() == other.elements.keys()
            and self.numbers == other.numbers
        )


def _joined_spans(
    runs: Sequence[Run], states: Mapping[int, _SourceState]
) -> Iterator[tuple[StateKey, torch.Tensor]]:
    """State by slices; neighbours share it, so that torch updates them together."""
    spans: list[_JoinedSpan] = []
    for position, own in groupby(runs, attrgetter("new_slice_index")):
        found = _span_of(
            position,
            [
                states[run.chunk_index].part(run) if run.chunk_index in states else {}
                for run in own
            ],
        )
        if spans and spans[-1].is_continued_by(found):
            spans[-1].stop = found.stop
            for name, parts in found.elements.items():
                spans[-1].elements[name] += parts
        else:
            spans.append(found)
    for span in spans:
        for name, number in span.numbers.items():
            yield StateKey(span.first, span.stop, name), torch.tensor(number)
        for name, parts in span.elements.items():
            yield StateKey(span.first, span.stop, name), torch.cat(parts)


def _span_of(position: int, parts: Sequence[Mapping[str, torch.Tensor]]) -> _JoinedSpan:
    """State of one slice; none where one of its parts has none.

    Parts of a tensor are updated together, but where a worker's bytes contradicted its
    verdict. Then the most updates count, for the others are lacking for good.
    """
    names = parts[0].keys()
    if any(each.keys() != names for each in parts):
        return _JoinedSpan(position, position + 1, {}, {})
    longest = max(parts, key=lambda each: float(each.get("step", 0.0)))
    return _JoinedSpan(
        position,
        position + 1,
        {name: longest[name].item() for name in names if name in SCALARS},
        {name: [each[name] for each in parts] for name in names if name not in SCALARS},
    )
