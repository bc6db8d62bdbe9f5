"""The calls of a push whose chunks go before its trailer, one to each shard.

They have no deadline of their own: a slow backward pass may leave them idle for
minutes. Whatever ends one before the trailer costs nothing but a push in the ordinary
way: the shard keeps nothing of it.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any

from pswire import failpoints
from psworker.event_loop import EventLoop, LoopFuture
from psworker.member.outgoing_push import OutgoingPush
from psworker.transport.calls import CallError, left_s
from psworker.transport.ports import Receiver
from psworker.transport.values import PushReply

OpenCall = Callable[
    [int, AsyncGenerator[bytes, None], Receiver], Coroutine[Any, Any, PushReply]
]


class AheadCalls:
    """Calls of one push.

    Chunks are appended by the thread that computes; the rest is on the event loop.
    """

    def __init__(self, headers: Sequence[bytes], loop: EventLoop) -> None:
        """Opens none yet.

        Args:
            headers: For each shard, the message that opens its call.
            loop: Where the calls are.
        """
        self._loop = loop
        self._calls = [_AheadCall(header) for header in headers]
        self._running: LoopFuture[None] | None = None

    def begin(self, open_call: OpenCall) -> None:
        """Opens all calls, from the thread that computes."""
        self._running = self._loop.submit(lambda: self._run(open_call))

    def append(self, shard_index: int, message: bytes) -> None:
        """Sends a chunk, in place of the one that was sent before under its index."""
        call = self._calls[shard_index]
        call.messages.append(message)
        self._loop.notify(call.grown)

    def drop(self) -> None:
        """Ends all calls: nothing of them counts."""
        if self._running is not None:
            self._running.cancel()

    def is_open(self, shard_index: int) -> bool:
        """Whether a call still goes on, so that a trailer can complete it."""
        reply = self._calls[shard_index].reply
        return reply is not None and not reply.done()

    async def complete(
        self,
        shard_index: int,
        pushes: Sequence[OutgoingPush],
        receiver: Receiver,
        deadline: float,
    ) -> PushReply:
        """Sends the trailer, behind all that was appended; the answer.

        Args:
            shard_index: Whose call.
            pushes: Each shard's part of the push.
            receiver: Takes what comes before the answer.
            deadline: Time of the loop.

        Raises:
            CallError: The call failed, or there was no answer in time.
        """
        call = self._calls[shard_index]
        assert call.reply is not None, "it is open"
        call.receiver = receiver
        call.pushes = pushes
        call.closing = pushes[shard_index]
        call.grown.set()
        try:
            done, _ = await asyncio.wait({call.reply}, timeout=left_s(deadline))
            if done:
                return call.reply.result()
            raise CallError(
                f"shard {shard_index}",
                "DEADLINE_EXCEEDED",
                "it did not answer in time",
                refusal=None,
                decided=False,
            )
        finally:
            call.reply.cancel()

    async def _run(self, open_call: OpenCall) -> None:
        """Keeps the calls; whoever cancels it ends them."""
        for shard_index, call in enumerate(self._calls):
            call.reply = asyncio.ensure_future(
                open_call(shard_index, call.requests(), call.relay())
            )
        replies = [call.reply for call in self._calls if call.reply is not None]
        try:
            await asyncio.gather(*replies, return_exceptions=True)
        finally:
            for reply in replies:
                reply.cancel()
            await asyncio.gather(*replies, return_exceptions=True)


class _AheadCall:
    """One call. On the event loop, but for `messages`, which only grow."""

    def __init__(self, header: bytes) -> None:
        self.messages = [header]
        self.grown = asyncio.Event()
        self.reply: asyncio.Future[PushReply] | None = None
        self.receiver: Receiver | None = None
        self.pushes: Sequence[OutgoingPush] = ()
        self.closing: OutgoingPush | None = None

    def relay(self) -> Receiver:
        """Hands what comes to who takes it.

        Nothing comes before the trailer is sent, and who takes it is known by then. It
        isn't kept: a cycle would keep the call until the collector comes.
        """
        ignored = Receiver(on_chunk=lambda _: None, on_waiting=lambda _: None)
        return replace(
            ignored,
            on_chunk=lambda view: (self.receiver or ignored).on_chunk(view),
            on_waiting=lambda waiting: (self.receiver or ignored).on_waiting(waiting),
            on_staged=lambda choice: (self.receiver or ignored).on_staged(choice),
        )

    async def requests(self) -> AsyncGenerator[bytes, None]:
        """The messages, as they are appended; the trailer is the last."""
        sent_count = 0
        while True:
            while sent_count < len(self.messages):
                message = self.messages[sent_count]
                sent_count += 1
                yield message
                if failpoints.armed and sent_count > 1:
                    failpoints.hit("worker.chunk_sent")
            if self.closing is not None:
                break
            self.grown.clear()
            if sent_count == len(self.messages):
                await self.grown.wait()
        yield self.closing.trailer_message
        if failpoints.armed:
            self.closing.is_sent = True
            failpoints.hit("worker.push_sent")
            if all(each.is_sent for each in self.pushes):
                failpoints.hit("worker.in_barrier")
