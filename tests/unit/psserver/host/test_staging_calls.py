"""Who stages has one call at a time, and may not be silent."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from psserver.host import staging_calls
from psserver.host.staging_calls import StagingCall, StagingCalls
from pswire.reasons import CATALOGUE, ErrorReason, Refusal


class Requests:
    """Messages of a call, as they come."""

    def __init__(self, *messages: str) -> None:
        self.queue: asyncio.Queue[str | None] = asyncio.Queue()
        for message in messages:
            self.queue.put_nowait(message)

    async def __aiter__(self) -> AsyncIterator[str]:
        while (message := await self.queue.get()) is not None:
            yield message


def call_of(requests: Requests) -> StagingCall[str]:
    return StagingCall(aiter(requests))


def test_messages_come_in_order() -> None:
    async def run() -> None:
        requests = Requests("a", "b", "c")
        requests.queue.put_nowait(None)
        call = call_of(requests)
        assert await call.next() == "a"
        assert [message async for message in call.rest()] == ["b", "c"]
        assert await call.next() is None

    asyncio.run(run())


def test_a_silent_call_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging_calls, "SILENCE_TIMEOUT_S", 0.01)

    async def run() -> None:
        call = call_of(Requests("a"))
        assert await call.next() == "a"
        with pytest.raises(Refusal, match="silent for") as caught:
            await call.next()
        assert caught.value.reason is ErrorReason.WAIT_TIMEOUT
        assert CATALOGUE[caught.value.reason].retryable

    asyncio.run(run())


def test_a_newer_call_ends_the_one_before() -> None:
    async def run() -> None:
        calls = StagingCalls()
        older, newer, other = (call_of(Requests()) for _ in range(3))
        with (
            calls.admitted("a", older),
            calls.admitted("b", other),
            calls.admitted("a", newer),
        ):
            with pytest.raises(Refusal, match="a newer call") as caught:
                await older.next()
            assert caught.value.reason is ErrorReason.DRAINING
            for call in (newer, other):
                waiting = asyncio.ensure_future(call.next())
                await asyncio.sleep(0)
                assert not waiting.done()
                waiting.cancel()

    asyncio.run(run())


def test_one_that_waits_is_ended_at_once() -> None:
    async def run() -> None:
        calls = StagingCalls()
        older, newer = call_of(Requests()), call_of(Requests())
        with calls.admitted("a", older):
            waiting = asyncio.ensure_future(older.next())
            await asyncio.sleep(0)
            with calls.admitted("a", newer), pytest.raises(Refusal):
                await asyncio.wait_for(waiting, 5)

    asyncio.run(run())


def test_a_call_that_is_over_is_not_ended_again() -> None:
    async def run() -> None:
        calls = StagingCalls()
        older, newer = call_of(Requests("a")), call_of(Requests())
        with calls.admitted("a", older):
            pass
        with calls.admitted("a", newer):
            assert await older.next() == "a"

    asyncio.run(run())
