"""Placement against its second implementation, and what it promises."""

import hashlib
import json
import math

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pswire.limits import (
    CHUNK_BYTES_ASKED_MIN,
    CHUNK_BYTES_MAX,
    CHUNK_BYTES_MIN,
    CHUNK_BYTES_SMALL,
    CHUNK_COUNT_WANTED,
    PLACEMENT_VERSION,
)
from pswire.placement import Placement, _deal, _runs, place
from pswire.schema import ElementType, ModelSchema, SchemaEntry
from tests.doubles.dumb_placement import Element, dumb_place

checked = settings(derandomize=True, deadline=None, max_examples=200)

F32, BF16, I64 = ElementType.FLOAT32, ElementType.BFLOAT16, ElementType.INT64


def model(*tensors: tuple[tuple[int, ...], ElementType]) -> ModelSchema:
    return ModelSchema(
        tuple(
            SchemaEntry(name=f"t{position}", shape=shape, element_type=element_type)
            for position, (shape, element_type) in enumerate(tensors)
        )
    )


tensors = st.tuples(
    st.lists(st.integers(0, 6), max_size=3).map(tuple), st.sampled_from(ElementType)
)
models = st.lists(tensors, max_size=12).map(lambda drawn: model(*drawn))
shard_counts = st.integers(1, 6)
# Every size holds a whole number of the largest element, as the real ones do.
chunk_sizes = st.sampled_from([8, 16, 64, 256])


def place_small(schema: ModelSchema, shard_count: int, chunk_bytes: int) -> Placement:
    return _deal(_runs(schema, chunk_bytes), shard_count)


def elements_of(placement: Placement, chunk_index: int) -> list[Element]:
    return [
        (piece.entry_index, position)
        for piece in placement.chunks[chunk_index].slices
        for position in range(piece.start, piece.stop)
    ]


@checked
@given(models, shard_counts, chunk_sizes)
@example(model(((), F32)), 3, 8)
@example(model(((0,), F32), ((2, 0), I64)), 2, 8)
@example(model(((5,), F32), ((0,), I64), ((5,), F32)), 2, 64)
@example(model(((3,), F32), ((3,), BF16), ((3,), F32), ((3,), I64)), 2, 16)
def test_placement_equals_the_dumb_one(
    schema: ModelSchema, shard_count: int, chunk_bytes: int
) -> None:
    placement = place_small(schema, shard_count, chunk_bytes)
    expected = dumb_place(schema, shard_count, chunk_bytes)

    assert [
        (chunk.shard_index, chunk.element_type, elements_of(placement, chunk.index))
        for chunk in placement.chunks
    ] == [
        (chunk.shard_index, chunk.element_type, chunk.elements)
        for chunk in expected.chunks
    ]
    for chunk in placement.chunks:
        vector = expected.vectors[chunk.shard_index, chunk.element_type]
        stop = chunk.vector_start + chunk.element_count
        assert vector[chunk.vector_start : stop] == elements_of(placement, chunk.index)


@checked
@given(models, shard_counts, chunk_sizes)
def test_every_element_has_one_place(
    schema: ModelSchema, shard_count: int, chunk_bytes: int
) -> None:
    placement = place_small(schema, shard_count, chunk_bytes)

    placed = [
        element
        for chunk in placement.chunks
        for element in elements_of(placement, chunk.index)
    ]
    assert placed == [
        (entry_index, position)
        for entry_index, entry in enumerate(schema.entries)
        for position in range(entry.element_count)
    ]


@checked
@given(models, shard_counts, chunk_sizes)
def test_loads_differ_by_at_most_one_chunk(
    schema: ModelSchema, shard_count: int, chunk_bytes: int
) -> None:
    placement = place_small(schema, shard_count, chunk_bytes)

    loads = [placement.byte_count_of_shard(shard) for shard in range(shard_count)]
    assert max(loads) - min(loads) <= chunk_bytes
    assert sum(loads) == sum(entry.byte_count for entry in schema.entries)
    assert all(0 < chunk.byte_count <= chunk_bytes for chunk in placement.chunks)


