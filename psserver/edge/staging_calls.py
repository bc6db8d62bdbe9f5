"""The calls that bring values, state or a model: one for each sender.

What a call has brought is kept until it is whole. So a sender has one at a time, its
newest, and one that is silent is ended. Where anybody may be a sender, all of them
together have so many places and so many bytes, and who is waited for loses its place
first.
"""

import asyncio
from collections.abc import AsyncIterator, Hashable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Final, Generic, TypeVar

from psserver.edge.changes import Changes
from pswire.reasons import ErrorReason, Refusal

Message = TypeVar("Message")

SLOW_S: Final = 1.0
"""Time that a sender may be waited for, over all its messages, while others want its
place. The messages of an honest one are ready before its call begins, and 64 MiB of
them come in less by a network that can train."""

PLACE_TIMEOUT_S: Final = 10.0
"""Longest time that a call waits for a place. Its sender asks again."""

WAITING_COUNT_MAX: Final = 1024
"""Calls that wait for a place. More of them are refused, to ask again: gRPC takes up to
4 MiB of each."""


class StagingCall(Generic[Message]):
    """One call of a sender.

    Args:
        requests: Its messages.
        silence_s: Longest time between two of them. A message has 8 MiB at most: who
            needs long for one could not train.
    """

    def __init__(self, requests: AsyncIterator[Message], silence_s: float) -> None:
        self._requests = requests
        self._silence_s = silence_s
        self._waited_s = 0.0
        self._waiting_since_s: float | None = None
        self._ended: asyncio.Future[Refusal] = (
            asyncio.get_running_loop().create_future()
        )

    async def next(self) -> Message | None:
        """The next message; None at the call's end.

        Raises:
            Refusal: `WAIT_TIMEOUT` when it does not come, `DRAINING` when its sender
                has a newer call, or when others have its place.
        """
        reading = asyncio.ensure_future(_next_of(self._requests))
        self._waiting_since_s = _now_s()
        try:
            await asyncio.wait(
                (reading, self._ended),
                timeout=self._silence_s,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if self._ended.done():
                raise self._ended.result()
            if not reading.done():
                raise Refusal(
                    ErrorReason.WAIT_TIMEOUT,
                    f"a call that stages was silent for {self._silence_s:g} s; what "
                    "it has brought is dropped",
                )
            return reading.result()
        finally:
            self._waited_s, self._waiting_since_s = self.waited_s, None
            reading.cancel()

    async def rest(self) -> AsyncIterator[Message]:
        """All messages that are still to come.

        Raises:
            Refusal: As `next`.
        """
        while (message := await self.next()) is not None:
            yield message

    @property
    def waited_s(self) -> float:
        """For how long its sender has been waited for, over all its messages."""
        since_s = self._waiting_since_s
        return self._waited_s + (0.0 if since_s is None else _now_s() - since_s)

    def end(self, refusal: Refusal) -> None:
        """Ends it, since its sender has another one, or another sender its place."""
        if not self._ended.done():
            self._ended.set_result(refusal)


class StagingCalls:
    """The newest call of each sender. In the event loop."""

    def __init__(self) -> None:
        self._calls: dict[Hashable, StagingCall[Any]] = {}

    @contextmanager
    def admitted(self, sender: Hashable, call: StagingCall[Message]) -> Iterator[None]:
        """A call is its sender's one meanwhile; one that it had before is ended."""
        before = self._calls.get(sender)
        if before is not None:
            before.end(
                Refusal(ErrorReason.DRAINING, "a newer call of the same worker stages")
            )
        self._calls[sender] = call
        try:
            yield
        finally:
            if self._calls.get(sender) is call:
                del self._calls[sender]


class StagingPlaces:
    """Places for calls of senders that may be anybody. In the event loop.

    A call has one before anything of it is read, in the order in which they come. One
    whose sender is waited for gives way to others. Beyond the bytes the newest one does
    too, so that the oldest is always done.

    Args:
        count_max: Calls at a time.
        bytes_max: Of all of them, beside the first message of each, which its place
            covers.
        what: What they bring, for the text of refusals.
    """

    def __init__(self, *, count_max: int, bytes_max: int, what: str) -> None:
        self._count_max = count_max
        self._bytes_max = bytes_max
        self._what = what
        # Both in the order in which they came.
        self._held: dict[StagingCall[Any], int] = {}
        self._waiting: dict[StagingCall[Any], None] = {}
        self._changes = Changes()

    @property
    def byte_count(self) -> int:
        """Bytes that are held beyond the first message of each call."""
        return sum(self._held.values())

    @asynccontextmanager
    async def taken(self, call: StagingCall[Any]) -> AsyncIterator[None]:
        """A call has a place meanwhile, once there is one.

        Raises:
            Refusal: `WAIT_TIMEOUT`: there was none in time.
        """
        await self._admit(call)
        try:
            yield
        finally:
            self._held.pop(call, None)
            self._changes.notify()

    def add(self, call: StagingCall[Any], byte_count: int) -> None:
        """A call has brought more, beyond its first message.

        Raises:
            Refusal: `DRAINING`: it has lost its place, now or before.
        """
        if call in self._held:
            self._held[call] += byte_count
        while self.byte_count > self._bytes_max and call in self._held:
            holders = [each for each, size in self._held.items() if size]
            self._end(self._slowest(holders) or holders[-1])
        if call not in self._held:
            raise self._gave_way()

    async def _admit(self, call: StagingCall[Any]) -> None:
        if len(self._waiting) >= WAITING_COUNT_MAX:
            raise self._no_place(f"{len(self._waiting)} others wait for one")
        self._waiting[call] = None
        deadline_s = _now_s() + PLACE_TIMEOUT_S
        try:
            while not (self._is_next(call) and self._has_room):
                left_s = deadline_s - _now_s()
                if left_s <= 0:
                    raise self._no_place(f"none was free for {PLACE_TIMEOUT_S:g} s")
                if not self._is_next(call):
                    await self._changes.wait_until(lambda: self._is_next(call), left_s)
                elif slowest := self._slowest(self._held):
                    self._end(slowest)
                else:
                    longest_s = max(each.waited_s for each in self._held)
                    left_s = min(left_s, max(0.01, SLOW_S - longest_s))
                    await self._changes.wait_until(lambda: self._has_room, left_s)
            self._held[call] = 0
        finally:
            del self._waiting[call]
            self._changes.notify()

    def _is_next(self, call: StagingCall[Any]) -> bool:
        return next(iter(self._waiting)) is call

    @property
    def _has_room(self) -> bool:
        return len(self._held) < self._count_max

    def _slowest(self, calls: Iterable[StagingCall[Any]]) -> StagingCall[Any] | None:
        """The one that has been waited for longest, if for long."""
        slowest = max(calls, key=lambda call: call.waited_s, default=None)
        return slowest if slowest and slowest.waited_s >= SLOW_S else None

    def _end(self, call: StagingCall[Any]) -> None:
        del self._held[call]
        call.end(self._gave_way())

    def _gave_way(self) -> Refusal:
        return Refusal(
            ErrorReason.DRAINING,
            f"others bring {self._what} too, and this call was waited for, or the "
            "newest, as there was no room for all",
            cure="ask again: nothing was changed",
        )

    def _no_place(self, why: str) -> Refusal:
        return Refusal(
            ErrorReason.WAIT_TIMEOUT,
            f"{self._count_max} calls that bring {self._what} are under way, and {why}",
            cure="ask again: nothing was changed",
        )


def _now_s() -> float:
    return asyncio.get_running_loop().time()


async def _next_of(requests: AsyncIterator[Message]) -> Message | None:
    return await anext(requests, None)
