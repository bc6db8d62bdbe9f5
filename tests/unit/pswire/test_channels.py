"""Every setting of a channel has its value for a reason, and does what it says."""

import asyncio
import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import grpc
import grpc.aio
import pytest

from pswire.channels import (
    ChannelKind,
    aio_channel,
    blocking_channel,
    channel_options,
    has_inherited_channels,
    has_own_channels,
)
from pswire.keepalive import (
    CONTROL_KEEPALIVE,
    DATA_KEEPALIVE,
    PING_INTERVAL_MIN_MS,
    keepalive_options,
    ping_allowance_options,
)
from pswire.limits import MESSAGE_BYTES_MAX

ECHO = "/test.Echo/Echo"
PEER = "/test.Echo/Peer"
Context = grpc.aio.ServicerContext[bytes, bytes]
Call = grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]

every_kind = pytest.mark.parametrize("kind", ChannelKind)


async def echo(request: bytes, context: Context) -> bytes:
    return request * 2


async def peer(request: bytes, context: Context) -> bytes:
    return context.peer().encode()


def make_server() -> grpc.aio.Server:
    server = grpc.aio.server(options=[("grpc.max_receive_message_length", -1)])
    methods: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {
        "Echo": grpc.unary_unary_rpc_method_handler(echo),
        "Peer": grpc.unary_unary_rpc_method_handler(peer),
    }
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("test.Echo", methods),)
    )
    return server


@asynccontextmanager
async def serving() -> AsyncIterator[str]:
    server = make_server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


@asynccontextmanager
async def listening(
    handle: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
) -> AsyncIterator[str]:
    """Somebody who speaks no gRPC; every connection is closed at the end."""
    writers: list[asyncio.StreamWriter] = []

    async def accept(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        writers.append(writer)
        await handle(reader, writer)

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for writer in writers:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()


@every_kind
@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("grpc.keepalive_permit_without_calls", 1, "find a dead peer between calls"),
        ("grpc.http2.max_pings_without_data", 0, "a watch is silent for hours"),
        ("grpc.initial_reconnect_backoff_ms", 100, "a restart costs no second"),
        ("grpc.max_reconnect_backoff_ms", 2_000, "a long outage costs no minute"),
        ("grpc.min_reconnect_backoff_ms", 2_000, "a lost SYN is sent again after 1 s"),
        ("grpc.dns_min_time_between_resolutions_ms", 2_000, "a host may move"),
        ("grpc.enable_retries", 0, "a push is never resent unseen"),
        ("grpc.enable_http_proxy", 0, "http_proxy breaks even loopback"),
        ("grpc.max_receive_message_length", 8 << 20, "bounded memory"),
        ("grpc.max_send_message_length", 8 << 20, "fails here rather than there"),
        ("grpc.use_local_subchannel_pool", 1, "a connection for each kind"),
        ("grpc.default_compression_algorithm", 0, "gradients do not compress"),
        ("grpc.compression_enabled_algorithms_bitset", 1, "no compressed bombs"),
    ],
)
def test_every_setting_has_its_value(
    kind: ChannelKind, name: str, value: int, why: str
) -> None:
    assert dict(channel_options(kind))[name] == value, why


@pytest.mark.parametrize(
    ("kind", "interval_ms", "timeout_ms", "why"),
    [
        (ChannelKind.CONTROL, 1_000, 1_500, "a lost worker is noticed in seconds"),
        (ChannelKind.DATA, 10_000, 5_000, "a call's deadline decides first"),
        (ChannelKind.SNAPSHOT, 10_000, 5_000, "a call's deadline decides first"),
    ],
)
def test_keepalive_is_that_of_the_kind(
    kind: ChannelKind, interval_ms: int, timeout_ms: int, why: str
) -> None:
    options = dict(channel_options(kind))

    assert options["grpc.keepalive_time_ms"] == interval_ms, why
    assert options["grpc.keepalive_timeout_ms"] == timeout_ms, why
    assert options["grpc.http2.ping_timeout_ms"] == timeout_ms, "alone finds a SIGSTOP"


@every_kind
def test_no_setting_is_untested_or_given_twice(kind: ChannelKind) -> None:
    names = [name for name, _ in channel_options(kind)]

    assert len(names) == len(set(names)) == 16


@every_kind
def test_no_channel_pings_more_often_than_servers_allow(kind: ChannelKind) -> None:
    interval_ms = dict(channel_options(kind))["grpc.keepalive_time_ms"]

    allowance = dict(ping_allowance_options())
    assert allowance["grpc.http2.min_ping_interval_without_data_ms"] == 500
    assert allowance["grpc.http2.max_ping_strikes"] == 3
    assert int(interval_ms) >= 2 * PING_INTERVAL_MIN_MS


