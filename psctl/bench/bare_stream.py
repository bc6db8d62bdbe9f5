"""A gRPC stream without a protocol: what a parameter server is that checks nothing.

Messages are a header of fixed width and the bytes of a chunk, so that the elements are
aligned in the received buffer and the tensor is a view of it. SGD is applied in the
handler, which answers each chunk with its new values. Run as a process, it is the
server.
"""

import asyncio
import struct
import sys
from typing import Any, Final

import grpc
import grpc.aio
import numpy as np
import torch

from pswire.limits import CHUNK_BYTES_SMALL
from pswire.schema import ElementType
from pswire.torch_types import buffer_of, tensor_from_buffer
from psworker.event_loop import EventLoop

_METHOD: Final = "/bench.BareStream/Exchange"

_HEADER: Final = struct.Struct("<qq")
"""First element of the chunk, and whether it holds values rather than a gradient."""

_CHUNK_ELEMENTS: Final = CHUNK_BYTES_SMALL // 4
_OPTIONS: Final = (("grpc.enable_http_proxy", 0), ("grpc.so_reuseport", 0))


def _message_of(start: int, is_value: bool, elements: torch.Tensor) -> bytes:
    """A message with some elements; the one copy out of the tensor."""
    return b"".join((_HEADER.pack(start, is_value), buffer_of(elements)))


def _read_message(message: bytes) -> tuple[int, bool, torch.Tensor]:
    """First element, whether these are values, and the elements as a view."""
    start, is_value = _HEADER.unpack_from(message)
    elements = memoryview(message)[_HEADER.size :]
    return start, bool(is_value), tensor_from_buffer(elements, ElementType.FLOAT32)


class BareStreamClient:
    """Exchanges gradients for values, one stream for each step.

    Attributes:
        values: The newest values, 1-D float32.
    """

    def __init__(self, loop: EventLoop, port: int, first: torch.Tensor) -> None:
        """Sends the first values, into which the newest ones are then written."""
        self.values = first
        self._loop = loop
        self._channel = loop.run(lambda: _channel(port))
        self._loop.run(lambda: self._exchange(first, is_value=True))

    def step(self, gradient: torch.Tensor) -> None:
        """Pushes a gradient; the values it made are in `values` on return."""
        self._loop.run(lambda: self._exchange(gradient, is_value=False))

    def close(self) -> None:
        self._loop.run(self._channel.close)

    async def _exchange(self, elements: torch.Tensor, *, is_value: bool) -> None:
        method: Any = self._channel.stream_stream(_METHOD)
        call = method(wait_for_ready=True)

        async def send() -> None:
            for start in range(0, len(elements), _CHUNK_ELEMENTS):
                chunk = elements[start : start + _CHUNK_ELEMENTS]
                await call.write(_message_of(start, is_value, chunk))
            await call.done_writing()

        sending = asyncio.ensure_future(send())
        values = self.values.numpy()
        while (message := await call.read()) is not grpc.aio.EOF:
            start, _, received = _read_message(message)
            np.copyto(values[start : start + len(received)], received.numpy())
        await sending


async def _channel(port: int) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=_OPTIONS)


class _Handler(grpc.GenericRpcHandler):
    """Holds one parameter."""

    def __init__(self, element_count: int, learning_rate: float) -> None:
        self._parameter = torch.zeros(element_count)
        self._learning_rate = learning_rate

    def service(self, details: grpc.HandlerCallDetails) -> Any:  # noqa: ANN401, gRPC's
        if details.method == _METHOD:
            return grpc.stream_stream_rpc_method_handler(self._exchange)
        return None

    async def _exchange(self, unused: object, context: Any) -> None:  # noqa: ANN401
        while (message := await context.read()) is not grpc.aio.EOF:
            start, is_value, elements = _read_message(message)
            held = self._parameter[start : start + len(elements)]
            if is_value:
                held.copy_(elements)
            else:
                held.add_(elements, alpha=-self._learning_rate)
            await context.write(_message_of(start, True, held))


async def serve(port: int, element_count: int, learning_rate: float) -> None:
    """Serves until the process is ended."""
    torch.set_num_threads(1)
    server = grpc.aio.server(options=_OPTIONS)
    server.add_generic_rpc_handlers((_Handler(element_count, learning_rate),))
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    try:
        await server.wait_for_termination()
    finally:
        await server.stop(None)


if __name__ == "__main__":
    work = serve(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
    try:
        import uvloop
    except ImportError:  # Not on Windows; the plain loop is slower, not different.
        asyncio.run(work)
    else:
        uvloop.run(work)
