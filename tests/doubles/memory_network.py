"""gRPC between servers and clients of one process, without a socket.

Channels, servers, calls and contexts of `grpc.aio` as far as psworker and psserver use
them. The bytes of the real codecs go through, a handler ends with a status and its
metadata, and a message that nobody reads holds up its sender, as on a connection. A
server and its clients may be on event loops of their own.

What only a socket has is not here: keepalive, limits of HTTP/2, what is not gRPC.
"""

import asyncio
import contextlib
import functools
import itertools
import threading
from collections import deque
from collections.abc import (
    AsyncIterator,
    Callable,
    Generator,
    Iterable,
    Iterator,
)
from typing import Any, Final, cast
from unittest import mock
from weakref import WeakSet

import grpc
import grpc.aio

from pswire.addresses import Address
from psworker.launch import reachability
from psworker.launch.reachability import Problem

WINDOW_BYTES: Final = 1 << 20
"""Bytes of unread messages in one direction of a call, above which a sender waits. A
single message of any size goes through."""

MEMORY_HOST: Final = "127.1.1.1"
"""Of addresses in memory. It is a loopback address at which nothing listens."""


class _Signal:
    """Wakes whoever waits on any event loop of the process."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = (
            deque()
        )

    async def until(self, is_so: Callable[[], bool]) -> None:
        loop = asyncio.get_running_loop()
        while True:
            future = loop.create_future()
            # In this order: a change between the look and the wait wakes it.
            self._waiting.append((loop, future))
            if is_so():
                return
            await future

    def wake(self) -> None:
        while True:
            try:
                loop, future = self._waiting.popleft()
            except IndexError:
                return
            with contextlib.suppress(RuntimeError):  # its loop was closed
                loop.call_soon_threadsafe(_resolve, future)


def _resolve(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)


class _Pipe:
    """Messages of one direction of a call."""

    def __init__(self) -> None:
        self._messages: deque[bytes] = deque()
        self._unread_bytes = 0
        self._is_over = False
        self._changed = _Signal()

    async def write(self, message: bytes) -> None:
        """Waits for room; what comes after the end is dropped."""
        await self._changed.until(
            lambda: (
                self._is_over
                or not self._messages
                or self._unread_bytes + len(message) <= WINDOW_BYTES
            )
        )
        self.put(message)

    def put(self, message: bytes) -> None:
        """Writes without waiting."""
        if not self._is_over:
            self._unread_bytes += len(message)
            self._messages.append(message)
            self._changed.wake()

    def end(self, *, is_cut: bool = False) -> None:
        """No message follows. If it is cut, none that was not read is either."""
        self._is_over = True
        if is_cut:
            self._messages.clear()
        self._changed.wake()

    @property
    def is_read(self) -> bool:
        return self._is_over and not self._messages

    async def read(self) -> bytes | None:
        """The next message, None after the last one."""
        await self._changed.until(lambda: bool(self._messages) or self._is_over)
        if not self._messages:
            return None
        message = self._messages.popleft()
        self._unread_bytes -= len(message)
        self._changed.wake()
        return message

    async def each(self) -> AsyncIterator[bytes]:
        while (message := await self.read()) is not None:
            yield message


class _Exchange:
    """One call, as both sides share it."""

    def __init__(self, metadata: Iterable[tuple[str, str]] | None = None) -> None:
        self.sent_metadata = tuple(metadata or ())
        self._ending = threading.Lock()
        self.requests = _Pipe()
        self.responses = _Pipe()
        self.code: grpc.StatusCode | None = None
        self.text = ""
        self.metadata: tuple[Any, ...] = ()
        self.cancel_handler: Callable[[], None] = lambda: None

    def end(
        self,
        code: grpc.StatusCode,
        text: str = "",
        metadata: tuple[Any, ...] = (),
        *,
        is_cut: bool = False,
    ) -> bool:
        """Ends the call with a status. False if it has one.

        Args:
            code: The status.
            text: Its text.
            metadata: What comes with it.
            is_cut: Whether answers that were not read are lost.
        """
        with self._ending:
            if self.code is not None:
                return False
            self.text, self.metadata, self.code = text, metadata, code
        self.requests.end(is_cut=True)
        self.responses.end(is_cut=is_cut)
        return True

    def error(self) -> grpc.aio.AioRpcError:
        assert self.code is not None
        return grpc.aio.AioRpcError(
            self.code,
            grpc.aio.Metadata(),
            grpc.aio.Metadata(*self.metadata),
            details=self.text,
        )


class _Context:
    """What a handler sees of its call."""

    def __init__(self, exchange: _Exchange, decode: Callable[[bytes], Any]) -> None:
        self._exchange = exchange
        self._decode = decode

    def peer(self) -> str:
        return f"ipv4:{MEMORY_HOST}:1"

    def done(self) -> bool:
        return self._exchange.code is not None

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return self._exchange.sent_metadata

    def auth_context(self) -> dict[str, list[bytes]]:
        return {}

    async def read(self) -> Any:  # noqa: ANN401, as in gRPC
        message = await self._exchange.requests.read()
        return grpc.aio.EOF if message is None else self._decode(message)

    async def write(self, message: bytes) -> None:
        await self._exchange.responses.write(message)

    async def abort(
        self, code: grpc.StatusCode, details: str = "", metadata: tuple[Any, ...] = ()
    ) -> None:
        self._exchange.end(code, details, metadata)
        raise grpc.aio.AbortError("Locally aborted.")


class MemoryServer:
    """Serves calls on the event loop that it is started on."""

    def __init__(
        self,
        network: "MemoryNetwork",
        interceptors: Iterable[grpc.aio.ServerInterceptor] = (),
    ) -> None:
        self._network = network
        self._interceptors = tuple(interceptors)
        self._handlers: list[grpc.GenericRpcHandler] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._exchanges: dict[asyncio.Task[None], _Exchange] = {}
        self._is_stopped = False

    def add_generic_rpc_handlers(
        self, handlers: Iterable[grpc.GenericRpcHandler]
    ) -> None:
        self._handlers += handlers

    def add_registered_method_handlers(self, *_: object) -> None:
        """Another entrance to the same handlers."""

    def add_insecure_port(self, address: str) -> int:
        return self._network.bind(self, address)

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()

    async def stop(self, grace: float | None) -> None:
        """Takes no more calls, and ends those that are not over in time."""
        self._is_stopped = True
        self._network.unbind(self)
        if self._exchanges:
            await asyncio.wait(tuple(self._exchanges), timeout=grace)
        self.drop_calls("Cancelling all calls")

    def drop_calls(self, text: str) -> None:
        """Ends all calls as a lost connection does; on the server's event loop."""
        for task, exchange in tuple(self._exchanges.items()):
            exchange.end(grpc.StatusCode.UNAVAILABLE, text, is_cut=True)
            task.cancel()

    def begin(self, method: str, exchange: _Exchange) -> bool:
        """Begins a call, from any thread. False if nobody serves."""
        if self._loop is None or self._is_stopped:
            return False
        try:
            self._loop.call_soon_threadsafe(self._begin, method, exchange)
        except RuntimeError:  # its loop was closed
            return False
        return True

    def _begin(self, method: str, exchange: _Exchange) -> None:
        if exchange.code is not None:
            return
        if self._is_stopped:
            exchange.end(grpc.StatusCode.UNAVAILABLE, "the server has stopped")
            return
        task = asyncio.ensure_future(self._serve(method, exchange))
        self._exchanges[task] = exchange
        task.add_done_callback(self._exchanges.pop)
        loop = asyncio.get_running_loop()

        def cancel() -> None:
            with contextlib.suppress(RuntimeError):  # its loop was closed
                loop.call_soon_threadsafe(task.cancel)

        exchange.cancel_handler = cancel
        if exchange.code is not None:
            task.cancel()

    async def _serve(self, method: str, exchange: _Exchange) -> None:
        handler = await self._handler(method)
        if handler is None:
            exchange.end(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
            return
        try:
            await _run(handler, exchange)
        except grpc.aio.AbortError:
            pass
        except asyncio.CancelledError:
            exchange.end(grpc.StatusCode.CANCELLED, "the handler was cancelled")
        except Exception as error:  # as gRPC does
            exchange.end(grpc.StatusCode.UNKNOWN, f"Unexpected {type(error)}: {error}")
        else:
            exchange.end(grpc.StatusCode.OK)

    async def _handler(self, method: str) -> Any:  # noqa: ANN401, as in gRPC
        details = mock.Mock(method=method, invocation_metadata=())

        async def find(details: Any) -> Any:  # noqa: ANN401
            found = (each.service(details) for each in self._handlers)
            return next((each for each in found if each is not None), None)

        for each in reversed(self._interceptors):
            find = functools.partial(each.intercept_service, find)
        return await find(details)


async def _run(handler: Any, exchange: _Exchange) -> None:  # noqa: ANN401
    decode = handler.request_deserializer or bytes
    encode = handler.response_serializer or bytes
    context = _Context(exchange, decode)
    if handler.request_streaming:
        given: Any = (decode(each) async for each in exchange.requests.each())
    else:
        message = await exchange.requests.read()
        assert message is not None, "one message comes with the call"
        given = decode(message)
    if not handler.response_streaming:
        method = handler.stream_unary or handler.unary_unary
        await exchange.responses.write(encode(await method(given, context)))
        return
    answers = (handler.stream_stream or handler.unary_stream)(given, context)
    if not hasattr(answers, "__aiter__"):
        await answers  # it writes by the context
        return
    async with contextlib.aclosing(answers):
        async for answer in answers:
            await exchange.responses.write(encode(answer))


class _Call:
    """One call as its client sees it."""

    def __init__(
        self,
        exchange: _Exchange,
        encode: Callable[[Any], bytes] | None,
        decode: Callable[[bytes], Any] | None,
        timeout: float | None,
    ) -> None:
        self._exchange = exchange
        self._encode = encode or bytes
        self._decode = decode or bytes
        self._is_cancelled = False
        self._is_written = False
        self._sending: asyncio.Task[None] | None = None
        self._answer: asyncio.Task[Any] | None = None
        self._timer: asyncio.TimerHandle | None = None
        if timeout is not None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(timeout, self._expire)

    def __del__(self) -> None:
        self.cancel()

    def put(self, request: Any) -> None:  # noqa: ANN401, as in gRPC
        """Sends the one request that there is."""
        self._exchange.requests.put(self._encode(request))
        self._exchange.requests.end()

    def send(self, requests: Iterable[Any]) -> None:
        """Begins to send the requests, one after the other."""
        self._sending = asyncio.ensure_future(self._send(requests))

    async def _send(self, requests: Iterable[Any]) -> None:
        for each in requests:
            await self._exchange.requests.write(self._encode(each))
        self._exchange.requests.end()

    def done(self) -> bool:
        return self._exchange.code is not None and self._exchange.responses.is_read

    def cancelled(self) -> bool:
        return self._exchange.code is grpc.StatusCode.CANCELLED

    def cancel(self) -> bool:
        if self._timer is not None:
            self._timer.cancel()
        if not self._exchange.end(
            grpc.StatusCode.CANCELLED, "Locally cancelled by application!", is_cut=True
        ):
            return False
        self._is_cancelled = True
        self._exchange.cancel_handler()
        return True

    def _expire(self) -> None:
        if self._exchange.end(
            grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded", is_cut=True
        ):
            self._exchange.cancel_handler()

    async def code(self) -> grpc.StatusCode:
        while await self._exchange.responses.read() is not None:
            pass
        assert self._exchange.code is not None
        return self._exchange.code

    async def write(self, request: Any) -> None:  # noqa: ANN401
        if self.done() or self._is_written:
            raise asyncio.InvalidStateError("RPC already finished.")
        try:
            await self._exchange.requests.write(self._encode(request))
        except asyncio.CancelledError:
            self.cancel()
            raise

    async def done_writing(self) -> None:
        self._is_written = True
        self._exchange.requests.end()

    async def read(self) -> Any:  # noqa: ANN401, as in gRPC
        try:
            message = await self._exchange.responses.read()
        except asyncio.CancelledError:
            self.cancel()
            raise
        if message is not None:
            return self._decode(message)
        self._raise_for_status()
        return grpc.aio.EOF

    def __aiter__(self) -> AsyncIterator[Any]:
        return self._each()

    async def _each(self) -> AsyncIterator[Any]:
        while (message := await self.read()) is not grpc.aio.EOF:
            yield message

    def __await__(self) -> Generator[Any, None, Any]:
        if self._answer is None:
            self._answer = asyncio.ensure_future(self._only_answer())
        try:
            return (yield from self._answer)
        except asyncio.CancelledError:
            self.cancel()
            raise

    async def _only_answer(self) -> Any:  # noqa: ANN401
        answer = await self.read()
        if answer is grpc.aio.EOF or await self.read() is not grpc.aio.EOF:
            raise AssertionError("a method with one answer has one")
        return answer

    def _raise_for_status(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._is_cancelled:
            raise asyncio.CancelledError
        if self._exchange.code is not grpc.StatusCode.OK:
            raise self._exchange.error()


class MemoryChannel:
    """A client's end, used on the event loop that it is made on."""

    def __init__(self, network: "MemoryNetwork", address: str) -> None:
        self._network = network
        self._address = address
        self._calls: WeakSet[_Call] = WeakSet()
        self._is_closed = False

    async def __aenter__(self) -> "MemoryChannel":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        self._is_closed = True
        for call in tuple(self._calls):
            call.cancel()

    def unary_unary(self, *method: Any, **options: Any) -> Callable[..., _Call]:  # noqa: ANN401
        return self._method(*method, **options, takes_one=True)

    def unary_stream(self, *method: Any, **options: Any) -> Callable[..., _Call]:  # noqa: ANN401
        return self._method(*method, **options, takes_one=True)

    def stream_unary(self, *method: Any, **options: Any) -> Callable[..., _Call]:  # noqa: ANN401
        return self._method(*method, **options, takes_one=False)

    def stream_stream(self, *method: Any, **options: Any) -> Callable[..., _Call]:  # noqa: ANN401
        return self._method(*method, **options, takes_one=False)

    def _method(
        self,
        method: str,
        request_serializer: Callable[[Any], bytes] | None = None,
        response_deserializer: Callable[[bytes], Any] | None = None,
        *,
        takes_one: bool,
        **_: object,
    ) -> Callable[..., _Call]:
        def call(
            requests: Any = None,  # noqa: ANN401
            timeout: float | None = None,
            metadata: Iterable[tuple[str, str]] | None = None,
        ) -> _Call:
            if self._is_closed:
                raise grpc.aio.UsageError("Channel is closed.")
            exchange = _Exchange(metadata)
            made = _Call(exchange, request_serializer, response_deserializer, timeout)
            if takes_one:
                made.put(requests)
            elif requests is not None:
                made.send(requests)
            if not self._network.begin(self._address, method, exchange):
                exchange.end(
                    grpc.StatusCode.UNAVAILABLE,
                    f"failed to connect to all addresses; last error: {self._address} "
                    "Connection refused",
                )
            self._calls.add(made)
            return made

        return call


_insecure_channel = grpc.aio.insecure_channel
_problem_reaching = reachability.problem_reaching


class MemoryNetwork:
    """Servers by their address."""

    def __init__(self) -> None:
        self._servers: dict[str, MemoryServer] = {}
        self._free_ports = itertools.count(20_000)

    def bind(self, server: MemoryServer, address: str) -> int:
        host, _, port = address.rpartition(":")
        number = int(port) or next(self._free_ports)
        bound = f"{host}:{number}"
        if bound in self._servers:
            raise RuntimeError(f"Failed to bind to address {bound}")
        self._servers[bound] = server
        return number

    def unbind(self, server: MemoryServer) -> None:
        self._servers = {
            address: each for address, each in self._servers.items() if each != server
        }

    def begin(self, address: str, method: str, exchange: _Exchange) -> bool:
        server = self._servers.get(address)
        return server is not None and server.begin(method, exchange)

    def channel(self, address: str, **options: Any) -> grpc.aio.Channel:  # noqa: ANN401
        """As `grpc.aio.insecure_channel`, which makes the channels to other hosts."""
        if not address.startswith(MEMORY_HOST):
            return _insecure_channel(address, **options)
        return cast("grpc.aio.Channel", MemoryChannel(self, address))

    def problem(self, target: Address, *timeout_s: float) -> Problem | None:
        """As `reachability.problem_reaching`, which looks for all others."""
        if str(target) in self._servers:
            return None
        return _problem_reaching(target, *timeout_s)

    def server(
        self, interceptors: Iterable[grpc.aio.ServerInterceptor] = (), **_: object
    ) -> MemoryServer:
        """As `grpc.aio.server`."""
        return MemoryServer(self, interceptors)

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """In place of gRPC's network."""
        with (
            mock.patch.object(grpc.aio, "insecure_channel", self.channel),
            mock.patch.object(grpc.aio, "server", self.server),
            mock.patch.object(reachability, "problem_reaching", self.problem),
        ):
            yield


NETWORK: Final = MemoryNetwork()
"""That of all jobs of the process, so that their addresses differ."""
