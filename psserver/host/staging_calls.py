"""The calls that bring values or state to be staged: one for each sender.

What a call has brought is kept until it is whole. So a sender has one at a time, its
newest, and one that is silent is ended.
"""

import asyncio
from collections.abc import AsyncIterator, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, Final, Generic, TypeVar

from pswire.reasons import ErrorReason, Refusal

Message = TypeVar("Message")

SILENCE_TIMEOUT_S: Final = 30.0
"""Longest time between two messages of a call. A message has 8 MiB at most: who needs
longer for it could not train."""


class StagingCall(Generic[Message]):
    """One call of a sender.

    Args:
        requests: Its messages.
    """

    def __init__(self, requests: AsyncIterator[Message]) -> None:
        self._requests = requests
        self._ended: asyncio.Future[Refusal] = (
            asyncio.get_running_loop().create_future()
        )

    async def next(self) -> Message | None:
        """The next message; None at the call's end.

        Raises:
            Refusal: `WAIT_TIMEOUT` when it does not come, `DRAINING` when its sender
                has a newer call.
        """
        reading = asyncio.ensure_future(_next_of(self._requests))
        try:
            await asyncio.wait(
                (reading, self._ended),
                timeout=SILENCE_TIMEOUT_S,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if self._ended.done():
                raise self._ended.result()
            if not reading.done():
                raise Refusal(
                    ErrorReason.WAIT_TIMEOUT,
                    f"a call that stages was silent for {SILENCE_TIMEOUT_S:g} s; what "
                    "it has brought is dropped",
                )
            return reading.result()
        finally:
            reading.cancel()

    async def rest(self) -> AsyncIterator[Message]:
        """All messages that are still to come.

        Raises:
            Refusal: As `next`.
        """
        while (message := await self.next()) is not None:
            yield message

    def end(self) -> None:
        """Ends it, since its sender has another one."""
        if not self._ended.done():
            self._ended.set_result(
                Refusal(ErrorReason.DRAINING, "a newer call of the same worker stages")
            )


class StagingCalls:
    """The newest call of each sender. In the event loop."""

    def __init__(self) -> None:
        self._calls: dict[Hashable, StagingCall[Any]] = {}

    @contextmanager
    def admitted(self, sender: Hashable, call: StagingCall[Message]) -> Iterator[None]:
        """A call is its sender's one meanwhile; one that it had before is ended."""
        before = self._calls.get(sender)
        if before is not None:
            before.end()
        self._calls[sender] = call
        try:
            yield
        finally:
            if self._calls.get(sender) is call:
                del self._calls[sender]


async def _next_of(requests: AsyncIterator[Message]) -> Message | None:
    return await anext(requests, None)
