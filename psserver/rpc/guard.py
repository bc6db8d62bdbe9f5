"""The edge of every handler: what a client may see of what went wrong.

A `Refusal` becomes its status with details. Anything else becomes INTERNAL with a
text that tells nothing, and the traceback stays in the server's log. A handler that
ends by a cancellation of its own would leave the client hanging until its deadline
(grpc/grpc#29248), so that becomes a status too. One that ends since its client has hung
up gets none: gRPC never frees what can't be sent any more (grpc/grpc#43360), half a
kilobyte with its details. Bytes that are no message become a status: gRPC itself would
answer UNKNOWN and write a traceback for each of them.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final, NoReturn, TypeVar, cast

import grpc.aio
from google.protobuf.message import DecodeError, Message

from pswire.error_details import details_text, status_code, trailing_metadata
from pswire.reasons import ErrorReason, Refusal

log = logging.getLogger("psserver.rpc")

Request = TypeVar("Request")
Response = TypeVar("Response")
RequestMessage = TypeVar("RequestMessage", bound=Message)
Context = grpc.aio.ServicerContext[Any, Any]


_UNREADABLE: Final = object()


def reader(request_type: type[RequestMessage]) -> Callable[[bytes], RequestMessage]:
    """A deserializer that leaves it to the guarded handler to refuse garbage."""

    def read(data: bytes) -> RequestMessage:
        try:
            return request_type.FromString(data)
        except DecodeError:
            return cast("RequestMessage", _UNREADABLE)

    return read


def _check_readable(request: object, method: str) -> None:
    if request is _UNREADABLE:
        raise Refusal(
            ErrorReason.MALFORMED_MESSAGE, f"the request of {method} can't be parsed"
        )


def _is_hung_up(error: BaseException) -> bool:
    """Whether gRPC has cancelled the handler's task, since its client has gone.

    A context does not tell: it is `done` only when a status was sent.
    """
    task = asyncio.current_task()
    return (
        isinstance(error, asyncio.CancelledError)
        and task is not None
        and task.cancelling() > 0
    )


async def abort(context: Context, refusal: Refusal) -> NoReturn:
    """Ends a call with a refusal."""
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
    log.error("%s failed", method, exc_info=error)
    return Refusal(ErrorReason.INTERNAL, f"{method} failed on the server")


def unary(
    handler: Callable[[Request, Context], Awaitable[Response]],
) -> Callable[[Request, Context], Awaitable[Response]]:
    """Guards a handler that takes one request, or a stream, and gives one answer."""

    async def guarded(request: Request, context: Context) -> Response:
        try:
            _check_readable(request, handler.__name__)
            return await handler(request, context)
        except grpc.aio.AbortError:
            raise
        except BaseException as error:
            if context.done() or _is_hung_up(error):
                raise
            await abort(context, as_refusal(error, handler.__name__))

    return guarded


def gathering(
    handler: Callable[[AsyncIterator[Request], Context], Awaitable[Response]],
) -> Callable[[AsyncIterator[Request], Context], Awaitable[Response]]:
    """Guards a handler that takes a stream of requests and gives one answer."""

    async def gather(requests: AsyncIterator[Request], context: Context) -> Response:
        async def readable() -> AsyncIterator[Request]:
            async for request in requests:
                _check_readable(request, handler.__name__)
                yield request

        return await handler(readable(), context)

    gather.__name__ = handler.__name__
    return unary(gather)


def streaming(
    handler: Callable[[Request, Context], AsyncIterator[Response]],
) -> Callable[[Request, Context], AsyncIterator[Response]]:
    """Guards a handler that gives a stream of answers."""

    async def guarded(request: Request, context: Context) -> AsyncIterator[Response]:
        try:
            _check_readable(request, handler.__name__)
            async for response in handler(request, context):
                yield response
        except (grpc.aio.AbortError, GeneratorExit):
            raise
        except BaseException as error:
            if context.done() or _is_hung_up(error):
                raise
            await abort(context, as_refusal(error, handler.__name__))

    return guarded
