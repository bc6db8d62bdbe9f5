"""Which shard holds which elements: a pure, versioned function.

The model is one long vector: tensors in schema order. It is cut into chunks, runs of
elements of one type that may span several small tensors or be a part of a large one,
and each chunk goes to the shard with the fewest bytes so far. Chunks are of equal
size wherever the element type goes on, so that the rule deals them in turn: every
shard is busy at every moment of a backward pass, and loads differ by at most one
chunk. Hashing names to shards was rejected, since one large embedding then decides
the load (others' users report shards of 93.7 M parameters beside one of 0.7 M).

Both sides compute it; any change to its result is a new `PLACEMENT_VERSION`.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from pswire.limits import (
    CHUNK_BYTES_MAX,
    CHUNK_BYTES_MIN,
    CHUNK_BYTES_SMALL,
    CHUNK_COUNT_WANTED,
    CHUNK_ELEMENTS_MAX,
)
from pswire.schema import ElementType, ModelSchema


@dataclass(frozen=True, slots=True)
class Slice:
    """Elements `[start, stop)` of one tensor, counted in C order."""

    entry_index: int
    start: int
    stop: int

    @property
    def element_count(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A run of elements that travels as one message.

    Attributes:
        index: Position among all chunks of the placement.
        shard_index: Shard that holds it.
        element_type: Type of all its elements.
        slices: Its slices, in schema order. Empty tensors have no slice.
        vector_start: Where it begins in its shard's vector of that type, in elements.
    """

    index: int
    shard_index: int
    element_type: ElementType
    slices: tuple[Slice, ...]
    vector_start: int

    @property
    def element_count(self) -> int:
        return sum(piece.element_count for piece in self.slices)

    @property
    def byte_count(self) -> int:
        return self.element_count * self.element_type.byte_count


@dataclass(frozen=True)
class Placement:
    """All chunks of a job.

    Attributes:
        shard_count: Shards of the job.
        chunks: Chunks in schema order; a chunk's index is its position.
    """

    shard_count: int
    chunks: tuple[Chunk, ...]

    @cached_property
    def chunks_by_shard(self) -> tuple[tuple[Chunk, ...], ...]:
        """Chunks of each shard, in schema order."""
        held: list[list[Chunk]] = [[] for _ in range(self.shard_count)]
        for chunk in self.chunks:
            held[chunk.shard_index].append(chunk)
        return tuple(tuple(chunks) for chunks in held)

    @cached_property
    def chunks_by_entry(self) -> Mapping[int, tuple[Chunk, ...]]:
        """Chunks that hold some of each tensor; one without elements is not in it."""
        held: dict[int, list[Chunk]] = {}
        for chunk in self.chunks:
            for piece in chunk.slices:
                held.setdefault(piece.entry_index, []).append(chunk)
        return {index: tuple(chunks) for index, chunks in held.items()}

    def byte_count_of_shard(self, shard_index: int) -> int:
        """Bytes of values that a shard holds."""
        return sum(chunk.byte_count for chunk in self.chunks_by_shard[shard_index])


def place(schema: ModelSchema, shard_count: int, chunk_bytes: int = 0) -> Placement:
    """Cuts a model into chunks and deals them to shards.

    Args:
        schema: The model. Tensors without elements take part in no chunk.
        shard_count: At least 1.
        chunk_bytes: Bytes of a full chunk, as the job's settings have them; 0 for what
            suits the model. A model that is too small to give every shard one is cut
            finer.
    """
    size = _chunk_bytes(schema, shard_count, chunk_bytes)
    return _deal(_runs(schema, size), shard_count)


def shard_bytes_min(schema: ModelSchema, shard_count: int, chunk_bytes: int = 0) -> int:
    """Bytes that each shard has at least: an equal share of the model less one chunk.

    For models that may be far too large, of which `place` takes long. Its arguments.
    """
    fair = sum(entry.byte_count for entry in schema.entries) // shard_count
    return max(0, fair - _chunk_bytes(schema, shard_count, chunk_bytes))


def _runs(
    schema: ModelSchema, chunk_bytes: int
) -> Iterator[tuple[ElementType, tuple[Slice, ...]]]:
    """Cuts the model: runs of one type, full ones of `chunk_bytes`."""
    run_type: ElementType | None = None
    run: list[Slice] = []
    room = 0
    for entry_index, entry in enumerate(schema.entries):
        if entry.element_count == 0:
            continue
        if run and run_type is not None and entry.element_type != run_type:
            yield run_type, tuple(run)
            run = []
        run_type = entry.element_type
        start = 0
        while start < entry.element_count:
            if not run:
                room = min(CHUNK_ELEMENTS_MAX, chunk_bytes // run_type.byte_count)
            stop = min(entry.element_count, start + room)
            run.append(Slice(entry_index, start, stop))
            room -= stop - start
            start = stop
            if room == 0:
                yield run_type, tuple(run)
                run = []
    if run and run_type is not None:
        yield run_type, tuple(run)


def _deal(
    runs: Iterable[tuple[ElementType, tuple[Slice, ...]]], shard_count: int
) -> Placement:
    """Gives each run to the shard with the fewest bytes, the lowest if several."""
    load_bytes = [0] * shard_count
    vector_ends: dict[tuple[int, ElementType], int] = {}
    chunks: list[Chunk] = []
    for element_type, slices in runs:
        shard_index = load_bytes.index(min(load_bytes))
        chunk = Chunk(
            index=len(chunks),
            shard_index=shard_index,
            element_type=element_type,
            slices=slices,
            vector_start=vector_ends.get((shard_index, element_type), 0),
        )
        chunks.append(chunk)
        load_bytes[shard_index] += chunk.byte_count
        vector_ends[shard_index, element_type] = (
            chunk.vector_start + chunk.element_count
        )
    return Placement(shard_count=shard_count, chunks=tuple(chunks))


def _chunk_bytes(schema: ModelSchema, shard_count: int, asked: int) -> int:
    """Size of a full chunk: small enough that each shard of a small model gets one."""
    total = sum(entry.byte_count for entry in schema.entries)
    fair = -(-total // shard_count)
    size = asked or _suitable_bytes(fair)
    aligned = -(-min(size, fair) // 64) * 64
    return min(CHUNK_BYTES_MAX, max(CHUNK_BYTES_MIN, aligned))


def _suitable_bytes(fair: int) -> int:
    """Size of a full chunk when nobody says: large ones give every shard as many.

    Args:
        fair: Bytes that each shard would hold if they were dealt evenly.
    """
    size = min(CHUNK_BYTES_MAX, max(CHUNK_BYTES_SMALL, fair // CHUNK_COUNT_WANTED))
    return fair // -(-fair // size) + 1 if size > CHUNK_BYTES_SMALL else size
