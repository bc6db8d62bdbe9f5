import asyncio
from collections.abc import Callable, Sequence

import pytest

from pswire import failpoints
from pswire.frames import REQUEST_CHUNK_FIELD, encode_chunk, encode_shared_chunk
from pswire.leased_data import DataRange
from pswire.limits import CHUNK_BYTES_MAX
from pswire.membership import WorkerKey
from pswire.shared_memory.segments import SharedRun
from pswire.v1 import parameter_service_pb2
from psworker.member import outgoing_push
from psworker.member.outgoing_push import OutgoingPush, requests_with_failpoints
from psworker.transport.values import PushHeader, PushTrailer

HEADER = PushHeader(
    job_id="job",
    optimizer="optimizer",
    worker=WorkerKey("w0", 2),
    generation=3,
    sequence=4,
    sequence_unacknowledged_min=4,
    clock=9,
)
TRAILER = PushTrailer(
    weight=32.0,
    groups=((0.1, 0.9), (0.2, 0.0)),
    is_finite=True,
    ranges=(DataRange("loader", 1, 64, 96),),
)


def push_of(
    bitmap: tuple[bool, ...],
    indexes: Sequence[int],
    notify: Callable[[asyncio.Event], None] = asyncio.Event.set,
) -> OutgoingPush:
    return OutgoingPush(
        HEADER,
        TRAILER,
        shard_incarnation=5,
        chunk_bitmap=bitmap,
        chunk_indexes=indexes,
        notify=notify,
    )


async def awaited(
    count: int,
) -> tuple[OutgoingPush, list[asyncio.Event], "asyncio.Task[bytes]"]:
    """A push of so many chunks, what is told of them, and who waits for the first."""
    told: list[asyncio.Event] = []
    push = push_of((True,) * count, range(count), told.append)
    first = asyncio.ensure_future(anext(push.requests(frozenset())))
    await asyncio.sleep(0)  # it waits for a chunk
    return push, told, first


def chunk(index: int, size: int = 16) -> bytes:
    return encode_chunk(
        REQUEST_CHUNK_FIELD, index=index, presence=b"\x01", data=bytes(size)
    )


async def sent(
    push: OutgoingPush, held: frozenset[int] = frozenset()
) -> list[parameter_service_pb2.PushPullRequest]:
    return [
        parameter_service_pb2.PushPullRequest.FromString(message)
        async for message in push.requests(held)
    ]


async def test_a_small_push_is_one_message_with_all_fields() -> None:
    push = push_of((True, False), [6])
    push.append(6, chunk(6), 16)

    (message,) = await sent(push)

    assert message.header.worker.worker_id == "w0"
    assert message.header.worker.incarnation == 2
    assert (message.header.sequence, message.header.clock) == (4, 9)
    assert message.header.shard_incarnation == 5
    assert message.trailer.weight == 32.0
    assert message.trailer.finite
    assert list(message.trailer.groups[1].values) == [0.2, 0.0]
    assert message.trailer.chunk_bitmap == b"\x01"
    assert message.trailer.ranges[0].stop == 96
    assert message.chunk.index == 6


async def test_large_chunks_follow_the_header_in_their_order() -> None:
    push = push_of((True, True), [2, 0])
    push.append(2, chunk(2, 1 << 20), 1 << 20)
    push.append(0, chunk(0, 1 << 20), 1 << 20)

    messages = await sent(push)

    assert [message.HasField("header") for message in messages] == [True, False, False]
    assert [message.HasField("trailer") for message in messages] == [True, False, False]
    assert [message.chunk.index for message in messages[1:]] == [2, 0]


async def test_chunks_are_sent_as_they_are_made() -> None:
    push = push_of((True, True), [1, 0])
    push.append(1, chunk(1), 16)
    requests = push.requests(frozenset())

    await anext(requests)
    second = asyncio.ensure_future(anext(requests))
    await asyncio.sleep(0)
    assert not second.done()
    push.append(0, chunk(0), 16)

    message = parameter_service_pb2.PushPullRequest.FromString(await second)
    assert message.chunk.index == 0
    assert [each async for each in requests] == []


async def test_of_shared_memory_several_chunks_are_told_at_a_time() -> None:
    push, told, first = await awaited(6)

    counts = []
    for index in range(6):
        push.append(index, shared(index), 1 << 20)
        counts.append(len(told))
    told[0].set()

    assert counts == [0, 0, 0, 1, 1, 2]
    message = parameter_service_pb2.PushPullRequest.FromString(await first)
    assert [each.index for each in message.shared_chunks] == list(range(6))


async def test_what_is_told_at_a_time_has_a_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(outgoing_push, "REFERENCES_BYTES_MAX", 2 * len(shared(1)))
    push = push_of((False, *(True,) * 5), range(1, 6))
    for index in range(1, 6):
        push.append(index, shared(index), 16)

    messages = [
        parameter_service_pb2.PushPullRequest.FromString(each)
        async for each in push.requests(frozenset())
    ]

    assert indexes_of(messages) == [[1, 2], [3, 4], [5]]


async def test_of_large_chunks_in_shared_memory_each_is_told_by_itself() -> None:
    push, told, first = await awaited(3)

    counts = []
    for index in range(3):
        push.append(index, shared(index), CHUNK_BYTES_MAX)
        counts.append(len(told))
    told[0].set()

    assert counts == [1, 2, 3]
    message = parameter_service_pb2.PushPullRequest.FromString(await first)
    assert indexes_of([message]) == [[0, 1, 2]]


