"""Elements go from one placement to another, each to its place."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pswire.checkpoint.recut import Recut, Run
from pswire.placement import Placement, place
from pswire.schema import ElementType, ModelSchema, SchemaEntry

checked = settings(derandomize=True, deadline=None, max_examples=60)


def schema_of(*sizes: int) -> ModelSchema:
    return ModelSchema(
        tuple(
            SchemaEntry(
                name=str(position),
                shape=(size,),
                element_type=(ElementType.FLOAT32, ElementType.FLOAT16)[
                    position % 3 // 2
                ],
            )
            for position, size in enumerate(sizes)
        )
    )


def contents(placement: Placement) -> dict[int, list[tuple[int, int]]]:
    """Which element of which entry each element of each chunk is."""
    return {
        chunk.index: [
            (piece.entry_index, element)
            for piece in chunk.slices
            for element in range(piece.start, piece.stop)
        ]
        for chunk in placement.chunks
    }


@checked
@given(
    sizes=st.lists(st.integers(0, 3000), min_size=1, max_size=8),
    counts=st.tuples(st.integers(1, 8), st.integers(1, 8)),
    chunk_bytes=st.tuples(*[st.sampled_from([0, 4096, 8192, 65536])] * 2),
)
def test_every_element_comes_from_where_it_was(
    sizes: list[int], counts: tuple[int, int], chunk_bytes: tuple[int, int]
) -> None:
    schema = schema_of(*sizes)
    old, new = (
        place(schema, count, size)
        for count, size in zip(counts, chunk_bytes, strict=True)
    )
    held, wanted = contents(old), contents(new)

    recut = Recut(old)
    for chunk in new.chunks:
        runs = list(recut.runs(chunk))
        got = [
            held[run.chunk_index][run.start + offset]
            for run in runs
            for offset in range(run.element_count)
        ]
        assert got == wanted[chunk.index]
        for run in runs:
            check_slices(run, old, new, chunk.index)
        starts = itertools.accumulate((r.element_count for r in runs), initial=0)
        assert [run.new_start for run in runs] == list(starts)[: len(runs)]


def check_slices(run: Run, old: Placement, new: Placement, new_index: int) -> None:
    before = old.chunks[run.chunk_index]
    after = new.chunks[new_index]
    piece = before.slices[run.slice_index]
    start = sum(each.element_count for each in before.slices[: run.slice_index])
    assert start <= run.start
    assert run.start + run.element_count <= start + piece.element_count
    assert after.slices[run.new_slice_index].entry_index == piece.entry_index
    assert before.element_type == after.element_type


@pytest.mark.parametrize("count", [1, 2, 5])
def test_the_same_placement_has_one_run_for_each_slice(count: int) -> None:
    placement = place(schema_of(10, 5000, 3), count)
    recut = Recut(placement)

    for chunk in placement.chunks:
        runs = list(recut.runs(chunk))
        assert [run.chunk_index for run in runs] == [chunk.index] * len(chunk.slices)
        assert [run.slice_index for run in runs] == list(range(len(chunk.slices)))
