"""Shard vectors: one tensor for each type, chunks and slices as views of it."""

import os
import sys

import pytest
import torch

from psserver.shard.tensors.shard_vectors import ShardVectors, present_runs
from pswire.placement import Chunk, Placement, Slice, place
from pswire.reasons import ErrorReason, Refusal
from pswire.schema import ElementType, ModelSchema, SchemaEntry
from pswire.torch_types import buffer_of
from tests.doubles.resident_memory import resident_of
from tests.refusals import refused

F32, BF16, I64 = ElementType.FLOAT32, ElementType.BFLOAT16, ElementType.INT64


def placed(*tensors: tuple[int, ElementType], shard_count: int = 1) -> Placement:
    entries = tuple(
        SchemaEntry(name=f"t{position}", shape=(size,), element_type=element_type)
        for position, (size, element_type) in enumerate(tensors)
    )
    return place(ModelSchema(entries), shard_count)


def test_shards_hold_every_byte_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pswire.placement.CHUNK_BYTES_MIN", 64)
    monkeypatch.setattr("pswire.placement.CHUNK_BYTES_MAX", 128)
    placement = placed((100, F32), (3, I64), (70, BF16), (1, F32), shard_count=3)
    held = [ShardVectors(placement, shard_index) for shard_index in range(3)]
    assert sum(each.byte_count for each in held) == 400 + 24 + 140 + 4

    for chunk in placement.chunks:
        data = bytes((chunk.index + 1,)) * chunk.byte_count
        held[chunk.shard_index].write(chunk.index, memoryview(data))
    for chunk in placement.chunks:
        read = held[chunk.shard_index].read(chunk.index)
        assert bytes(read) == bytes((chunk.index + 1,)) * chunk.byte_count


def test_a_model_that_does_not_fit_is_told_in_words() -> None:
    element_count = 1 << 46  # beyond any address space, whatever the kernel promises
    chunk = Chunk(
        index=0,
        shard_index=0,
        element_type=F32,
        slices=(Slice(0, 0, element_count),),
        vector_start=0,
    )
    with refused(ErrorReason.LIMIT_EXCEEDED, "shard 0 has no memory for its 268,"):
        ShardVectors(Placement(shard_count=1, chunks=(chunk,)), 0)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_values_that_nobody_has_written_take_no_memory() -> None:
    """While first values are staged there are those that they replace, too."""
    before = resident_of(os.getpid()).own
    placement = placed((32 << 20, F32))
    vectors = ShardVectors(placement, 0)
    after = resident_of(os.getpid()).own

    assert vectors.byte_count == 128 << 20
    assert after - before < 16 << 20
    assert not vectors.view(placement.chunks[-1].index).any()


def test_a_view_shares_memory() -> None:
    vectors = ShardVectors(placed((4, F32)), 0)
    vectors.view(0).fill_(1.0)
    assert bytes(vectors.read(0)) == bytes(buffer_of(torch.ones(4)))


def test_present_slices_are_read_in_order_without_gaps() -> None:
    vectors = ShardVectors(placed((2, F32), (1, F32), (3, F32)), 0)
    vectors.write(0, buffer_of(torch.arange(6.0)))

    def read(*presence: bool) -> list[float]:
        data = bytearray(vectors.read(0, presence))
        return torch.frombuffer(data, dtype=torch.float32).tolist() if data else []

    assert read(True, False, True) == [0, 1, 3, 4, 5]
    assert read(False, True, False) == [2]
    assert read(True, True, True) == [0, 1, 2, 3, 4, 5]
    assert read(False, False, False) == []


def test_adjacent_present_slices_are_one_run() -> None:
    (chunk,) = placed((2, F32), (1, F32), (3, F32), (1, F32)).chunks
    assert list(present_runs(chunk, (True, True, False, True))) == [(0, 3), (6, 7)]
    assert list(present_runs(chunk, (True,) * 4)) == [(0, 7)]
    assert list(present_runs(chunk, (False,) * 4)) == []


def test_a_chunk_of_another_shard_is_refused() -> None:
    placement = placed((3000, F32), shard_count=2)
    vectors = ShardVectors(placement, 0)
    foreign = placement.chunks_by_shard[1][0].index
    for call in (vectors.read, vectors.view):
        with refused(ErrorReason.CHUNK_INVALID):
            call(foreign)


def test_a_chunk_of_another_size_is_refused_and_not_written() -> None:
    vectors = ShardVectors(placed((4, F32)), 0)
    with pytest.raises(Refusal, match="takes 16 bytes, 12 came"):
        vectors.write(0, buffer_of(torch.ones(3)))
    assert bytes(vectors.read(0)) == bytes(16)
