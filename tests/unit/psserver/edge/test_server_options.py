"""Every setting of a server has its value for a reason, and does what it says."""

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, closing, suppress
from typing import Any

import grpc
import grpc.aio
import pytest

from psserver.edge import guard
from psserver.edge.guard import Context, as_refusal, streaming, unary
from psserver.edge.limits import DEFAULT_LIMITS, Limits
from psserver.edge.open_calls import OpenCalls
from psserver.edge.server import ServerKind, make_server, server_options
from psserver.logs import RefusalLog
from pswire import keepalive
from pswire.channels import ChannelKind, aio_channel, channel_options
from pswire.error_details import refusal_from_rpc_error
from pswire.keepalive import (
    PING_INTERVAL_MIN_MS,
    coordinator_keepalive,
    reconnect_grace_ms,
)
from pswire.limits import MESSAGE_BYTES_MAX
from pswire.reasons import ErrorReason, Refusal

UNARY = "/test.Probe/Unary"
STREAM = "/test.Probe/Stream"
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
EMPTY_SETTINGS = bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
SETTINGS_TAKEN = bytes((0, 0, 0, 4, 1, 0, 0, 0, 0))
SECRET = "token=0123abcd in " + "/" + "home/user/key"

every_kind = pytest.mark.parametrize("kind", ServerKind)

Handler = Callable[[bytes, Context], Awaitable[bytes]]
StreamHandler = Callable[[bytes, Context], AsyncIterator[bytes]]


async def echo(request: bytes, context: Context) -> bytes:
    return request


async def echo_stream(request: bytes, context: Context) -> AsyncIterator[bytes]:
    yield request


@asynccontextmanager
async def serving(
    handler: Handler = echo,
    stream_handler: StreamHandler = echo_stream,
    *,
    limits: Limits = DEFAULT_LIMITS,
) -> AsyncIterator[str]:
    methods: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {
        "Unary": grpc.unary_unary_rpc_method_handler(unary(handler)),
        "Stream": grpc.unary_stream_rpc_method_handler(streaming(stream_handler)),
    }
    server = make_server(
        ServerKind.SHARD,
        [grpc.method_handlers_generic_handler("test.Probe", methods)],
        OpenCalls(limits),
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


def unary_of(
    channel: grpc.aio.Channel,
) -> "grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]":
    return channel.unary_unary(UNARY)


def stream_of(
    channel: grpc.aio.Channel,
) -> "grpc.aio.UnaryStreamMultiCallable[bytes, bytes]":
    return channel.unary_stream(STREAM)


async def call_unary(address: str) -> bytes:
    async with aio_channel(address, ChannelKind.DATA) as channel:
        return await unary_of(channel)(b"x", timeout=10)


async def call_stream(address: str) -> list[bytes]:
    async with aio_channel(address, ChannelKind.DATA) as channel:
        call = stream_of(channel)(b"x", timeout=10)
        return [response async for response in call]


# Settings


@every_kind
@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("grpc.so_reuseport", 0, "two servers on one port would share clients"),
        ("grpc.max_receive_message_length", 8 << 20, "bounded memory"),
        ("grpc.max_send_message_length", 8 << 20, "fails here rather than there"),
        ("grpc.max_concurrent_streams", 64, "one client can't open any number"),
        ("grpc.server_handshake_timeout_ms", 10_000, "idle sockets do not pile up"),
        ("grpc.max_allowed_incoming_connections", 16_384, "some descriptors are left"),
        ("grpc.max_connection_idle_ms", 30_000, "who does nothing gives its place up"),
        ("grpc.max_metadata_size", 8_192, "bounded memory"),
        ("grpc.default_compression_algorithm", 0, "gradients do not compress"),
        ("grpc.compression_enabled_algorithms_bitset", 1, "no compressed bombs"),
        ("grpc.keepalive_permit_without_calls", 1, "find a dead peer between calls"),
        ("grpc.http2.max_pings_without_data", 0, "a watch is silent for hours"),
        ("grpc.http2.min_ping_interval_without_data_ms", 500, "clients ping each 1 s"),
        ("grpc.http2.max_ping_strikes", 3, "jitter is no abuse"),
    ],
)
def test_every_setting_has_its_value(
    kind: ServerKind, name: str, value: int, why: str
) -> None:
    assert dict(server_options(kind))[name] == value, why


