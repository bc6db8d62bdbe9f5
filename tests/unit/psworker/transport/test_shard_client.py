"""Small pushes on one call, to a server that does what each push says."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import grpc.aio
import pytest

from psserver.edge.guard import Context, abort
from pswire.reasons import ErrorReason, Refusal
from psworker.transport.calls import CallError
from psworker.transport.shard_client import WholePushes

TIMEOUT_S = 30.0


class Server:
    """Answers each push by itself, but for those that say otherwise.

    Attributes:
        call_count: Calls so far.
        has_lost: Set when a call was cancelled with a push unanswered.
        has_one: Set when it has a push that it leaves unanswered.
        has_ended: Set when a call had no more pushes.
        lingers: Whether it lets such a call go on.
    """

    def __init__(self) -> None:
        self.call_count = 0
        self.has_lost = asyncio.Event()
        self.has_one = asyncio.Event()
        self.has_ended = asyncio.Event()
        self.lingers = False

    async def push_pull_once(
        self, requests: AsyncIterator[bytes], context: Context
    ) -> AsyncIterator[bytes]:
        self.call_count += 1
        async for request in requests:
            if request == b"refuse":
                reason = ErrorReason.CHUNK_INVALID
                await abort(context, Refusal(reason, "as the test wants it"))
            if request == b"end":
                return
            if request == b"wait":
                self.has_one.set()
                try:
                    await asyncio.Event().wait()
                finally:
                    self.has_lost.set()
            yield request
        self.has_ended.set()
        if self.lingers:
            try:
                await asyncio.Event().wait()
            finally:
                self.has_lost.set()


@asynccontextmanager
async def connected() -> AsyncIterator[tuple[Server, WholePushes]]:
    own = Server()
    server = grpc.aio.server()
    server.add_generic_rpc_handlers(
        (
            grpc.method_handlers_generic_handler(
                "Test",
                {"Once": grpc.stream_stream_rpc_method_handler(own.push_pull_once)},
            ),
        )
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            calls: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = (
                channel.stream_stream("/Test/Once")
            )
            yield own, WholePushes(calls, "shard 0")
    finally:
        await server.stop(None)


async def test_pushes_go_on_one_call_one_after_the_other() -> None:
    async with connected() as (server, pushes):
        answers = [
            await pushes.push(message, timeout_s=TIMEOUT_S)
            for message in (b"1", b"2", b"3")
        ]

        assert answers == [b"1", b"2", b"3"]
        assert server.call_count == 1


async def test_a_call_without_a_push_ends_in_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("psworker.transport.shard_client.CLOSE_TIMEOUT_S", TIMEOUT_S)
    async with connected() as (server, pushes):
        await pushes.close()  # there is none yet
        await pushes.push(b"1", timeout_s=TIMEOUT_S)

        await pushes.close()

        assert server.has_ended.is_set()
        assert await pushes.push(b"2", timeout_s=TIMEOUT_S) == b"2"
        assert server.call_count == 2


async def test_a_shard_that_does_not_end_its_call_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("psworker.transport.shard_client.CLOSE_TIMEOUT_S", 0.01)
    async with connected() as (server, pushes):
        server.lingers = True
        await pushes.push(b"1", timeout_s=TIMEOUT_S)

        await pushes.close()

        async with asyncio.timeout(TIMEOUT_S):
            await server.has_lost.wait()


async def test_a_refusal_is_of_its_push_alone() -> None:
    async with connected() as (server, pushes):
        await pushes.push(b"1", timeout_s=TIMEOUT_S)

        with pytest.raises(CallError, match="as the test wants it") as caught:
            await pushes.push(b"refuse", timeout_s=TIMEOUT_S)

        assert caught.value.is_decided
        assert await pushes.push(b"2", timeout_s=TIMEOUT_S) == b"2"
        assert server.call_count == 2


async def test_a_call_that_ends_without_an_answer_leaves_its_push_unknown() -> None:
    async with connected() as (_, pushes):
        with pytest.raises(CallError, match="it ended the call") as caught:
            await pushes.push(b"end", timeout_s=TIMEOUT_S)

        assert caught.value.is_retryable
        assert not caught.value.is_decided
        assert await pushes.push(b"1", timeout_s=TIMEOUT_S) == b"1"


async def test_a_push_that_takes_too_long_ends_at_the_server_too() -> None:
    async with connected() as (server, pushes):
        await pushes.push(b"1", timeout_s=TIMEOUT_S)

        timeout_s = 0.025
        while not server.has_one.is_set():  # it may take longer to arrive
            timeout_s *= 2
            with pytest.raises(CallError, match="Deadline Exceeded") as caught:
                await pushes.push(b"wait", timeout_s=timeout_s)

        assert caught.value.code == "DEADLINE_EXCEEDED"
        assert caught.value.is_retryable
        async with asyncio.timeout(TIMEOUT_S):
            await server.has_lost.wait()
        assert await pushes.push(b"2", timeout_s=TIMEOUT_S) == b"2"


async def test_a_push_that_is_cancelled_ends_at_the_server_too() -> None:
    async with connected() as (server, pushes):
        await pushes.push(b"1", timeout_s=TIMEOUT_S)
        cancelled = asyncio.create_task(pushes.push(b"wait", timeout_s=TIMEOUT_S))
        await asyncio.wait_for(server.has_one.wait(), TIMEOUT_S)

        cancelled.cancel()
        # At once, and beside the one that is being cancelled.
        assert await pushes.push(b"2", timeout_s=TIMEOUT_S) == b"2"
        with pytest.raises(asyncio.CancelledError):
            await cancelled

        async with asyncio.timeout(TIMEOUT_S):
            await server.has_lost.wait()
        assert server.call_count == 2


async def test_a_shard_that_is_gone_leaves_a_push_unknown() -> None:
    async with connected() as (_, pushes):
        await pushes.push(b"1", timeout_s=TIMEOUT_S)

    with pytest.raises(CallError) as caught:
        await pushes.push(b"2", timeout_s=TIMEOUT_S)
    assert not caught.value.is_decided