@checked
@given(models, shard_counts, chunk_sizes)
def test_vectors_have_no_gaps(
    schema: ModelSchema, shard_count: int, chunk_bytes: int
) -> None:
    placement = place_small(schema, shard_count, chunk_bytes)

    assert [chunk.index for chunk in placement.chunks] == list(
        range(len(placement.chunks))
    )
    for chunks in placement.chunks_by_shard:
        ends: dict[ElementType, int] = {}
        for chunk in chunks:
            assert chunk.vector_start == ends.get(chunk.element_type, 0)
            ends[chunk.element_type] = chunk.vector_start + chunk.element_count


@checked
@given(st.integers(0, 3_000_000), st.integers(1, 64))
def test_no_shard_is_idle_when_there_is_a_chunk_for_each(
    element_count: int, shard_count: int
) -> None:
    schema = model(((element_count,), F32))
    placement = place(schema, shard_count)

    shards = [chunk.shard_index for chunk in placement.chunks]
    # Dealt in turn: a backward pass, which goes backwards, finds all of them busy.
    assert shards == [position % shard_count for position in range(len(shards))]
    if schema.entries[0].byte_count >= CHUNK_BYTES_MIN * shard_count:
        assert set(shards) == set(range(shard_count))


def test_a_model_smaller_than_a_chunk_is_on_one_shard() -> None:
    placement = place(model(((), F32), ((10, 3), F32), ((0,), F32), ((7,), F32)), 4)

    assert [chunk.shard_index for chunk in placement.chunks] == [0]
    assert [
        (piece.entry_index, piece.start, piece.stop)
        for piece in placement.chunks[0].slices
    ] == [(0, 0, 1), (1, 0, 30), (3, 0, 7)]
    assert [placement.byte_count_of_shard(shard) for shard in range(4)] == [
        152,
        0,
        0,
        0,
    ]


def test_a_model_without_elements_has_no_chunks() -> None:
    assert place(model(), 2).chunks == ()
    assert place(model(((3, 0), F32)), 2).chunks == ()


def test_a_tensor_above_256_mib_is_cut_into_full_chunks() -> None:
    placement = place(model(((70_000_000,), F32), ((3,), F32)), 3)

    (size,) = {chunk.byte_count for chunk in placement.chunks[:-1]}
    assert 0.98 * CHUNK_BYTES_MAX < size <= CHUNK_BYTES_MAX
    loads = [placement.byte_count_of_shard(shard) for shard in range(3)]
    assert max(loads) - min(loads) <= CHUNK_BYTES_MAX


@checked
@given(st.integers(1, 60_000_000), st.integers(1, 5))
@example(17 * 16 * 20_000 + 1, 1)
def test_large_chunks_leave_every_shard_enough_of_them(
    element_count: int, shard_count: int
) -> None:
    placement = place(model(((element_count,), F32)), shard_count)

    sizes = [chunk.byte_count for chunk in placement.chunks]
    counts = [len(chunks) for chunks in placement.chunks_by_shard]
    assert max(sizes) <= CHUNK_BYTES_MAX
    if max(sizes) > CHUNK_BYTES_SMALL:
        assert min(counts) == max(counts) >= CHUNK_COUNT_WANTED
        assert max(sizes) - min(sizes) < 65 * len(sizes)  # whole cache lines


