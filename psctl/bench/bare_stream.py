"""The worker's side of the bare stream."""

import asyncio
from typing import Any

import grpc.aio
import numpy as np
import torch

from psctl.bench.bare_stream_server import (
    CHUNK_ELEMENTS,
    METHOD,
    OPTIONS,
    SERVICE,
    message_of,
    read_message,
)
from psworker.event_loop import EventLoop


class BareStreamClient:
    """Exchanges gradients for values, one stream for each step.

    Attributes:
        values: The newest values, 1-D float32.
    """

    def __init__(self, loop: EventLoop, port: int, first: torch.Tensor) -> None:
        """Gives the server the first values.

        Args:
            loop: On which it talks.
            port: Of loopback, where the server listens or will.
            first: The first values, which are written to.
        """
        self.values = first
        self._loop = loop
        self._channel = loop.run(_channel(port))
        self._loop.run(self._exchange(first, is_value=True))

    def step(self, gradient: torch.Tensor) -> None:
        """Pushes a gradient; the values it made are in `values` on return."""
        self._loop.run(self._exchange(gradient, is_value=False))

    def close(self) -> None:
        """Ends the connection."""
        self._loop.run(self._channel.close())

    async def _exchange(self, elements: torch.Tensor, *, is_value: bool) -> None:
        method: Any = self._channel.stream_stream(f"/{SERVICE}/{METHOD}")
        call = method(wait_for_ready=True)

        async def send() -> None:
            for start in range(0, len(elements), CHUNK_ELEMENTS):
                chunk = elements[start : start + CHUNK_ELEMENTS]
                await call.write(message_of(start, is_value, chunk))
            await call.done_writing()

        sending = asyncio.ensure_future(send())
        values = self.values.numpy()
        while (message := await call.read()) is not grpc.aio.EOF:
            start, _, received = read_message(message)
            np.copyto(values[start : start + len(received)], received.numpy())
        await sending


async def _channel(port: int) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=OPTIONS)
