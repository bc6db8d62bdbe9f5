"""Calls of a service in bytes, through all that stands around its handlers."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from types import SimpleNamespace
from typing import Any, cast

import grpc
import grpc.aio

RESPONSE_COUNT_MAX = 3
"""Most responses that are read: a call that waits says so without end."""


class CallContext:
    """What a handler has of its call; keeps how it was refused."""

    def __init__(self) -> None:
        self.code: grpc.StatusCode | None = None
        self.details = ""

    async def abort(self, code: grpc.StatusCode, details: str, _: object) -> None:
        self.code, self.details = code, details
        raise grpc.aio.AbortError

    def done(self) -> bool:
        return False

    def peer(self) -> str:
        return "ipv4:127.0.0.1:5000"


async def called(
    service: grpc.GenericRpcHandler,
    method: str,
    requests: Sequence[bytes],
    *,
    timeout_s: float,
) -> CallContext:
    """Calls a method; one that waits for others is given up after a while.

    Args:
        service: Its handlers.
        method: Path of the method.
        requests: Messages, of which a method that takes one is given the first.
        timeout_s: How long a call may wait.
    """
    details = cast("grpc.HandlerCallDetails", SimpleNamespace(method=method))
    handler: Any = service.service(details)
    assert handler is not None, method
    context = CallContext()

    async def stream() -> AsyncIterator[bytes]:
        for request in requests:
            yield request

    given = stream() if handler.request_streaming else b"".join(requests[:1])
    with contextlib.suppress(grpc.aio.AbortError, TimeoutError):
        async with asyncio.timeout(timeout_s):
            await _answers(handler, given, context)
    return context


async def _answers(handler: Any, given: object, context: CallContext) -> None:  # noqa: ANN401
    if not handler.response_streaming:
        call = handler.stream_unary if handler.request_streaming else None
        answer = await (call or handler.unary_unary)(given, context)
        if handler.response_serializer is not None:
            handler.response_serializer(answer)
        return
    call = handler.stream_stream if handler.request_streaming else None
    answers = (call or handler.unary_stream)(given, context)
    async with contextlib.aclosing(answers):
        count = 0
        async for _ in answers:
            count += 1
            if count == RESPONSE_COUNT_MAX:
                return
