"""Places in segments of shared memory: apart from each other, and within it."""

from itertools import pairwise

import pytest

from pswire.placement import Placement, place
from pswire.reasons import ErrorReason, Refusal
from pswire.schema import ElementType, ModelSchema, SchemaEntry
from pswire.shared_memory.segments import (
    CHUNK_ALIGNMENT_BYTES,
    HEADER_BYTES,
    SHARED_BYTES_MIN,
    GradientLayout,
    SegmentHeader,
    SegmentKind,
    ValuesLayout,
    is_worth_sharing,
)
from tests.refusals import refused


def placement(shard_count: int = 2) -> Placement:
    sizes = {"a": 700_001, "b": 13, "c": 400_000, "d": 1}
    types = [ElementType.FLOAT32, ElementType.BFLOAT16] * 2
    entries = zip(sizes.items(), types, strict=True)
    return place(
        ModelSchema(
            tuple(
                SchemaEntry(name=name, shape=(size,), element_type=element_type)
                for (name, size), element_type in entries
            )
        ),
        shard_count,
    )


@pytest.mark.parametrize("shard_index", [0, 1])
def test_chunks_of_a_gradient_lie_apart(shard_index: int) -> None:
    placed = placement()
    layout = GradientLayout.of(placed, shard_index)

    runs = [
        layout.run(chunk.index, chunk.byte_count)
        for chunk in placed.chunks_by_shard[shard_index]
    ]

    assert runs[0].start >= HEADER_BYTES
    assert all(run.start % CHUNK_ALIGNMENT_BYTES == 0 for run in runs)
    assert all(first.stop <= second.start for first, second in pairwise(runs))
    assert runs[-1].stop <= layout.byte_count


@pytest.mark.parametrize("shard_index", [0, 1])
def test_values_lie_behind_their_table(shard_index: int) -> None:
    placed = placement()
    chunks = placed.chunks_by_shard[shard_index]
    layout = ValuesLayout.of(placed, shard_index)

    runs = sorted((layout.runs[chunk.index] for chunk in chunks), key=lambda r: r.start)

    assert layout.table.start >= HEADER_BYTES
    assert layout.table.stop <= runs[0].start
    assert sorted(layout.entries.values()) == list(range(len(chunks)))
    assert layout.table.stop - layout.table.start == 8 * len(chunks)
    assert all(first.stop <= second.start for first, second in pairwise(runs))
    assert runs[-1].stop <= layout.byte_count
    for chunk in chunks:
        run = layout.runs[chunk.index]
        assert run.stop - run.start == chunk.byte_count
        start = layout.vector_starts[chunk.element_type]
        offset = chunk.vector_start * chunk.element_type.byte_count
        assert run.start == start + offset


def test_more_bytes_than_a_chunk_has_are_refused() -> None:
    placed = placement()
    chunk = placed.chunks_by_shard[0][0]

    with refused(
        ErrorReason.CHUNK_INVALID,
        match=f"{chunk.byte_count + 1} bytes of chunk {chunk.index} are said to be in "
        f"shared memory, where it has room for {chunk.byte_count}",
    ):
        GradientLayout.of(placed, 0).run(chunk.index, chunk.byte_count + 1)


@pytest.mark.parametrize("other", [-1, 10**6, None])
def test_a_chunk_of_another_shard_has_no_place(other: int | None) -> None:
    placed = placement()
    index = placed.chunks_by_shard[1][0].index if other is None else other

    with pytest.raises(Refusal, match=f"chunk {index} has no place in this shard's"):
        GradientLayout.of(placed, 0).run(index, 1)


def test_a_header_is_known_by_every_part_of_it() -> None:
    header = SegmentHeader(SegmentKind.VALUES, 7, 4096)
    data = header.pack() + bytes(100)

    assert header.is_at_start_of(data)
    assert not header.is_at_start_of(bytes(100))
    assert not header.is_at_start_of(b"")
    for other in (
        SegmentHeader(SegmentKind.GRADIENT, 7, 4096),
        SegmentHeader(SegmentKind.VALUES, 8, 4096),
        SegmentHeader(SegmentKind.VALUES, 7, 4097),
    ):
        assert not other.is_at_start_of(data)


def test_small_chunks_go_in_messages() -> None:
    assert is_worth_sharing(SHARED_BYTES_MIN)
    assert not is_worth_sharing(SHARED_BYTES_MIN - 1)
