"""What a call is sent, in which order, and what a slow one costs."""

import pytest

from psserver.shard.core.push import Reply
from psserver.shard.host import push_session
from psserver.shard.host.push_session import QUEUED_BYTES_MAX, Outgoing, PushSession
from pswire.limits import CHUNK_BYTES_MAX
from pswire.membership import ClockChoice, Outcome
from pswire.reasons import ErrorReason, Refusal
from tests.doubles.core_values import key

REPLY = Reply(outcome=Outcome.APPLIED, generation=1, version=1, frontier=1, clock=1)
CHOICE = ClockChoice(1, (key("a"),))


def session(*, wants_values: bool = True) -> PushSession:
    return PushSession(wants_values=wants_values, opened_ms=0)


async def drained(call: PushSession) -> list[object]:
    found: list[object] = []
    while (item := await call.next(0.0)) is not None:
        found.append(item)
        if isinstance(item, Reply):
            break
    return found


async def test_chunks_go_before_the_reply_and_each_once() -> None:
    call = session()
    first, second = Outgoing(3, None, (b"three",)), Outgoing(2, None, (b"two",))
    call.put(first)
    call.put(second)
    call.finish(REPLY)
    call.put(Outgoing(3, None, (b"newer",)))

    assert await drained(call) == [first, second, REPLY]


async def test_a_chunk_that_was_sent_is_not_sent_again() -> None:
    call = session()
    first = Outgoing(3, None, (b"three",))
    call.put(first)
    assert await drained(call) == [first]

    call.put(Outgoing(3, None, (b"newer",)))

    assert await drained(call) == []


async def test_a_chunk_goes_again_once_another_mode_demands_newer_values() -> None:
    call = session()
    early, newer = Outgoing(3, None, (b"three",)), Outgoing(3, None)
    call.put(early)

    call.send_anew()
    call.put(newer)
    call.put(Outgoing(3, None))
    call.finish(REPLY)

    assert await drained(call) == [early, newer, REPLY]


async def test_staged_is_told_once_and_the_newest_only() -> None:
    call = session()
    call.put_staged(ClockChoice(1, ()))
    call.put_staged(CHOICE)

    assert await drained(call) == [CHOICE]


async def test_staged_goes_before_the_reply() -> None:
    """Other shards may wait for who hears it."""
    call = session()
    call.finish(REPLY)
    call.put_staged(CHOICE)

    assert await drained(call) == [CHOICE, REPLY]


async def test_a_failure_goes_before_everything() -> None:
    call = session()
    call.put(Outgoing(3, None, (b"three",)))
    call.fail(Refusal(ErrorReason.DRAINING, "over"))

    with pytest.raises(Refusal, match="over"):
        await call.next(0.0)


async def test_a_call_without_values_hears_only_the_reply() -> None:
    call = session(wants_values=False)
    call.put(Outgoing(3, None, (b"three",)))
    call.finish(REPLY)

    assert await drained(call) == [REPLY]


async def test_a_reader_that_does_not_read_costs_8_mib() -> None:
    call = session()
    message = bytes(QUEUED_BYTES_MAX // 4)
    for chunk_index in range(6):
        call.put(Outgoing(chunk_index, None, (message,)))

    items = await drained(call)

    kept = [item for item in items if isinstance(item, Outgoing) and item.messages]
    assert [item.chunk_index for item in kept] == [0, 1, 2, 3]
    assert items[4:] == [Outgoing(4, None), Outgoing(5, None)]


async def test_who_reads_shared_memory_is_told_where_in_as_few_messages_as_can_be() -> (
    None
):
    call = PushSession(wants_values=True, opened_ms=0, is_shared=True)
    call.put(Outgoing(5, None, (b"five",), b"at 5;"))
    call.put(Outgoing(4, None, None, b"at 4;"))
    call.put(Outgoing(3, None, (b"three",)))
    call.put(Outgoing(2, None, None, b"at 2;"))
    call.finish(REPLY)

    found = await drained(call)

    messages = [each.messages for each in found if isinstance(each, Outgoing)]
    assert messages == [(b"at 5;at 4;",), (b"three",), (b"at 2;",)]
    assert found[-1] == REPLY


async def test_who_reads_messages_is_not_told_of_shared_memory() -> None:
    call = session()
    call.put(Outgoing(5, None, (b"five",), b"at 5;"))
    call.put(Outgoing(4, None, None, b"at 4;"))

    assert await drained(call) == [Outgoing(5, None, (b"five",)), Outgoing(4, None)]


async def test_places_in_shared_memory_cost_a_slow_reader_nothing() -> None:
    call = PushSession(wants_values=True, opened_ms=0, is_shared=True)
    for index in range(100):
        call.put(Outgoing(index, None, (bytes(QUEUED_BYTES_MAX),), b"there"))

    (item,) = await drained(call)

    assert isinstance(item, Outgoing)
    assert item.messages == (100 * b"there",)


async def test_there_is_room_until_another_chunk_would_not_be_kept() -> None:
    call = session()
    largest = (bytes(CHUNK_BYTES_MAX),)
    kept = 0
    while call.has_room:
        call.put(Outgoing(kept, None, largest))
        kept += 1
    call.put(Outgoing(kept, None, largest))

    messages = [item.messages for item in await drained(call)]  # type: ignore[attr-defined]
    assert messages == [*[largest] * kept, None]
    assert call.has_room


async def test_what_is_being_sent_counts_until_the_next_is_wanted() -> None:
    call = session()
    call.put(Outgoing(0, None, (bytes(QUEUED_BYTES_MAX // 2),) * 2))
    assert isinstance(await call.next(0.0), Outgoing)

    assert not call.has_room
    assert await call.next(0.0) is None
    assert call.has_room


async def test_behind_a_chunk_that_is_encoded_when_it_is_wanted_none_is_kept() -> None:
    call = session()
    call.put(Outgoing(0, None, (b"first",)))
    call.put(Outgoing(1, None))
    assert not call.has_room
    call.put(Outgoing(2, None, (b"third",)))

    assert await drained(call) == [
        Outgoing(0, None, (b"first",)),
        Outgoing(1, None),
        Outgoing(2, None),
    ]
    assert call.has_room


async def test_what_is_told_of_shared_memory_at_a_time_has_a_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(push_session, "REFERENCES_BYTES_MAX", 6)
    call = session()
    call.is_shared = True
    for index in range(5):
        call.put(Outgoing(index, None, (b"values",), b"%03d" % index))

    sent = [item.messages for item in await drained(call) if isinstance(item, Outgoing)]

    assert sent == [(b"000001",), (b"002003",), (b"004",)]
