"""Who stages has one call at a time, may not be silent, and keeps out nobody else."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from psserver.edge import staging_calls
from psserver.edge.staging_calls import StagingCall, StagingCalls, StagingPlaces
from pswire.reasons import CATALOGUE, ErrorReason, Refusal
from tests.doubles.manual_clock import ManualClock
from tests.refusals import refused


class Requests:
    """Messages of a call, as they come."""

    def __init__(self, *messages: str) -> None:
        self.queue: asyncio.Queue[str | None] = asyncio.Queue()
        for message in messages:
            self.queue.put_nowait(message)

    async def __aiter__(self) -> AsyncIterator[str]:
        while (message := await self.queue.get()) is not None:
            yield message


def call_of(requests: Requests, silence_s: float = 30.0) -> StagingCall[str]:
    return StagingCall(aiter(requests), silence_s)


async def test_messages_come_in_order() -> None:
    requests = Requests("a", "b", "c")
    requests.queue.put_nowait(None)
    call = call_of(requests)
    assert await call.next() == "a"
    assert [message async for message in call.rest()] == ["b", "c"]
    assert await call.next() is None


async def test_a_silent_call_is_ended() -> None:
    call = call_of(Requests("a"), silence_s=0.01)
    assert await call.next() == "a"
    with pytest.raises(Refusal, match="silent for") as caught:
        await call.next()
    assert caught.value.reason is ErrorReason.WAIT_TIMEOUT
    assert CATALOGUE[caught.value.reason].retryable


async def test_a_newer_call_ends_the_one_before() -> None:
    calls = StagingCalls()
    older, newer, other = (call_of(Requests()) for _ in range(3))
    with (
        calls.admitted("a", older),
        calls.admitted("b", other),
        calls.admitted("a", newer),
    ):
        with refused(ErrorReason.DRAINING, "a newer call"):
            await older.next()
        for call in (newer, other):
            waiting = asyncio.ensure_future(call.next())
            await asyncio.sleep(0)
            assert not waiting.done()
            waiting.cancel()


async def test_one_that_waits_is_ended_at_once() -> None:
    calls = StagingCalls()
    older, newer = call_of(Requests()), call_of(Requests())
    with calls.admitted("a", older):
        waiting = asyncio.ensure_future(older.next())
        await asyncio.sleep(0)
        with calls.admitted("a", newer), pytest.raises(Refusal):
            await asyncio.wait_for(waiting, 30)


async def test_a_call_that_is_over_is_not_ended_again() -> None:
    calls = StagingCalls()
    older, newer = call_of(Requests("a")), call_of(Requests())
    with calls.admitted("a", older):
        pass
    with calls.admitted("a", newer):
        assert await older.next() == "a"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> ManualClock:
    """Nobody is waited for but when a test says so."""
    found = ManualClock()
    monkeypatch.setattr(staging_calls, "_now_s", found)
    return found


class Sender:
    """A call with a place, and what becomes of it."""

    def __init__(self, places: StagingPlaces, *messages: str) -> None:
        self.requests = Requests(*messages)
        self.call = call_of(self.requests)
        self.read: list[str] = []
        self.has_place = asyncio.Event()
        self.task = asyncio.create_task(self._send(places))

    async def _send(self, places: StagingPlaces) -> None:
        async with places.taken(self.call):
            self.has_place.set()
            self.read.append(await self.call.next() or "")
            async for message in self.call.rest():
                places.add(self.call, len(message))
                self.read.append(message)

    async def end(self) -> None:
        self.requests.queue.put_nowait(None)
        await asyncio.wait_for(self.task, 30)

    async def refused(self) -> ErrorReason:
        with pytest.raises(Refusal) as caught:
            await asyncio.wait_for(self.task, 30)
        assert CATALOGUE[caught.value.reason].retryable
        assert "ask again" in caught.value.text
        return caught.value.reason


async def settled() -> None:
    """Returns once all calls have read what there is."""
    for _ in range(20):
        await asyncio.sleep(0)


def places_for(count_max: int) -> StagingPlaces:
    return StagingPlaces(count_max=count_max, bytes_max=100, what="a model")


@pytest.mark.usefixtures("clock")
async def test_nothing_is_read_of_a_call_without_a_place() -> None:
    places = places_for(2)
    held = [Sender(places, "a"), Sender(places, "b")]
    further = Sender(places, "c")
    await settled()
    assert [sender.read for sender in held] == [["a"], ["b"]]
    assert not further.read
    assert further.requests.queue.qsize() == 1

    await held[0].end()
    await settled()
    assert further.read == ["c"]
    for sender in (held[1], further):
        await sender.end()


async def test_the_one_that_is_waited_for_longest_gives_way(clock: ManualClock) -> None:
    """Over all its messages: one that sends a little now and then is no better."""
    places = places_for(2)
    slow = Sender(places, "a")
    await settled()
    clock.now_s += staging_calls.SLOW_S
    slow.requests.queue.put_nowait("a")
    quick = Sender(places, "b")
    await settled()
    clock.now_s += staging_calls.SLOW_S / 2
    quick.requests.queue.put_nowait("b")
    await settled()

    further = Sender(places, "c")
    assert await slow.refused() is ErrorReason.DRAINING
    await settled()
    assert further.read == ["c"]
    assert quick.read == ["b", "b"]
    for sender in (quick, further):
        await sender.end()


async def test_nobody_gives_way_while_there_is_room(clock: ManualClock) -> None:
    places = places_for(2)
    slow = Sender(places, "a")
    await settled()
    clock.now_s += 25 * staging_calls.SLOW_S
    other = Sender(places, "b")
    await settled()
    for sender in (slow, other):
        await sender.end()


async def test_one_gives_way_for_one(clock: ManualClock) -> None:
    places = places_for(2)
    slow = [Sender(places, "a"), Sender(places, "b")]
    await settled()
    clock.now_s += staging_calls.SLOW_S
    further = Sender(places, "c")
    await settled()
    assert [sender.task.done() for sender in slow] == [True, False]
    await slow[0].refused()
    for sender in (slow[1], further):
        await sender.end()


async def test_each_of_many_who_wait_has_its_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also the second one, which was not the next when it came."""
    monkeypatch.setattr(staging_calls, "SLOW_S", 0.01)
    places = places_for(1)
    senders = [Sender(places, name) for name in "abc"]
    await asyncio.wait_for(senders[-1].has_place.wait(), 30)
    for sender in senders[:-1]:
        assert await sender.refused() is ErrorReason.DRAINING
    await senders[-1].end()