@pytest.mark.parametrize(
    ("kind", "interval_ms", "timeout_ms", "why"),
    [
        (ServerKind.COORDINATOR, 1_000, 1_500, "it is to notice a dead worker"),
        (ServerKind.SHARD, 10_000, 5_000, "a call's deadline decides first"),
    ],
)
def test_keepalive_is_that_of_the_kind(
    kind: ServerKind, interval_ms: int, timeout_ms: int, why: str
) -> None:
    options = dict(server_options(kind))

    assert options["grpc.keepalive_time_ms"] == interval_ms, why
    assert options["grpc.keepalive_timeout_ms"] == timeout_ms, why
    assert options["grpc.http2.ping_timeout_ms"] == timeout_ms, "alone finds a SIGSTOP"


@pytest.mark.parametrize(
    ("lease_ttl_ms", "interval_ms", "timeout_ms"),
    [
        (1_000, 200, 300),
        (2_000, 400, 600),
        (5_000, 1_000, 1_500),
        (10_000, 1_000, 1_500),
        (3_600_000, 1_000, 1_500),
    ],
)
def test_a_short_lease_makes_the_coordinator_ping_faster(
    lease_ttl_ms: int, interval_ms: int, timeout_ms: int
) -> None:
    keepalive = coordinator_keepalive(lease_ttl_ms)
    options = dict(server_options(ServerKind.COORDINATOR, keepalive=keepalive))

    assert options["grpc.keepalive_time_ms"] == interval_ms
    assert options["grpc.http2.ping_timeout_ms"] == timeout_ms
    within_ms = interval_ms + timeout_ms + reconnect_grace_ms(lease_ttl_ms)
    assert within_ms <= 0.6 * lease_ttl_ms


@every_kind
def test_no_setting_is_untested_or_given_twice(kind: ServerKind) -> None:
    names = [name for name, _ in server_options(kind)]

    assert len(names) == len(set(names)) == 17


@every_kind
@pytest.mark.parametrize("channel", ChannelKind)
def test_no_server_punishes_the_pings_of_our_channels(
    kind: ServerKind, channel: ChannelKind
) -> None:
    interval_ms = dict(channel_options(channel))["grpc.keepalive_time_ms"]
    allowed_ms = dict(server_options(kind))[
        "grpc.http2.min_ping_interval_without_data_ms"
    ]
    assert int(interval_ms) >= 2 * int(allowed_ms)
    assert allowed_ms == PING_INTERVAL_MIN_MS


# Behaviour


async def test_a_second_server_on_one_port_is_refused() -> None:
    async with serving() as address:
        second = make_server(ServerKind.SHARD, [], OpenCalls(DEFAULT_LIMITS))
        with pytest.raises(RuntimeError, match=r"[Ff]ailed to bind"):
            second.add_insecure_port(address)
        await second.stop(None)


async def test_connections_beyond_the_limit_end_and_those_before_go_on() -> None:
    async with (
        serving(limits=Limits(connections=2)) as address,
        aio_channel(address, ChannelKind.DATA) as member,
    ):
        call = unary_of(member)
        assert await call(b"x", timeout=10) == b"x"
        held = await _idle_connection(address)
        beyond = await _idle_connection(address)
        assert await _is_ended(beyond), "no place is left"
        assert await _refusal(address) is grpc.StatusCode.UNAVAILABLE, "to try again"
        assert await call(b"y", timeout=10) == b"y"
        held.close()
        async with aio_channel(address, ChannelKind.DATA) as late:
            again = unary_of(late)
            assert await again(b"z", timeout=10, wait_for_ready=True) == b"z"


