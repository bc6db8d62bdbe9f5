"""What readers of snapshots may hold of a shard's memory: places, and no image."""

import asyncio
import gc
import re
import weakref
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Final, cast

import pytest

from psserver.edge.cut_report import CutReport
from psserver.edge.limits import DEFAULT_LIMITS
from psserver.shard.core.shard_fence import Cut
from psserver.shard.rpc import parameter_service
from pswire.encodings.change import digest_of
from pswire.frames import (
    ENCODING_RAW,
    ENCODING_UNCHANGED,
    RESPONSE_CHUNK_FIELD,
    ChunkFrame,
    decode_chunk,
    split_fields,
)
from pswire.limits import PROTOCOL_VERSION, VALUES_PART_BYTES
from pswire.membership import FenceKind
from pswire.reasons import ErrorReason, Refusal
from pswire.schema import ElementType, SchemaEntry
from pswire.torch_types import buffer_of
from pswire.v1 import parameter_service_pb2 as messages
from tests.doubles.core_values import key
from tests.doubles.served_shard import ServedShard
from tests.unit.psserver.shard.rpc.conftest import Make

if TYPE_CHECKING:
    from psserver.edge.guard import Context

TIMEOUT_S = 30.0

# Three chunks, of which one takes several messages.
LARGE = (
    SchemaEntry(
        name="large",
        shape=(VALUES_PART_BYTES,),
        element_type=ElementType.FLOAT32,
    ),
    SchemaEntry(name="small", shape=(2,), element_type=ElementType.FLOAT64),
    SchemaEntry(name="steps", shape=(3,), element_type=ElementType.INT64),
)

OF_MACHINE: Final = DEFAULT_LIMITS.machine_snapshot_answers
IN_ALL: Final = DEFAULT_LIMITS.snapshot_answers


class Caller:
    """The part of a call's context that tells where it comes from."""

    def __init__(self, machine: int, port: int = 1) -> None:
        self._peer = f"ipv4:10.0.0.{machine}:{port}"

    def peer(self) -> str:
        return self._peer


def read(
    shard: ServedShard,
    *,
    machine: int = 1,
    port: int = 1,
    chunk_indexes: Sequence[int] = (),
    held_digests: Sequence[int] = (),
) -> AsyncIterator[bytes]:
    """A reader's call, of which nothing is read yet."""
    request = messages.PullSnapshotRequest(
        protocol_version=PROTOCOL_VERSION,
        job_id="job",
        snapshot_id=1,
        shard_incarnation=1,
        chunk_indexes=chunk_indexes,
        held_digests=held_digests,
    )
    context = cast("Context", Caller(machine, port))
    return shard.service.pull_snapshot(request, context)


async def cut(shard: ServedShard) -> None:
    """The shard copies its values, as snapshot 1."""
    host = shard.host
    host.prepare_fence(2, FenceKind.CUT, None)
    host.decide_cut(2, Cut(1, 0, {key("a"): 0}))
    async with asyncio.timeout(TIMEOUT_S):
        while await host.outbox.get() != CutReport(1):
            pass


async def held_by(
    shard: ServedShard, machines: Sequence[int]
) -> list[AsyncIterator[bytes]]:
    """Answers of which one message is read and no more, one to each machine named."""
    calls = [read(shard, machine=m, port=i) for i, m in enumerate(machines)]
    for call in calls:
        await asyncio.wait_for(anext(call), TIMEOUT_S)
    return calls


async def refusal_of(call: AsyncIterator[bytes]) -> Refusal:
    with pytest.raises(Refusal) as caught:
        await asyncio.wait_for(anext(call), TIMEOUT_S)
    return caught.value


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """One more reader is told at once that there is no place."""
    monkeypatch.setattr(parameter_service, "SLOT_TIMEOUT_S", 0.0)


@pytest.fixture
async def shard(make: Make) -> ServedShard:
    made = make(entries=LARGE)
    made.start(["a"])
    await cut(made)
    return made


async def test_a_snapshot_comes_whole_and_in_parts(shard: ServedShard) -> None:
    found: dict[int, bytearray] = {}
    async for message in read(shard):
        ((field, view),) = split_fields(message)
        assert field == RESPONSE_CHUNK_FIELD
        frame = decode_chunk(view)
        found.setdefault(frame.index, bytearray()).extend(frame.data)

    image = shard.host.images.image(1)
    chunks = shard.host.model.chunks
    assert {i: bytes(data) for i, data in found.items()} == {
        chunk.index: bytes(buffer_of(image[chunk.index].values)) for chunk in chunks
    }


async def frames_of(call: AsyncIterator[bytes]) -> list[ChunkFrame]:
    return [decode_chunk(split_fields(message)[0][1]) async for message in call]


