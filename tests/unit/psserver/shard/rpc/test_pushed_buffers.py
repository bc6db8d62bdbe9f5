"""Values of buffers on their way through a shard: with any push, back to all."""

from collections.abc import AsyncIterator, Mapping
from typing import Final

import pytest

from pswire.membership import Mode, StepAtomicity
from pswire.reasons import ErrorReason, Refusal
from pswire.schema import ElementType, EntryKind, SchemaEntry
from pswire.v1 import push_pb2
from tests.doubles.served_shard import OpenPush, ServedShard
from tests.refusals import refused

# Each is a chunk of its own, since types differ.
WEIGHT, RUNNING, COUNT = 0, 1, 2
ENTRIES: Final = (
    SchemaEntry(name="weight", shape=(4,), element_type=ElementType.FLOAT32),
    SchemaEntry(
        name="running",
        shape=(2,),
        element_type=ElementType.FLOAT64,
        kind=EntryKind.BUFFER,
    ),
    SchemaEntry(
        name="count",
        shape=(3,),
        element_type=ElementType.INT64,
        kind=EntryKind.BUFFER,
    ),
)
AVERAGED: Final = bytes([0b01])


@pytest.fixture
async def shard() -> AsyncIterator[ServedShard]:
    with ServedShard(ENTRIES) as shard:
        yield shard


def push(
    shard: ServedShard,
    name: str,
    values: Mapping[int, float],
    *,
    sequence: int = 1,
    weight: float = 1,
    averaged: bytes = AVERAGED,
) -> OpenPush:
    call = OpenPush(shard)
    trailer = shard.trailer(values, weight=weight, averaged_buffers=averaged)
    call.send(shard.header(name, sequence) + trailer)
    for chunk_index, value in values.items():
        call.send(shard.chunk(chunk_index, value))
    return call


async def test_a_clock_of_bsp_gives_the_buffers_to_all(shard: ServedShard) -> None:
    shard.start("ab")
    calls = [
        push(shard, "a", {WEIGHT: 1, RUNNING: 4, COUNT: 5}, weight=3),
        push(shard, "b", {RUNNING: 8}),
    ]
    for call in calls:
        assert (await call.finished()).outcome == push_pb2.OUTCOME_APPLIED
        assert sorted(call.values) == [(WEIGHT, 0.625), (RUNNING, 5), (COUNT, 5)]


async def test_asp_tells_what_is_averaged_by_its_bits(shard: ServedShard) -> None:
    shard.start("abcd", mode=Mode.ASP)
    first = push(shard, "a", {RUNNING: 9, COUNT: 9})
    await first.finished()
    # The seed is ones: 1 + (9 - 1) / 4. What nobody pushes comes as well, if it may.
    assert sorted(first.values) == [(WEIGHT, 1), (RUNNING, 3), (COUNT, 9)]

    second = push(shard, "b", {RUNNING: 9}, averaged=b"")
    await second.finished()
    assert (RUNNING, 9) in second.values


async def test_asp_brings_no_buffers_that_nobody_has_pushed(shard: ServedShard) -> None:
    shard.start("ab", mode=Mode.ASP)
    call = push(shard, "a", {WEIGHT: 1})
    await call.finished()
    assert call.values == [(WEIGHT, 0.5)]


async def test_two_phase_steps_take_buffers_with_the_commit() -> None:
    with ServedShard(ENTRIES, step_atomicity=StepAtomicity.CLOCK) as shard:
        shard.start("a")
        call = push(shard, "a", {WEIGHT: 1, RUNNING: 4})
        await call.until_staged()
        assert call.values == []
        assert await shard.commit("a", 1, "a")
        await call.finished()
        assert sorted(call.values) == [(WEIGHT, 0.5), (RUNNING, 4)]


@pytest.mark.parametrize("bits", [bytes([0b100]), bytes(2)])
async def test_bits_for_other_buffers_than_there_are_are_refused(
    shard: ServedShard, bits: bytes
) -> None:
    shard.start("a")
    with pytest.raises(Refusal) as caught:
        await push(shard, "a", {RUNNING: 4}, averaged=bits).finished()
    assert caught.value.reason == ErrorReason.MALFORMED_MESSAGE
    assert "2 bits" in caught.value.message or "the 2 that" in caught.value.message
    good = push(shard, "a", {RUNNING: 4})
    assert (await good.finished()).outcome == push_pb2.OUTCOME_APPLIED


async def test_a_resent_push_is_given_the_buffers_again(shard: ServedShard) -> None:
    shard.start("a")
    await push(shard, "a", {RUNNING: 4}).finished()
    again = push(shard, "a", {RUNNING: 4})
    await again.until_values(2)
    assert sorted(again.values) == [(WEIGHT, 1), (RUNNING, 4)]


@pytest.mark.parametrize("mode", [Mode.BSP, Mode.ASP])
async def test_a_step_has_no_values_of_what_is_trained(
    shard: ServedShard, mode: Mode
) -> None:
    """They would replace the job's, and no norm or rule of aggregation sees them."""
    shard.start("a", mode=mode)
    call = OpenPush(shard)
    header = shard.header("a", 1, value_entries=bytes([1 << WEIGHT]))
    call.send(header + shard.trailer([WEIGHT]))
    call.send(shard.chunk(WEIGHT, 1e9))
    with refused(ErrorReason.MALFORMED_MESSAGE, "a step has values of tensor 0"):
        await call.finished()
    good = push(shard, "a", {WEIGHT: 1})
    await good.finished()
    assert good.values == [(WEIGHT, 0.5)]