async def test_a_connection_without_a_call_ends_and_its_client_comes_back() -> None:
    async with (
        serving(limits=Limits(idle_s=0.3)) as address,
        aio_channel(address, ChannelKind.DATA) as worker,
    ):
        assert await _answered(worker) == b"x"
        stranger = await _idle_connection(address)
        assert await _is_ended(stranger)
        assert await _answered(worker) == b"x"


async def _answered(channel: grpc.aio.Channel) -> bytes:
    """The answer to a call, made again where its connection has ended just then."""
    call = unary_of(channel)
    async with asyncio.timeout(30):
        while True:
            try:
                return await call(b"x", timeout=10, wait_for_ready=True)
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise


async def _refusal(address: str) -> grpc.StatusCode:
    """What a call is refused with.

    Keeps the status alone: as long as an error holds its call, gRPC keeps the closed
    channel under it, which connects again and takes a place.
    """
    try:
        await call_unary(address)
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


async def _idle_connection(address: str) -> socket.socket:
    """One that says it speaks HTTP/2, and no more."""
    host, port = address.split(":")
    held = socket.socket()
    held.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(held, (host, int(port)))
    with suppress(OSError):  # one without a place may be closed before it speaks
        await loop.sock_sendall(held, PREFACE + EMPTY_SETTINGS + SETTINGS_TAKEN)
    return held


async def _is_ended(held: socket.socket) -> bool:
    """Whether the server closes it before its time for a handshake is over."""
    loop = asyncio.get_running_loop()
    with closing(held):
        try:
            async with asyncio.timeout(DEFAULT_LIMITS.handshake_s / 2):
                while await loop.sock_recv(held, 65_536):
                    pass
        except TimeoutError:
            return False
        except ConnectionError:
            return True
    return True


async def test_a_message_above_the_limit_is_refused_and_the_server_lives() -> None:
    async with serving() as address:
        options = [
            ("grpc.max_send_message_length", -1),
            ("grpc.max_receive_message_length", -1),
        ]
        async with grpc.aio.insecure_channel(address, options=options) as channel:
            call = unary_of(channel)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call(bytes(MESSAGE_BYTES_MAX + 1), timeout=10)
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            whole = await call(bytes(MESSAGE_BYTES_MAX), timeout=10)
            assert len(whole) == MESSAGE_BYTES_MAX


