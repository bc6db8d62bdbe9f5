"""Residuals by chunk and by tensor, whichever slices of a chunk a push has."""

import pytest
import torch

from pswire.placement import Slice
from psworker.tensors.push_compression import ResidualStore

A, B, B_REST = Slice(0, 0, 3), Slice(1, 0, 2), Slice(1, 2, 4)
"""Chunk 0 holds all of tensor 0 and half of tensor 1, chunk 1 the other half."""


@pytest.fixture
def store() -> ResidualStore:
    return ResidualStore([3, 4], {})


def put(
    store: ResidualStore, chunk: int, pieces: tuple[Slice, ...], *of: float
) -> None:
    memory = store.memory(chunk, len(of))
    memory.copy_(torch.tensor(of))
    store.put(chunk, pieces, memory)


def found(store: ResidualStore, chunk: int, *pieces: Slice) -> list[float] | None:
    known = store.of(chunk, pieces)
    return None if known is None else known.tolist()


def saved(store: ResidualStore) -> dict[int, list[float]]:
    return {entry: each.tolist() for entry, each in store.by_entry().items()}


def test_slices_that_come_again_have_what_was_put(store: ResidualStore) -> None:
    assert found(store, 0, A, B) is None
    put(store, 0, (A, B), 1, 2, 3, 4, 5)

    assert found(store, 0, A, B) == [1, 2, 3, 4, 5]
    assert found(store, 1, B_REST) is None
    assert saved(store) == {0: [1, 2, 3], 1: [4, 5, 0, 0]}


def test_a_slice_that_does_not_come_keeps_what_it_had(store: ResidualStore) -> None:
    put(store, 0, (A, B), 1, 2, 3, 4, 5)
    put(store, 1, (B_REST,), 6, 7)

    assert found(store, 0, A) == [1, 2, 3]
    put(store, 0, (A,), 8, 8, 8)

    assert found(store, 0, A, B) == [8, 8, 8, 4, 5]
    assert found(store, 0, B) == [4, 5]
    put(store, 0, (B,), 9, 9)
    assert found(store, 0, A, B) == [8, 8, 8, 9, 9]
    assert saved(store) == {0: [8, 8, 8], 1: [9, 9, 6, 7]}


def test_it_goes_on_from_what_was_saved(store: ResidualStore) -> None:
    put(store, 0, (A, B), 1, 2, 3, 4, 5)

    other = ResidualStore([3, 4], store.by_entry())

    assert found(other, 0, A, B) == [1, 2, 3, 4, 5]
    assert found(other, 1, B_REST) == [0, 0]
    put(other, 0, (A, B), 0, 0, 0, 0, 1)
    assert saved(other) == {0: [0, 0, 0], 1: [0, 1, 0, 0]}


def test_memory_takes_turns_and_is_held_once() -> None:
    whole = ResidualStore([3, 4], {0: torch.ones(3), 1: torch.ones(4)})
    for _ in range(4):
        put(whole, 0, (A, B), 1, 2, 3, 4, 5)
        put(whole, 1, (B_REST,), 6, 7)
    assert whole.byte_count == 2 * 7 * 4

    spare = whole.memory(0, 5)
    assert whole.byte_count == 7 * 4 + 2 * 4
    whole.give_back(0, spare)
    assert whole.memory(0, 5) is spare
    assert whole.memory(1, 99).numel() == 99
