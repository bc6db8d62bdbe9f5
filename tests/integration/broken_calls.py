"""Pushes that break at a point of the test's choice, on real shards."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import grpc
import grpc.aio

from psserver.shard import daemon as shard_daemon
from psserver.shard.host.shard_host import ShardHost
from psserver.shard.rpc.parameter_service import ParameterService

Messages = AsyncIterator[bytes]
Context = grpc.aio.ServicerContext[bytes, bytes]
Stream = Callable[[Messages, Context], Messages]
Fault = Callable[[Stream], Stream]


class BreakableHandler(grpc.GenericRpcHandler):
    """Passes calls on; each push breaks as the next fault says, if any is left.

    Attributes:
        faults: How the next calls break.
        push_count: Calls of `PushPull`, and messages of `PushPullOnce`, so far.
    """

    def __init__(self, inner: grpc.GenericRpcHandler) -> None:
        self._inner = inner
        self.faults: deque[Fault] = deque()
        self.push_count = 0

    def service(
        self, handler_call_details: grpc.HandlerCallDetails
    ) -> "grpc.RpcMethodHandler[Any, Any] | None":
        method = self._inner.service(handler_call_details)
        name = handler_call_details.method
        kind = str(name).rpartition("/")[2]
        if method is None or kind not in ("PushPull", "PushPullOnce"):
            return method
        stream: Any = method.stream_stream
        if kind == "PushPullOnce":
            return grpc.stream_stream_rpc_method_handler(self._each_broken(stream))
        return grpc.stream_stream_rpc_method_handler(self._next_broken(stream))

    def _next_broken(self, stream: Stream) -> Stream:
        self.push_count += 1
        return self.faults.popleft()(stream) if self.faults else stream

    def _each_broken(self, stream: Stream) -> Stream:
        """A call of many pushes, each as if it had a call of its own."""

        async def broken(requests: Messages, context: Context) -> Messages:
            async for request in requests:
                async for answer in self._next_broken(stream)(one(request), context):
                    yield answer

        return broken


async def one(message: bytes) -> Messages:
    """A stream of one message."""
    yield message


@contextmanager
def breakable_shards() -> Iterator[dict[int, BreakableHandler]]:
    """Makes shards that start meanwhile breakable; their handlers by shard index."""
    handlers: dict[int, BreakableHandler] = {}

    class BreakableService(ParameterService):
        def __init__(self, host: ShardHost) -> None:
            super().__init__(host)
            self._shard_index = host.shard_index

        def handler(self) -> grpc.GenericRpcHandler:
            handler = BreakableHandler(super().handler())
            handlers[self._shard_index] = handler
            return handler

    with mock.patch.object(shard_daemon, "ParameterService", BreakableService):
        yield handlers


def lose_reply(inner: Stream) -> Stream:
    """The push is done, and nothing of the answer arrives."""

    async def stream(requests: Messages, context: Context) -> Messages:
        async for _ in inner(requests, context):
            pass
        yield await context.abort(grpc.StatusCode.UNAVAILABLE, "lost by the test")

    return stream


def leave_unanswered(inner: Stream) -> Stream:
    """The push is done, right after a call of one message was told that it waits."""

    async def stream(requests: Messages, context: Context) -> Messages:
        async for _ in inner(requests, context):
            pass
        yield b""

    return stream


def cut_upload(message_count: int) -> Fault:
    """The call breaks after some messages, not the last, have been taken."""

    def fault(inner: Stream) -> Stream:
        async def stream(requests: Messages, context: Context) -> Messages:
            taken = asyncio.Event()

            async def first() -> Messages:
                count = 0
                async for request in requests:
                    yield request
                    count += 1
                    if count == message_count:
                        taken.set()
                        await asyncio.Event().wait()

            async def drain() -> None:
                async for _ in inner(first(), context):
                    pass

            draining = asyncio.ensure_future(drain())
            waiting = asyncio.ensure_future(taken.wait())
            # A push that was joined into fewer messages is done, and its answer lost.
            await asyncio.wait({draining, waiting}, return_when="FIRST_COMPLETED")
            for task in (draining, waiting):
                task.cancel()
            await asyncio.gather(draining, waiting, return_exceptions=True)
            yield await context.abort(grpc.StatusCode.UNAVAILABLE, "cut by the test")

        return stream

    return fault