async def test_a_proxy_in_the_environment_is_passed_by(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("http_proxy", "https_proxy", "grpc_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")

    async with (
        serving() as address,
        aio_channel(address, ChannelKind.DATA) as channel,
    ):
        call: Call = channel.unary_unary(ECHO)
        assert await call(b"x", timeout=10) == b"xx"


async def test_a_message_above_the_limit_is_not_sent() -> None:
    async with (
        serving() as address,
        aio_channel(address, ChannelKind.DATA) as channel,
    ):
        call: Call = channel.unary_unary(ECHO)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(bytes(MESSAGE_BYTES_MAX + 1), timeout=10)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "Sent message larger than max" in str(caught.value.details())


async def test_a_message_above_the_limit_is_not_received() -> None:
    async with (
        serving() as address,
        aio_channel(address, ChannelKind.DATA) as channel,
    ):
        call: Call = channel.unary_unary(ECHO)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(bytes(MESSAGE_BYTES_MAX // 2 + 1), timeout=10)
        whole = await call(bytes(MESSAGE_BYTES_MAX // 2), timeout=10)
        assert len(whole) == MESSAGE_BYTES_MAX
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "Received message larger than max" in str(caught.value.details())


async def test_every_channel_has_a_connection_of_its_own() -> None:
    async with serving() as address:
        kinds = [*ChannelKind, ChannelKind.DATA]
        channels = [aio_channel(address, kind) for kind in kinds]
        calls: list[Call] = [channel.unary_unary(PEER) for channel in channels]
        peers = [await call(b"", timeout=10) for call in calls]
        for channel in channels:
            await channel.close()

    assert len(set(peers)) == len(kinds)


async def test_a_blocking_channel_works_the_same() -> None:
    def call_twice(address: str) -> bytes:
        with blocking_channel(address, ChannelKind.SNAPSHOT) as channel:
            call: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(ECHO)
            return call(b"x", timeout=10)

    async with serving() as address:
        assert await asyncio.to_thread(call_twice, address) == b"xx"


async def test_a_peer_that_is_away_is_tried_again_soon() -> None:
    """Five attempts take 1 s; gRPC's own settings spread them over 9 s."""
    attempted = asyncio.Semaphore(0)

    async def slam(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        attempted.release()
        writer.close()

    async with (
        listening(slam) as address,
        aio_channel(address, ChannelKind.CONTROL) as channel,
    ):
        call: Call = channel.unary_unary(ECHO)
        waiting = call(b"x", wait_for_ready=True, timeout=30)
        async with asyncio.timeout(30):
            for _ in range(5):
                await attempted.acquire()
        assert not waiting.done()
        waiting.cancel()


async def test_a_peer_that_hangs_is_noticed_long_before_the_deadline() -> None:
    """A stopped process: its kernel takes every byte, nobody answers a ping.

    In 2.5 s, where a channel for data would not have asked yet after 10.
    """

    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"\0\0\0\x04\0\0\0\0\0")  # HTTP/2 settings, empty
        while await reader.read(1 << 16):
            pass
        writer.close()

    async with (
        listening(hang) as address,
        aio_channel(address, ChannelKind.CONTROL) as channel,
    ):
        call: Call = channel.unary_unary(ECHO)
        started = asyncio.get_running_loop().time()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(b"x", timeout=60)
        noticed_after_ms = 1000 * (asyncio.get_running_loop().time() - started)

    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert "ping timeout" in str(caught.value.details())
    assert noticed_after_ms < DATA_KEEPALIVE.interval_ms


def test_servers_ping_with_the_same_settings() -> None:
    options = dict(keepalive_options(CONTROL_KEEPALIVE))

    assert options["grpc.keepalive_time_ms"] == CONTROL_KEEPALIVE.interval_ms
    assert options["grpc.http2.ping_timeout_ms"] == CONTROL_KEEPALIVE.timeout_ms


@pytest.mark.parametrize(("given", "expected"), [(None, "ERROR"), ("DEBUG", "DEBUG")])
def test_grpc_is_quiet_about_forks_unless_told_otherwise(
    given: str | None, expected: str
) -> None:
    environment = {**os.environ, "GRPC_VERBOSITY": given or ""}
    if given is None:
        del environment["GRPC_VERBOSITY"]
    program = (
        "import sys, pswire, os; assert 'grpc' not in sys.modules; "
        "print(os.environ['GRPC_VERBOSITY'])"
    )

    printed = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )

    assert printed.stdout.strip() == expected


def test_a_thread_may_ask_for_channels_while_others_make_some() -> None:
    held = []

    async def make() -> None:
        for _ in range(300):
            channel = aio_channel("127.0.0.1:1", ChannelKind.DATA)
            held.append(channel)
            await channel.close()

    threads = [threading.Thread(target=asyncio.run, args=(make(),)) for _ in range(2)]
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            assert not has_inherited_channels()
    finally:
        sys.setswitchinterval(interval_s)
        for thread in threads:
            thread.join()
    assert has_own_channels()