async def test_what_a_reader_has_is_not_sent(shard: ServedShard) -> None:
    image = shard.host.images.image(1)
    indexes = [chunk.index for chunk in shard.host.model.chunks]
    digests = [digest_of(image[index].values) for index in indexes]

    same = await frames_of(read(shard, held_digests=digests))
    assert [each.index for each in same] == indexes
    assert [each.digest for each in same] == digests
    assert {each.encoding for each in same} == {ENCODING_UNCHANGED}

    *_, small, steps = indexes
    found = await frames_of(
        read(shard, chunk_indexes=[small, steps], held_digests=[1, digests[-1]])
    )
    assert [(each.index, each.encoding) for each in found] == [
        (small, ENCODING_RAW),
        (steps, ENCODING_UNCHANGED),
    ]
    assert bytes(found[0].data) == bytes(buffer_of(image[small].values))


@pytest.mark.parametrize(
    ("chunk_indexes", "digest_count", "text"),
    [
        ([99], 0, "chunk 99 is not one"),
        ([-1], 1, "chunk -1 is not one"),
        ([1, 1], 0, "2 chunks .* out of order, or twice"),
        ([1, 0], 2, "2 chunks .* out of order, or twice"),
        ([0, 1, 2, 2], 4, "4 chunks .* out of order, or twice"),
        ([], 1, "1 digests .* of shard 0"),
        ([], 1_000, "1000 digests .* of shard 0"),
        ([1], 3, "3 digests .* for 1 chunks"),
    ],
)
async def test_wrong_chunks_and_digests_are_refused(
    shard: ServedShard, chunk_indexes: list[int], digest_count: int, text: str
) -> None:
    found = await refusal_of(
        read(shard, chunk_indexes=chunk_indexes, held_digests=[7] * digest_count)
    )
    assert re.search(text, found.message)
    assert shard.host.snapshot_answers.count("10.0.0.1") == 0
    assert [message async for message in read(shard)]


async def test_an_answer_that_is_not_read_keeps_no_released_image(
    shard: ServedShard,
) -> None:
    held = await held_by(shard, [1, 1, 2])
    image = weakref.ref(shard.host.images.image(1)[0].values)
    assert image() is not None

    shard.host.release_image(1)
    async with asyncio.timeout(TIMEOUT_S):  # a thread may still have what it copied
        while image() is not None:
            gc.collect()
            await asyncio.sleep(0)
    for call in held:
        assert (await refusal_of(call)).reason is ErrorReason.SNAPSHOT_GONE
    assert shard.host.snapshot_answers.has_one("10.0.0.1")


@pytest.mark.usefixtures("impatient")
async def test_one_machine_holds_so_many_answers_and_others_read_on(
    shard: ServedShard,
) -> None:
    held = await held_by(shard, [1] * OF_MACHINE)

    found = await refusal_of(read(shard, machine=1, port=99))
    assert found.reason is ErrorReason.WAIT_TIMEOUT
    assert f"{OF_MACHINE} answers" in found.message
    assert [message async for message in read(shard, machine=2)]

    async for _ in held[0]:
        pass
    assert [message async for message in read(shard, machine=1, port=99)]


@pytest.mark.usefixtures("impatient")
async def test_all_machines_together_hold_so_many_answers(shard: ServedShard) -> None:
    machines = [i // OF_MACHINE for i in range(IN_ALL)]
    held = await held_by(shard, machines)

    found = await refusal_of(read(shard, machine=99))
    assert found.reason is ErrorReason.WAIT_TIMEOUT

    async for _ in held[0]:
        pass
    assert [message async for message in read(shard, machine=99)]


async def test_of_many_that_wait_for_one_place_one_gets_it(shard: ServedShard) -> None:
    held = await held_by(shard, [1] * OF_MACHINE)
    calls = [read(shard, machine=1, port=100 + i) for i in range(8)]
    waiting = {asyncio.ensure_future(anext(call)) for call in calls}
    await asyncio.sleep(0)
    async for _ in held[0]:
        pass

    done, others = await asyncio.wait(
        waiting, timeout=TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED
    )

    assert len(done) == 1
    assert shard.host.snapshot_answers.count("10.0.0.1") == OF_MACHINE
    for each in others:
        each.cancel()
    await asyncio.gather(*others, return_exceptions=True)


@pytest.mark.usefixtures("impatient")
async def test_readers_that_do_not_read_hold_up_no_step(shard: ServedShard) -> None:
    await held_by(shard, [1] * OF_MACHINE)

    await shard.push("a", 1).finished()

    assert shard.host.model.core.clocks.applied_clock == 1
