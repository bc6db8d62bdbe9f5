"""Where things lie in the memory of a host group, and who adds what."""

import random

import pytest

from pswire.schema import ElementType, EntryKind, ModelSchema, SchemaEntry
from psworker.backends.host.layout import HostLayout, share_out


def schema(*sizes: int, buffers: int = 0) -> ModelSchema:
    types = (ElementType.FLOAT32, ElementType.FLOAT64, ElementType.BFLOAT16)
    return ModelSchema(
        tuple(
            SchemaEntry(
                model="model",
                name=f"p{index}",
                shape=(size,),
                element_type=types[index % 3],
                kind=EntryKind.PARAMETER
                if index < len(sizes) - buffers
                else EntryKind.BUFFER,
            )
            for index, size in enumerate(sizes)
        )
    )


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_shares_hold_every_present_element_once_and_are_about_as_large(
    count: int,
) -> None:
    draw = random.Random(count)
    model = schema(*(draw.choice([0, 1, 5, 1_000, 30_000]) for _ in range(40)))
    presence = [draw.random() < 0.8 for _ in model.entries]
    shares = share_out(model, presence, count)
    found = sorted(run for share in shares for run in share)
    at: dict[int, int] = {}
    for index, start, stop in found:
        assert presence[index]
        assert start == at.get(index, 0)
        at[index] = stop
    wanted = {
        index: entry.element_count
        for index, entry in enumerate(model.entries)
        if presence[index] and entry.element_count
    }
    assert at == wanted
    sizes = [
        sum(
            (r.stop - r.start) * model.entries[r.entry_index].element_type.byte_count
            for r in share
        )
        for share in shares
    ]
    assert max(sizes) - min(sizes) <= 64 * 8 * 2


def test_buffers_are_not_cut() -> None:
    shares = share_out(schema(10, 4_000, 5_000, buffers=2), [True] * 3, 3)
    runs = [run for share in shares for run in share if run.entry_index > 0]
    assert [(run.start, run.stop) for run in runs] == [(0, 4_000), (0, 5_000)]


def test_areas_do_not_overlap() -> None:
    model = schema(3, 0, 100)
    layout = HostLayout.of(model)
    starts = (*layout.gradients, *layout.shares, *layout.values, layout.byte_count)
    sizes = [entry.byte_count for entry in model.entries] * 3
    assert all(
        a + size <= b for a, size, b in zip(starts, sizes, starts[1:], strict=False)
    )
    assert all(start % 64 == 0 for start in starts)
