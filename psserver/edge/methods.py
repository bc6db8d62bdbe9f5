"""Handlers as gRPC wants them: guarded, reading and writing messages."""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, TypeVar

import grpc
from google.protobuf.message import Message

from psserver.edge.guard import Context, answering, telling, unary

Request = TypeVar("Request", bound=Message)
Response = TypeVar("Response", bound=Message)

Methods = Mapping[str, "grpc.RpcMethodHandler[Any, Any]"]
"""Handlers by the name of their method."""


def answered(
    handler: Callable[[Request, Context], Awaitable[Response]],
    request_type: type[Request],
) -> "grpc.RpcMethodHandler[bytes, Response]":
    """A method that takes one request and gives one answer."""
    return grpc.unary_unary_rpc_method_handler(
        answering(handler, request_type),
        response_serializer=_serialized,
    )


def gathered(
    handler: Callable[[AsyncIterator[bytes], Context], Awaitable[Response]],
) -> "grpc.RpcMethodHandler[bytes, Response]":
    """A method that takes a stream of bytes, to be parsed, and gives one answer."""
    return grpc.stream_unary_rpc_method_handler(
        unary(handler), response_serializer=_serialized
    )


def streamed(
    handler: Callable[[Request, Context], AsyncIterator[Response]],
    request_type: type[Request],
) -> "grpc.RpcMethodHandler[bytes, Response]":
    """A method that takes one request and gives a stream of answers."""
    return grpc.unary_stream_rpc_method_handler(
        telling(handler, request_type),
        response_serializer=_serialized,
    )


def _serialized(message: Message) -> bytes:
    return message.SerializeToString()