async def test_a_chunk_with_its_elements_is_told_of_at_once() -> None:
    push, told, first = await awaited(6)

    push.append(0, shared(0), 16)
    assert told == []
    push.append(1, chunk(1), 16)
    assert len(told) == 1

    told[0].set()
    message = parameter_service_pb2.PushPullRequest.FromString(await first)
    assert indexes_of([message]) == [[0]]


async def test_a_resend_leaves_out_what_the_shard_holds_and_changes_no_byte() -> None:
    push = push_of((True, True, True), [4, 2, 0])
    chunks = {index: chunk(index, 100_000) for index in (4, 2, 0)}
    for index, message in chunks.items():
        push.append(index, message, 100_000)
    first = [message async for message in push.requests(frozenset())]

    again = [message async for message in push.requests(frozenset({4}))]

    assert again == [first[0], chunks[2], chunks[0]]


async def test_a_push_that_is_done_goes_again_without_chunks() -> None:
    push = push_of((True,), [3])
    push.append(3, chunk(3), 16)

    (message,) = await sent(push, push.chunk_indexes)

    assert message.HasField("trailer")
    assert not message.HasField("chunk")


async def test_what_a_shard_has_all_chunks_of_goes_again_though_none_was_built() -> (
    None
):
    """A process that takes over a group asks what became of the push of another."""
    push = push_of((True, True), (3, 4))
    async with asyncio.timeout(10):
        (message,) = await sent(push, frozenset((3, 4)))
    assert message.HasField("header")
    assert message.HasField("trailer")
    assert not message.HasField("chunk")


async def test_a_push_without_chunks_is_header_and_trailer() -> None:
    (message,) = await sent(push_of((False, False), []))

    assert message.HasField("header")
    assert message.trailer.chunk_bitmap == b"\x00"
    assert not message.HasField("chunk")


async def test_with_failpoints_the_same_is_sent_and_every_place_is_passed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    passed: list[str] = []
    monkeypatch.setattr(failpoints, "hit", passed.append)
    pushes = [push_of((True, True), [0, 1]), push_of((True,), [2])]
    for push, indexes in zip(pushes, ((0, 1), (2,)), strict=True):
        for index in indexes:
            push.append(index, chunk(index), 16)

    for shard_index, push in enumerate(pushes):
        plain = [message async for message in push.requests(frozenset())]
        told = requests_with_failpoints(pushes, shard_index, frozenset())
        assert [message async for message in told] == plain

    assert passed == [
        *("worker.chunk_sent", "worker.chunk_sent", "worker.push_sent"),
        *("worker.chunk_sent", "worker.push_sent", "worker.in_barrier"),
    ]


async def test_a_push_of_one_small_chunk_can_go_at_once() -> None:
    push = push_of((True, False), [6])
    assert push.whole_message is None  # the chunk is not made yet
    push.append(6, chunk(6), 16)

    whole = push.whole_message

    assert whole is not None
    assert [whole] == [message async for message in push.requests(frozenset())]
    nothing = push_of((False, False), []).whole_message
    assert nothing is not None
    message = parameter_service_pb2.PushPullOnceRequest.FromString(nothing)
    assert message.HasField("trailer")
    assert not message.HasField("chunk")


def test_a_push_that_is_large_or_of_several_chunks_does_not_go_at_once() -> None:
    large, several = push_of((True,), [6]), push_of((True, True), [6, 7])
    large.append(6, chunk(6, 64 << 10), 64 << 10)
    for index in (6, 7):
        several.append(index, chunk(index), 16)

    assert large.whole_message is None
    assert several.whole_message is None


def shared(index: int) -> bytes:
    return encode_shared_chunk(
        index=index, presence=b"\x01", digest=index, shared=SharedRun(1, 16)
    )


def indexes_of(
    messages: Sequence[parameter_service_pb2.PushPullRequest],
) -> list[list[int]]:
    return [
        [chunk.index for chunk in message.shared_chunks]
        or ([message.chunk.index] if message.HasField("chunk") else [])
        for message in messages
    ]


async def test_chunks_in_shared_memory_share_a_message() -> None:
    push = push_of((True,) * 6, range(6))
    for index in (5, 4, 3):
        push.append(index, shared(index), 16)
    push.append(2, chunk(2, 1 << 20), 1 << 20)
    for index in (1, 0):
        push.append(index, shared(index), 16)

    messages = await sent(push)

    assert indexes_of(messages) == [[5, 4, 3], [2], [1, 0]]
    assert messages[0].header.sequence == 4
    assert messages[0].trailer.weight == 32.0


async def test_chunks_in_shared_memory_that_a_shard_has_are_left_out() -> None:
    push = push_of((True,) * 4, range(4))
    for index in (3, 2, 1, 0):
        push.append(index, shared(index), 16)

    messages = await sent(push, frozenset({3, 1}))

    assert indexes_of(messages) == [[2, 0]]
    assert messages[0].header.sequence == 4


async def test_chunks_go_in_messages_to_a_shard_that_lost_the_memory() -> None:
    push = push_of((True,) * 3, range(3))
    for index in (2, 1, 0):
        push.append(index, shared(index), 16)
    contents = {shared(index): chunk(index) for index in range(3)}
    assert indexes_of(await sent(push)) == [[2, 1, 0]]

    push.in_message = contents.__getitem__
    messages = await sent(push, frozenset({1}))

    assert indexes_of(messages) == [[2], [0]]
    assert not any(message.shared_chunks for message in messages)
    assert messages[0].header.sequence == 4