async def test_a_silent_stream_that_pings_is_not_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """gRPC's own allowance of 5 minutes ends it after two pings, of which its client
    sends one a second at most."""
    monkeypatch.setattr(keepalive, "PING_STRIKE_COUNT_MAX", 1)
    enough = asyncio.Event()

    async def silent(request: bytes, context: Context) -> AsyncIterator[bytes]:
        yield b"begun"
        await enough.wait()
        yield b"ended"

    options = [
        ("grpc.keepalive_time_ms", PING_INTERVAL_MIN_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]
    async with (
        serving(stream_handler=silent) as address,
        grpc.aio.insecure_channel(address, options=options) as channel,
    ):
        stream = stream_of(channel)(b"x", timeout=60)
        assert await stream.read() == b"begun"
        await asyncio.sleep(3.0)  # it is silent: there is nothing to see
        enough.set()
        assert await stream.read() == b"ended"


# What a client sees of a failure


async def failing(request: bytes, context: Context) -> bytes:
    raise ValueError(SECRET)


async def failing_stream(request: bytes, context: Context) -> AsyncIterator[bytes]:
    yield b"first"
    raise ValueError(SECRET)


def assert_tells_nothing(error: grpc.aio.AioRpcError) -> None:
    assert error.code() is grpc.StatusCode.INTERNAL
    shown = (
        f"{error.details()} {error.trailing_metadata()} {error.debug_error_string()}"
    )
    assert "token" not in shown
    assert "Traceback" not in shown
    refusal = refusal_from_rpc_error(error)
    assert refusal is not None
    assert refusal.reason is ErrorReason.INTERNAL


async def test_what_went_wrong_stays_in_the_servers_log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Of other tests there may have been all lines of these ten seconds.
    monkeypatch.setattr(
        guard, "_refusal_log", RefusalLog(logging.getLogger("psserver"))
    )
    async with serving(failing, failing_stream) as address:
        for attempt in (call_unary, call_stream):
            caplog.clear()
            with (
                caplog.at_level(logging.ERROR, "psserver"),
                pytest.raises(grpc.aio.AioRpcError) as caught,
            ):
                await attempt(address)
            assert_tells_nothing(caught.value)
            assert SECRET in caplog.text


async def test_a_refusal_reaches_the_client_with_its_reason() -> None:
    async def refusing(request: bytes, context: Context) -> bytes:
        raise Refusal(ErrorReason.SEQUENCE_GAP, "push 9 came after push 3", sequence=9)

    async with serving(refusing) as address:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call_unary(address)
    assert caught.value.code() is grpc.StatusCode.OUT_OF_RANGE
    refusal = refusal_from_rpc_error(caught.value)
    assert refusal is not None
    assert (refusal.reason, refusal.facts) == (
        ErrorReason.SEQUENCE_GAP,
        {"sequence": "9"},
    )


async def test_a_handler_that_cancels_itself_ends_the_call_at_once() -> None:
    """gRPC leaves the client waiting for its deadline (grpc/grpc#29248)."""

    async def cancelled(request: bytes, context: Context) -> bytes:
        raise asyncio.CancelledError

    async def cancelled_stream(
        request: bytes, context: Context
    ) -> AsyncIterator[bytes]:
        yield b"first"
        raise asyncio.CancelledError

    async with serving(cancelled, cancelled_stream) as address:
        for attempt in (call_unary, call_stream):
            async with asyncio.timeout(30):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await attempt(address)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def hang_up(address: str) -> None:
    """Cancels a stream of which the first message has come."""
    async with aio_channel(address, ChannelKind.DATA) as channel:
        stream = stream_of(channel)(b"x", timeout=10)
        assert await anext(aiter(stream)) == b"first"
        stream.cancel()


async def test_a_client_that_hangs_up_ends_its_handler() -> None:
    ended = asyncio.Event()

    async def waiting(request: bytes, context: Context) -> AsyncIterator[bytes]:
        try:
            yield b"first"
            await asyncio.Event().wait()
        finally:
            ended.set()

    async with serving(stream_handler=waiting) as address:
        await hang_up(address)
        async with asyncio.timeout(30):
            await ended.wait()


async def test_who_has_hung_up_is_sent_no_status() -> None:
    """gRPC never frees what it can't send (grpc/grpc#43360)."""
    contexts: list[Context] = []
    ended = asyncio.Event()

    async def waiting(request: bytes, context: Context) -> AsyncIterator[bytes]:
        told: Any = context  # whose stub has a class where gRPC takes any callable
        told.add_done_callback(lambda _: ended.set())
        contexts.append(context)
        yield b"first"
        await asyncio.Event().wait()

    async with serving(stream_handler=waiting) as address:
        await hang_up(address)
        async with asyncio.timeout(30):
            await ended.wait()
    assert not contexts[0].done(), "which is: a status was sent"


def test_only_a_refusal_keeps_its_own_words() -> None:
    refusal = Refusal(ErrorReason.SNAPSHOT_GONE, "gone")
    assert as_refusal(refusal, "pull") is refusal
    assert as_refusal(KeyError(SECRET), "pull").message == "pull failed on the server"
    ended = as_refusal(asyncio.CancelledError(), "pull")
    assert ended.reason is ErrorReason.DRAINING
