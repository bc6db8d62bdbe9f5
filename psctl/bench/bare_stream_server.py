"""A gRPC stream without a protocol: what a parameter server is that checks nothing.

Messages are a header of fixed width and the bytes of a chunk, so that the elements are
aligned in the received buffer and the tensor is a view of it. SGD is applied in the
handler, which answers each chunk with its new values. Run as a process of its own.
"""

import asyncio
import struct
import sys
from typing import Any, Final

import grpc
import grpc.aio
import torch

from pswire.limits import CHUNK_BYTES_SMALL
from pswire.schema import ElementType
from pswire.torch_types import buffer_of, tensor_from_buffer

SERVICE: Final = "bench.BareStream"
METHOD: Final = "Exchange"

HEADER: Final = struct.Struct("<qq")
"""First element of the chunk, and whether it holds values rather than a gradient."""

CHUNK_ELEMENTS: Final = CHUNK_BYTES_SMALL // 4

OPTIONS: Final = (("grpc.enable_http_proxy", 0), ("grpc.so_reuseport", 0))


def message_of(start: int, is_value: bool, elements: torch.Tensor) -> bytes:
    """A message with some elements; the one copy out of the tensor."""
    return b"".join((HEADER.pack(start, is_value), buffer_of(elements)))


def read_message(message: bytes) -> tuple[int, bool, torch.Tensor]:
    """First element, whether these are values, and the elements as a view."""
    start, is_value = HEADER.unpack_from(message)
    elements = memoryview(message)[HEADER.size :]
    return start, bool(is_value), tensor_from_buffer(elements, ElementType.FLOAT32)


class BareStream(grpc.GenericRpcHandler):
    """Holds one parameter."""

    def __init__(self, element_count: int, learning_rate: float) -> None:
        self._parameter = torch.zeros(element_count)
        self._learning_rate = learning_rate

    def service(self, details: grpc.HandlerCallDetails) -> Any:  # noqa: ANN401, gRPC's
        """The one method."""
        if details.method == f"/{SERVICE}/{METHOD}":
            return grpc.stream_stream_rpc_method_handler(self._exchange)
        return None

    async def _exchange(self, unused: object, context: Any) -> None:  # noqa: ANN401
        while (message := await context.read()) is not grpc.aio.EOF:
            start, is_value, elements = read_message(message)
            held = self._parameter[start : start + len(elements)]
            if is_value:
                held.copy_(elements)
            else:
                held.add_(elements, alpha=-self._learning_rate)
            await context.write(message_of(start, True, held))


async def serve(port: int, element_count: int, learning_rate: float) -> None:
    """Serves until the process is ended."""
    torch.set_num_threads(1)
    server = grpc.aio.server(options=OPTIONS)
    server.add_generic_rpc_handlers((BareStream(element_count, learning_rate),))
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    try:
        await server.wait_for_termination()
    finally:
        await server.stop(None)


def main() -> None:
    """Entry point of the process: port, elements and learning rate."""
    port, element_count, learning_rate = sys.argv[1:]
    work = serve(int(port), int(element_count), float(learning_rate))
    try:
        import uvloop
    except ImportError:  # Not on Windows; the plain loop is slower, not different.
        asyncio.run(work)
    else:
        uvloop.run(work)


if __name__ == "__main__":
    main()
