"""The call that carries this worker's small pushes to a shard, one after the other.

A message on a call that is open costs about a third of a call of its own. To whoever
pushes it is a call for each push all the same: any end of it but an answer, be it a
refusal, a time-out or a cancellation, ends the call with that push, and the next push
opens another one.
"""

import asyncio
import contextlib
from typing import TYPE_CHECKING, Final

import grpc.aio

from psworker.transport.call_error import CallError, translated

if TYPE_CHECKING:
    _Call = grpc.aio.StreamStreamCall[bytes, bytes]
    _Calls = grpc.aio.StreamStreamMultiCallable[bytes, bytes]

CLOSE_TIMEOUT_S: Final = 1.0
"""Longest wait for a shard to end a call that has no push any more."""


class WholePushes:
    """Pushes of one message each to one start of one shard."""

    def __init__(self, calls: "_Calls", peer: str) -> None:
        """Opens nothing yet.

        Args:
            calls: Opens calls of `PushPullOnce`.
            peer: The shard, for the text of errors.
        """
        self._calls = calls
        self._peer = peer
        self._open: _Call | None = None

    async def push(self, message: bytes, *, timeout_s: float) -> bytes:
        """Sends a push; the answer.

        Raises:
            CallError: The shard refused it, or it is unknown what became of it.
        """
        # Removed meanwhile: a push that is being cancelled is no hindrance.
        call, self._open = self._open, None
        if call is None or call.done():
            with translated(self._peer):
                call = self._calls()
        try:
            with translated(self._peer):
                async with asyncio.timeout(timeout_s):
                    answer = await self._exchange(call, message)
        except TimeoutError:
            call.cancel()
            raise CallError(
                self._peer,
                "DEADLINE_EXCEEDED",
                "Deadline Exceeded",
                refusal=None,
                decided=False,
            ) from None
        except BaseException:
            call.cancel()
            raise
        self._open = call
        return answer

    async def close(self) -> None:
        """Ends the call that is open, and carries no push, by saying that none follows.

        What a shard awaits of a call that is cancelled is never freed there
        (grpc/grpc#43360).
        """
        call, self._open = self._open, None
        if call is None:
            return
        # However it ends, nothing is lost with it.
        with contextlib.suppress(
            asyncio.InvalidStateError, TimeoutError, grpc.aio.AioRpcError
        ):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await call.done_writing()
                await call.read()
        call.cancel()

    async def _exchange(self, call: "_Call", message: bytes) -> bytes:
        # A call that has ended refuses to write; reading says why.
        with contextlib.suppress(asyncio.InvalidStateError):
            await call.write(message)
        answer = await call.read()
        if isinstance(answer, bytes):
            return answer
        raise CallError(
            self._peer, "UNAVAILABLE", "it ended the call", refusal=None, decided=False
        )