async def test_who_is_not_waited_for_keeps_its_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is the server that takes its time; others are told to come again."""
    monkeypatch.setattr(staging_calls, "PLACE_TIMEOUT_S", 0.02)
    monkeypatch.setattr(staging_calls, "SLOW_S", 60.0)
    places = places_for(1)
    async with places.taken(call_of(Requests())):
        further = Sender(places, "c")
        assert await further.refused() is ErrorReason.WAIT_TIMEOUT
        assert not further.read
    await Sender(places).end()  # and its turn is nobody's


@pytest.mark.usefixtures("clock")
async def test_places_are_given_in_the_order_of_coming() -> None:
    places = places_for(1)
    senders = [Sender(places, name) for name in "abcd"]
    for index, sender in enumerate(senders):
        await settled()
        assert [each.has_place.is_set() for each in senders] == [
            other <= index for other in range(len(senders))
        ]
        await sender.end()


@pytest.mark.usefixtures("clock")
async def test_one_that_hangs_up_while_it_waits_holds_up_nobody() -> None:
    places = places_for(1)
    first, second, third = (Sender(places, name) for name in "abc")
    await settled()
    second.task.cancel()
    await asyncio.gather(second.task, return_exceptions=True)
    await first.end()
    await settled()
    assert third.read == ["c"]
    await third.end()


@pytest.mark.usefixtures("clock")
async def test_so_many_wait_and_others_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(staging_calls, "WAITING_COUNT_MAX", 1)
    places = places_for(1)
    first, second, third = (Sender(places, name) for name in "abc")
    assert await third.refused() is ErrorReason.WAIT_TIMEOUT
    for sender in (first, second):
        await sender.end()


@pytest.mark.usefixtures("clock")
async def test_beyond_the_bytes_the_newest_gives_way_and_the_oldest_is_done() -> None:
    places = places_for(3)
    senders = [Sender(places, "first", "x" * 45) for _ in range(2)]
    await settled()
    assert places.byte_count == 90
    senders[0].requests.queue.put_nowait("y" * 45)
    await settled()

    assert await senders[1].refused() is ErrorReason.DRAINING
    assert places.byte_count == 90
    await senders[0].end()
    assert senders[0].read == ["first", "x" * 45, "y" * 45]
    assert places.byte_count == 0


async def test_beyond_the_bytes_the_slow_gives_way_first(clock: ManualClock) -> None:
    places = places_for(3)
    slow = Sender(places, "first", "x" * 60)
    await settled()
    clock.now_s += staging_calls.SLOW_S
    newest = Sender(places, "first", "y" * 60)

    assert await slow.refused() is ErrorReason.DRAINING
    await newest.end()
    assert newest.read == ["first", "y" * 60]


@pytest.mark.usefixtures("clock")
async def test_a_first_message_is_covered_by_its_place() -> None:
    """A model of one message is taken whatever else is under way."""
    places = places_for(2)
    large = Sender(places, "first", "x" * 100)
    small = Sender(places, "y" * 100)
    await settled()
    for sender in (small, large):
        await sender.end()
    assert small.read == ["y" * 100]
