"""All calls of a server: how many there are, whose, and how long one may be silent.

What grpc.aio leaves open: it reads the one message of a unary call before its handler
begins, for ever if none comes, and sends the one answer after the handler has ended,
for ever if it is not read. So every method is served as one with streams on both sides,
which is the same on the wire. What is refused here costs nothing that stays.
"""

import asyncio
from collections import Counter
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
)
from contextlib import ExitStack, aclosing, contextmanager
from typing import Any, Final, cast

import grpc
import grpc.aio

from psserver.edge.access import Access
from psserver.edge.guard import (
    Context,
    abort,
    address_of,
    behavior_of,
    machine_of,
)
from psserver.edge.limits import Limits
from pswire.reasons import ErrorReason, Refusal

Messages = AsyncGenerator[Any]
Find = Callable[
    [grpc.HandlerCallDetails], Awaitable["grpc.RpcMethodHandler[Any, Any] | None"]
]

NEW_WORK: Final = frozenset(
    {
        "DeclareOptimizer",
        "Join",
        "LoadState",
        "PullOptimizerState",
        "PullSnapshot",
        "RegisterShard",
        "RegisterWorker",
        "RequestSnapshot",
        "RestoreCheckpoint",
        "SaveCheckpoint",
        "Seed",
        "StageOptimizerState",
    }
)
"""Methods that a full process refuses. All others are of members that train, or cost
nothing that stays."""

FOR_READERS: Final = frozenset({"PullSnapshot", "RequestSnapshot"})
"""Methods whose answers anybody may ask for, and not read."""


class OpenCall:
    """A call under way.

    Attributes:
        peer: Where it comes from, as `HOST:PORT`.
        machine: The machine of that.
        method: Its method, without the service.
        unread_since_s: Since when its answer waits to be read; None while it does not.
    """

    __slots__ = ("machine", "method", "peer", "unread_since_s")

    def __init__(self, peer: str, machine: str, method: str) -> None:
        self.peer = peer
        self.machine = machine
        self.method = method
        self.unread_since_s: float | None = None


class _Counted:
    """How many calls of some callers are under way, and how many there may be."""

    def __init__(self, whose: str, calls_max: int, machine_calls_max: int) -> None:
        self._whose = whose
        self._calls_max = calls_max
        self._machine_calls_max = machine_calls_max
        self._count = 0
        self._of_machine: Counter[str] = Counter()

    def check_room(self, machine: str) -> None:
        """Refuses one more call.

        Raises:
            Refusal: `BUSY`.
        """
        if self._count >= self._calls_max:
            raise Refusal(
                ErrorReason.BUSY,
                f"{self._count} calls{self._whose} are under way, of at most "
                f"{self._calls_max} (calls)",
            )
        if self._of_machine[machine] >= self._machine_calls_max:
            raise Refusal(
                ErrorReason.BUSY,
                f"{self._machine_calls_max} calls{self._whose} of {machine} are under "
                "way, as many as one machine may have (machine-calls)",
            )

    @contextmanager
    def one_more(self, machine: str) -> Iterator[None]:
        """A call is under way meanwhile."""
        self._count += 1
        self._of_machine[machine] += 1
        try:
            yield
        finally:
            self._count -= 1
            self._of_machine[machine] -= 1
            if not self._of_machine[machine]:
                del self._of_machine[machine]