@pytest.mark.parametrize(
    ("byte_count", "shard_count", "full", "last"),
    [
        # Nothing is made even where chunks are not larger than for a small model.
        (8 << 20, 1, [1 << 20] * 7, 1 << 20),
        ((8 << 20) + 4, 1, [1 << 20] * 8, 4),
        # What divides evenly still ends with a smaller one, never with an extra one.
        (10 << 20, 1, [1_310_784] * 7, 1_310_272),
        # A remainder of an eighth makes 9, and what they leave none more.
        (9 * 64 * 20_000 + 4, 1, [1_280_064] * 8, 1_279_492),
        (2 * 9 * 64 * 20_000 + 4, 2, [1_280_064] * 17, 1_278_916),
        # From 30 MiB on there are as many as the largest size asks for.
        (30 << 20, 1, [CHUNK_BYTES_MAX] * 7, CHUNK_BYTES_MAX),
        ((30 << 20) + 4, 1, [3_495_296] * 8, 3_494_916),
    ],
)
def test_chunks_of_a_shard_are_made_even(
    byte_count: int, shard_count: int, full: list[int], last: int
) -> None:
    """See docs/decisions/0011."""
    placement = place(model(((byte_count // 4,), F32)), shard_count)

    assert [chunk.byte_count for chunk in placement.chunks] == [*full, last]


@checked
@given(
    st.integers(0, 3_000_000),
    st.integers(1, 64),
    st.integers(CHUNK_BYTES_ASKED_MIN >> 10, CHUNK_BYTES_MAX >> 10),
)
@example(3_000_000, 1, 64)
@example(3_000_000, 3, CHUNK_BYTES_MAX >> 10)
@example(16_385, 2, 64)
def test_chunks_have_the_size_that_was_asked_for(
    element_count: int, shard_count: int, chunk_kib: int
) -> None:
    schema = model(((element_count,), F32), ((3,), F32))
    placement = place(schema, shard_count, chunk_kib << 10)

    *full, last = [chunk.byte_count for chunk in placement.chunks]
    fair = sum(entry.byte_count for entry in schema.entries) / shard_count
    if fair >= chunk_kib << 10:
        assert set(full) <= {chunk_kib << 10}
    else:
        assert set(full) <= {max(CHUNK_BYTES_MIN, math.ceil(fair / 64) * 64)}
    assert last <= max(CHUNK_BYTES_MIN, chunk_kib << 10)
    # No shard is idle for it.
    shards = [chunk.shard_index for chunk in placement.chunks]
    assert shards == [position % shard_count for position in range(len(shards))]
    if fair >= CHUNK_BYTES_MIN * 2:
        assert set(shards) == set(range(shard_count))


@pytest.mark.parametrize("asked", [-1, 1, CHUNK_BYTES_MAX + 1, 1 << 62])
def test_a_size_that_no_option_lets_through_is_brought_into_bounds(asked: int) -> None:
    placement = place(model(((2_000_000,), F32)), 1, asked)
    sizes = {chunk.byte_count for chunk in placement.chunks[:-1]}
    assert sizes <= {CHUNK_BYTES_MIN, CHUNK_BYTES_MAX}


def test_many_tiny_tensors_share_chunks() -> None:
    placement = place(model(*[((3,), F32)] * 2_000), 2)

    assert [chunk.byte_count for chunk in placement.chunks] == [12_032, 11_968]
    assert sum(len(chunk.slices) for chunk in placement.chunks) == 2_001


@pytest.mark.parametrize("shard_count", [1, 2, 7])
def test_a_tensor_without_elements_does_not_end_a_chunk(shard_count: int) -> None:
    with_empty = place(model(((9,), F32), ((0,), I64), ((9,), F32)), shard_count)
    assert len(with_empty.chunks) == 1


def test_the_result_is_that_of_its_version() -> None:
    """Both sides must cut alike: a change here needs a new `PLACEMENT_VERSION`."""
    schema = model(
        ((1000, 1000), F32),
        ((1000,), F32),
        ((), I64),
        ((300, 7), BF16),
        ((0,), F32),
        ((2_000_003,), BF16),
        ((5,), F32),
        ((20_000_000,), F32),
    )
    described = [
        [
            [chunk.shard_index, chunk.vector_start, int(chunk.element_type)],
            [[piece.entry_index, piece.start, piece.stop] for piece in chunk.slices],
        ]
        for shard_count in (1, 2, 3, 5)
        for chunk in place(schema, shard_count).chunks
    ]
    digest = hashlib.sha256(json.dumps(described).encode()).hexdigest()
    assert (PLACEMENT_VERSION, digest[:16]) == (3, "39307594c465a6f6")
