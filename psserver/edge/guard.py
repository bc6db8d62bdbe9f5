"""The edge of every handler: what a client may see of what went wrong.

A `Refusal` becomes its status with details. Anything else becomes INTERNAL with a
text that says nothing, and the traceback stays in the server's log. A handler that
ends by a cancellation of its own would leave the client hanging until its deadline
(grpc/grpc#29248), so that becomes a status too. One that ends since its client has hung
up gets none: gRPC never frees what can't be sent any more (grpc/grpc#43360), half a
kilobyte with its details. Bytes become messages here, and not in gRPC, which would
answer UNKNOWN and write a traceback for each that is none; see `decoding`.
"""

import asyncio
import contextlib
import errno
import ipaddress
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from functools import lru_cache
from typing import Any, Final, NoReturn, TypeVar, cast
from urllib.parse import unquote

import grpc
import grpc.aio
from google.protobuf.message import Message

from psserver.edge.decoding import decoded
from psserver.logs import RefusalLog
from pswire.error_details import details_text, status_code, trailing_metadata
from pswire.reasons import ErrorReason, Refusal

REFUSED_REST_TIMEOUT_S = 1.0
"""Time for the rest of a refused call to come in. A client that still writes when its
call ends gets INTERNAL from its own gRPC in place of the reason (grpc/grpc#36066): it
would ask what the shard has, send nothing again, and never hear that it was refused."""

_refusal_log = RefusalLog(logging.getLogger("psserver"))

Request = TypeVar("Request")
Response = TypeVar("Response")
RequestMessage = TypeVar("RequestMessage", bound=Message)
ResponseMessage = TypeVar("ResponseMessage", bound=Message)
Context = grpc.aio.ServicerContext[Any, Any]

Methods = Mapping[str, "grpc.RpcMethodHandler[Any, Any]"]
"""Handlers by the name of their method."""


def address_of(context: Context) -> str:
    """Where a call comes from, as `HOST:PORT`."""
    peer = unquote(str(context.peer()))
    return peer.removeprefix("ipv4:").removeprefix("ipv6:")


def machine_of(context: Context) -> str:
    """Which machine a call comes from."""
    return machine_of_address(address_of(context))


@lru_cache(maxsize=1024)
def machine_of_address(address: str) -> str:
    """Which machine a `HOST:PORT` is of: all of a /64 network of IPv6 is one's."""
    host = address.rpartition(":")[0].strip("[]")
    if ":" not in host:
        return host
    try:
        own = ipaddress.IPv6Address(host)
    except ValueError:
        return host
    if own.is_loopback:
        return host
    return str(ipaddress.IPv6Network((own.packed, 64), strict=False))


def _is_hung_up(error: BaseException) -> bool:
    """Whether gRPC has cancelled the handler's task, since its client has gone.

    A context does not say: it is `done` only when a status was sent.
    """
    task = asyncio.current_task()
    return (
        isinstance(error, asyncio.CancelledError)
        and task is not None
        and task.cancelling() > 0
    )


def behavior_of(
    handler: "grpc.RpcMethodHandler[Any, Any]",
) -> Callable[[Any, Context], Any]:
    """What a handler calls, whatever its kind is."""
    return cast(
        "Callable[[Any, Context], Any]",
        handler.unary_unary
        or handler.unary_stream
        or handler.stream_unary
        or handler.stream_stream,
    )