class OpenCalls(grpc.aio.ServerInterceptor):
    """Admits calls within the limits. In the event loop.

    Attributes:
        limits: The limits.
        access: Lets in who may call; None for everybody.
        full: Why there is no room for new work, in words; empty while there is.
        refused: Calls that were not let in, or came too late, by the reason.
        ended: Connections that were ended, by why.
    """

    def __init__(self, limits: Limits, access: Access | None = None) -> None:
        self.limits = limits
        self.access = access
        self._calls: dict[OpenCall, None] = {}
        self._counted = _Counted("", limits.calls, limits.machine_calls)
        # Whoever waits for a message may do so for seconds before it is asked for its
        # credential: that must never take the last place of a member.
        self._strangers = _Counted(
            " without a valid credential", limits.calls // 2, limits.machine_calls // 2
        )
        self.full = ""
        self.refused: Counter[ErrorReason] = Counter()
        self.ended: Counter[str] = Counter()

    @property
    def count(self) -> int:
        """Calls under way."""
        return len(self._calls)

    @property
    def peers(self) -> set[str]:
        """Where the calls under way come from."""
        return {call.peer for call in self._calls}

    def unread(self, now_s: float) -> dict[str, str]:
        """Peers that have not read an answer for too long, and its method."""
        found = {}
        for call in self._calls:
            since_s = call.unread_since_s
            limit_s = (
                self.limits.reader_unread_s
                if call.method in FOR_READERS
                else self.limits.unread_s
            )
            if since_s is not None and now_s - since_s >= limit_s:
                found[call.peer] = call.method
        return found

    @contextmanager
    def admitted(
        self, peer: str, machine: str, method: str, *, is_stranger: bool = False
    ) -> Iterator[OpenCall]:
        """A call is under way meanwhile.

        Args:
            peer: Where it comes from, as `HOST:PORT`.
            machine: The machine of that.
            method: Its method, without the service.
            is_stranger: Whether its caller is known by no credential though it has to
                be: all of those together have half of each limit.

        Raises:
            Refusal: `BUSY`; nothing is kept of the call.
        """
        if self.full and method in NEW_WORK:
            raise Refusal(
                ErrorReason.BUSY, f"there is no room for new work: {self.full}"
            )
        counted = [self._counted, self._strangers] if is_stranger else [self._counted]
        for each in counted:
            each.check_room(machine)
        call = OpenCall(peer, machine, method)
        self._calls[call] = None
        with ExitStack() as stack:
            stack.callback(self._calls.pop, call)
            for each in counted:
                stack.enter_context(each.one_more(machine))
            yield call

    async def intercept_service(
        self, continuation: Find, handler_call_details: grpc.HandlerCallDetails
    ) -> "grpc.RpcMethodHandler[Any, Any] | None":
        """Puts the limits around a method."""
        handler = cast("Any", await continuation(handler_call_details))
        if handler is None:
            return None
        method = str(handler_call_details.method).rpartition("/")[2]
        header_bytes = _size_of(handler_call_details.invocation_metadata)

        async def bounded(_: object, context: Context) -> Messages:
            try:
                self._check_headers(header_bytes)
                peer = address_of(context)
                with self.admitted(
                    *(peer, machine_of(context), method),
                    is_stranger=self.access is not None
                    and not self.access.knows(context),
                ) as call:
                    now_s = asyncio.get_running_loop().time
                    async with aclosing(
                        await self._answers(handler, method, context)
                    ) as answers:
                        async for answer in answers:
                            call.unread_since_s = now_s()
                            yield answer
                            call.unread_since_s = None
            except Refusal as refusal:
                self.refused[refusal.reason] += 1
                await abort(context, refusal)

        return grpc.stream_stream_rpc_method_handler(
            bounded, handler.request_deserializer, handler.response_serializer
        )

    def _check_headers(self, byte_count: int) -> None:
        """Refuses headers that gRPC has let through.

        It advertises its limit, which its own clients keep, and reads 16 MiB.

        Raises:
            Refusal: `LIMIT_EXCEEDED`.
        """
        if byte_count > self.limits.metadata_bytes:
            raise Refusal(
                ErrorReason.LIMIT_EXCEEDED,
                f"the headers of the call have {byte_count} bytes, of at most "
                f"{self.limits.metadata_bytes} (metadata-bytes)",
            )

    async def _answers(
        self,
        handler: Any,  # noqa: ANN401, a method's of gRPC
        method: str,
        context: Context,
    ) -> Messages:
        """What a handler answers, whatever its kind is.

        Raises:
            Refusal: `WAIT_TIMEOUT` or `MALFORMED_MESSAGE`, of one that takes a message.
        """
        request: Any
        if handler.request_streaming:
            request = self._messages(method, context)
        else:
            request = await self._first(method, context)
            if request is grpc.aio.EOF:
                raise Refusal(ErrorReason.MALFORMED_MESSAGE, "the call has no message")
        found = behavior_of(handler)(request, context)
        if hasattr(found, "__aiter__"):
            return cast("Messages", found)
        return _awaited(found, is_answer=not handler.response_streaming)

    async def _first(self, method: str, context: Context) -> Any:  # noqa: ANN401
        """The first message of a call, which comes in time; `EOF` if it has none.

        Not by gRPC's iterator: one that is left after a message is closed by a task.

        Raises:
            Refusal: `WAIT_TIMEOUT`.
        """
        limit_s = self.limits.first_message_s
        try:
            async with asyncio.timeout(limit_s):
                return await context.read()
        except TimeoutError:
            raise Refusal(
                ErrorReason.WAIT_TIMEOUT,
                f"a call of {method} was silent for {limit_s:g} s instead of sending "
                "its first message",
            ) from None

    async def _messages(self, method: str, context: Context) -> Messages:
        message = await self._first(method, context)
        while message is not grpc.aio.EOF:
            yield message
            message = await context.read()


def _size_of(metadata: Iterable[tuple[str, str | bytes]] | None) -> int:
    return sum(len(key) + len(value) for key, value in metadata or ())


async def _awaited(found: Awaitable[Any], *, is_answer: bool) -> Messages:
    """The answer of a handler; none of one that writes its answers itself."""
    answer = await found
    if is_answer:
        yield answer