async def discard(requests: AsyncIterator[object], limit_s: float) -> None:
    """Reads the rest of a refused call and drops it, for a while."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(limit_s):
            async for _ in requests:
                pass


async def abort(context: Context, refusal: Refusal) -> NoReturn:
    await context.abort(
        status_code(refusal.reason), details_text(refusal), trailing_metadata(refusal)
    )
    raise AssertionError("abort raises")


def as_refusal(error: BaseException, method: str) -> Refusal:
    """What a client may see of an error; the rest goes to the log."""
    if isinstance(error, Refusal):
        return error
    if isinstance(error, asyncio.CancelledError):
        return Refusal(ErrorReason.DRAINING, "the server ended the call")
    if lacks := _lacking(error):
        _refusal_log.warning("%s was refused: this process has no %s", method, lacks)
        return Refusal(ErrorReason.BUSY, f"the process has no {lacks} left")
    _refusal_log.warning("%s failed", method, error=error)
    return Refusal(ErrorReason.INTERNAL, f"{method} failed on the server")


_LACKING: Final = {
    errno.EMFILE: "file descriptor",
    errno.ENFILE: "file descriptor",
    errno.ENOMEM: "memory",
}


def _lacking(error: BaseException) -> str:
    """What the system has none left of, in words; empty for any other error."""
    if isinstance(error, MemoryError):
        return "memory"
    if isinstance(error, OSError):
        return _LACKING.get(error.errno or 0, "")
    # As Python says of threads: an error of no other kind.
    return "thread" if "can't start new thread" in str(error) else ""


def unary(
    handler: Callable[[Request, Context], Awaitable[Response]],
) -> Callable[[Request, Context], Awaitable[Response]]:
    """Guards a handler that takes bytes, or a stream of them, and gives one answer."""

    async def guarded(request: Request, context: Context) -> Response:
        try:
            return await handler(request, context)
        except grpc.aio.AbortError:
            raise
        except BaseException as error:
            if context.done() or _is_hung_up(error):
                raise
            await abort(context, as_refusal(error, handler.__name__))

    return guarded


def streaming(
    handler: Callable[[Request, Context], AsyncIterator[Response]],
) -> Callable[[Request, Context], AsyncIterator[Response]]:
    """Guards a handler that takes bytes, or a stream, and gives a stream of answers."""

    async def guarded(request: Request, context: Context) -> AsyncIterator[Response]:
        try:
            async for response in handler(request, context):
                yield response
        except (grpc.aio.AbortError, GeneratorExit):
            raise
        except BaseException as error:
            if context.done() or _is_hung_up(error):
                raise
            await abort(context, as_refusal(error, handler.__name__))

    return guarded


def telling(
    handler: Callable[[RequestMessage, Context], AsyncIterator[Response]],
    request_type: type[RequestMessage],
) -> Callable[[bytes, Context], AsyncIterator[Response]]:
    """Guards a handler that takes one message and gives a stream of answers."""

    async def tell(request: bytes, context: Context) -> AsyncIterator[Response]:
        message = await decoded(request_type, request)
        async for response in handler(message, context):
            yield response

    tell.__name__ = handler.__name__
    return streaming(tell)


def answered(
    handler: Callable[[RequestMessage, Context], Awaitable[ResponseMessage]],
    request_type: type[RequestMessage],
) -> "grpc.RpcMethodHandler[bytes, ResponseMessage]":
    """A guarded method that takes one message and gives one answer."""

    async def answer(request: bytes, context: Context) -> ResponseMessage:
        return await handler(await decoded(request_type, request), context)

    answer.__name__ = handler.__name__
    return grpc.unary_unary_rpc_method_handler(
        unary(answer), response_serializer=_serialized
    )


def gathered(
    handler: Callable[[AsyncIterator[bytes], Context], Awaitable[ResponseMessage]],
) -> "grpc.RpcMethodHandler[bytes, ResponseMessage]":
    """A guarded method that takes a stream of bytes, and gives one answer."""
    return grpc.stream_unary_rpc_method_handler(
        unary(handler), response_serializer=_serialized
    )


def streamed(
    handler: Callable[[RequestMessage, Context], AsyncIterator[ResponseMessage]],
    request_type: type[RequestMessage],
) -> "grpc.RpcMethodHandler[bytes, ResponseMessage]":
    """A guarded method that takes one message and gives a stream of answers."""
    return grpc.unary_stream_rpc_method_handler(
        telling(handler, request_type), response_serializer=_serialized
    )


def _serialized(message: Message) -> bytes:
    return message.SerializeToString()
