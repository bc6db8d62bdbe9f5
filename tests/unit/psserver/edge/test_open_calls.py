"""Calls of a server are counted, begin in time, and are read in time.

A client of bytes stands where gRPC's own would behave.
"""

import asyncio
import gc
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import grpc
import grpc.aio
import pytest

from psserver.edge.access import ROLES, Access, KnownTokens
from psserver.edge.guard import Context, machine_of_address, streaming, unary
from psserver.edge.limits import Limits
from psserver.edge.open_calls import NEW_WORK, OpenCalls
from psserver.edge.room import Room
from psserver.edge.server import ServerKind, make_server
from pswire.error_details import refusal_from_rpc_error
from pswire.reasons import CATALOGUE, ErrorReason
from pswire.security.roles import Role
from pswire.security.tokens import Metadata
from pswire.v1 import coordinator_service_pb2, parameter_service_pb2
from tests.doubles.http2_client import Http2Client
from tests.doubles.job_tokens import JobTokens

TIMEOUT_S: Final = 30.0
PATH: Final = "/test.Probe/"


class Probe:
    """A server with a method of each kind, and what it has of its calls.

    Attributes:
        calls: Its calls.
        address: Where it listens.
        begun: Set when a handler has its first message.
    """

    def __init__(self, limits: Limits, access: Access | None) -> None:
        self.calls = OpenCalls(limits, access)
        self.begun = asyncio.Event()
        self.is_over = asyncio.Event()
        self._server = make_server(ServerKind.SHARD, [self._handler()], self.calls)
        self.port = 0

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def start(self) -> None:
        self.port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()

    async def stop(self) -> None:
        self.is_over.set()
        await self._server.stop(None)

    async def ended(self) -> None:
        """Returns when no call is under way."""
        async with asyncio.timeout(TIMEOUT_S):
            while self.calls.count:  # noqa: ASYNC110, what ends them is gRPC's
                await asyncio.sleep(0.01)

    def _handler(self) -> grpc.GenericRpcHandler:
        async def echo(request: bytes, context: Context) -> bytes:
            self.begun.set()
            return request

        async def held(request: bytes, context: Context) -> bytes:
            self.begun.set()
            await self.is_over.wait()
            return request

        async def gathered(requests: AsyncIterator[bytes], context: Context) -> bytes:
            return b"".join([each async for each in requests])

        async def much(request: bytes, context: Context) -> AsyncIterator[bytes]:
            self.begun.set()
            for _ in range(64):
                yield bytes(1 << 20)

        async def both(
            requests: AsyncIterator[bytes], context: Context
        ) -> AsyncIterator[bytes]:
            async for each in requests:
                yield each

        async def exhausted(request: bytes, context: Context) -> bytes:
            raise RuntimeError("can't start new thread")

        methods: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "Echo": grpc.unary_unary_rpc_method_handler(unary(echo)),
            "Held": grpc.unary_unary_rpc_method_handler(unary(held)),
            "Join": grpc.stream_unary_rpc_method_handler(unary(gathered)),
            "Much": grpc.unary_stream_rpc_method_handler(streaming(much)),
            "Both": grpc.stream_stream_rpc_method_handler(streaming(both)),
            "Exhausted": grpc.unary_unary_rpc_method_handler(unary(exhausted)),
        }
        return grpc.method_handlers_generic_handler("test.Probe", methods)


@asynccontextmanager
async def probing(
    access: Access | None = None, /, **limits: float
) -> AsyncIterator[tuple[Probe, grpc.aio.Channel]]:
    probe = Probe(Limits(**limits), access)  # type: ignore[arg-type]
    await probe.start()
    try:
        async with grpc.aio.insecure_channel(
            probe.address, options=[("grpc.use_local_subchannel_pool", 1)]
        ) as channel:
            yield probe, channel
    finally:
        await probe.stop()


async def echoed(
    channel: grpc.aio.Channel, method: str = "Echo", metadata: Metadata = ()
) -> bytes:
    call: Any = channel.unary_unary(PATH + method)
    answer: bytes = await call(b"x", timeout=TIMEOUT_S, metadata=metadata)
    return answer


def reason_of(error: grpc.aio.AioRpcError) -> ErrorReason:
    refusal = refusal_from_rpc_error(error)
    assert refusal is not None, error
    return refusal.reason


async def test_every_kind_of_method_is_answered_as_without_limits() -> None:
    async with probing() as (probe, channel):
        assert await echoed(channel) == b"x"
        join: Any = channel.stream_unary(PATH + "Join")
        assert await join(iter([b"a", b"b"]), timeout=TIMEOUT_S) == b"ab"
        both: Any = channel.stream_stream(PATH + "Both")
        call = both(iter([b"a", b"b"]), timeout=TIMEOUT_S)
        assert [each async for each in call] == [b"a", b"b"]
        much: Any = channel.unary_stream(PATH + "Much")
        sizes = [len(each) async for each in much(b"", timeout=TIMEOUT_S)]
        assert sizes == [1 << 20] * 64
        await probe.ended()


async def test_a_call_of_one_message_leaves_no_iterator_to_be_closed() -> None:
    """asyncio makes a task for each that is left, which doubles what a call costs."""
    async with probing() as (probe, channel):
        assert await echoed(channel) == b"x"
        left: list[object] = []
        before = sys.get_asyncgen_hooks()
        sys.set_asyncgen_hooks(finalizer=left.append)
        try:
            for _ in range(3):
                assert await echoed(channel) == b"x"
            await probe.ended()
            gc.collect()
        finally:
            sys.set_asyncgen_hooks(*before)
        assert left == []


@pytest.mark.parametrize("limit", ["calls", "machine_calls"])
async def test_calls_beyond_the_limit_are_to_be_tried_again(limit: str) -> None:
    async with probing(**{limit: 16}) as (probe, channel):
        held = [asyncio.ensure_future(echoed(channel, "Held")) for _ in range(16)]
        async with asyncio.timeout(TIMEOUT_S):
            while probe.calls.count < 16:  # noqa: ASYNC110, gRPC's
                await asyncio.sleep(0.01)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await echoed(channel)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert reason_of(caught.value) is ErrorReason.BUSY
        assert CATALOGUE[ErrorReason.BUSY].retryable
        assert ("grpc-retry-pushback-ms", "500") in list(
            caught.value.trailing_metadata()
        )
        assert f"({limit.replace('_', '-')})" in str(caught.value.details())
        probe.is_over.set()
        await asyncio.gather(*held)
        assert await echoed(channel) == b"x"
        await probe.ended()


@pytest.mark.parametrize("limit", ["calls", "machine_calls"])
async def test_strangers_leave_half_of_all_calls_to_those_who_may_call(
    limit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ROLES, PATH + "Echo", frozenset({Role.WORKER}))
    tokens = JobTokens(tmp_path)
    access = Access(KnownTokens(tokens.store))
    async with probing(access, **{limit: 16}) as (probe, channel):
        with Http2Client(probe.address) as silent:
            for _ in range(8):
                silent.begin(PATH + "Echo")  # and not a word more
            async with asyncio.timeout(TIMEOUT_S):
                while probe.calls.count < 8:  # noqa: ASYNC110, gRPC's
                    await asyncio.sleep(0.01)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await echoed(channel)
            assert reason_of(caught.value) is ErrorReason.BUSY
            text = str(caught.value.details())
            assert f"({limit.replace('_', '-')})" in text
            assert "8 calls without a valid credential" in text
            member = tokens.metadata(Role.WORKER.value)
            assert await echoed(channel, metadata=member) == b"x"
        await probe.ended()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await echoed(channel)
        assert reason_of(caught.value) is ErrorReason.UNAUTHENTICATED


@pytest.mark.parametrize("method", ["Echo", "Join", "Much", "Both"])
@pytest.mark.parametrize("sent", [b"", b"\0\0\0\0\5ab"], ids=["nothing", "a part"])
async def test_a_call_whose_first_message_does_not_come_ends(
    method: str, sent: bytes
) -> None:
    async with probing(first_message_s=0.05) as (probe, _):
        with Http2Client(probe.address) as client:
            client.begin(PATH + method)
            if sent:
                client.send(sent)
            status, text = await asyncio.to_thread(client.status)
        assert status == grpc.StatusCode.DEADLINE_EXCEEDED.value[0]
        assert f"a call of {method} was silent for 0.05 s" in text
        await probe.ended()


async def test_a_call_that_ends_without_its_message_is_malformed() -> None:
    async with probing() as (probe, _):
        with Http2Client(probe.address) as client:
            client.begin(PATH + "Echo")
            client.send(b"", ends=True)
            status, text = await asyncio.to_thread(client.status)
        assert status == grpc.StatusCode.INVALID_ARGUMENT.value[0]
        assert "the call has no message" in text


async def test_an_answer_that_is_not_read_ends_with_its_connection() -> None:
    async with probing(unread_s=0.0) as (probe, channel):
        with Http2Client(probe.address) as client:
            client.begin(PATH + "Much")
            client.send(b"\0\0\0\0\0", ends=True)
            now_s = asyncio.get_running_loop().time
            # A connection that answers no ping ends as well, later.
            async with asyncio.timeout(TIMEOUT_S):
                await probe.begun.wait()
                while "Much" not in probe.calls.unread(now_s()).values():  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            room = Room(probe.calls, probe.port)
            while probe.calls.count:
                room.look(now_s())
                await asyncio.sleep(0.01)
            assert await asyncio.to_thread(client.is_ended)
        assert await echoed(channel) == b"x", "others go on"


async def test_a_machine_has_so_many_connections_and_those_with_calls_stay() -> None:
    async with probing(machine_connections=4) as (probe, channel):
        held = asyncio.ensure_future(echoed(channel, "Held"))
        await probe.begun.wait()
        idle = [socket.create_connection(("127.0.0.1", probe.port)) for _ in range(6)]
        for each in idle:
            await asyncio.to_thread(each.recv, 1)  # gRPC has it
            each.setblocking(False)
        Room(probe.calls, probe.port).look(asyncio.get_running_loop().time())
        async with asyncio.timeout(TIMEOUT_S):
            while sum(map(_is_ended, idle)) < 3:  # noqa: ASYNC110, gRPC's
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)  # in which more of them would end
        assert sum(map(_is_ended, idle)) == 3
        assert not held.done()
        for each in idle:
            each.close()
        probe.is_over.set()
        await held


def _is_ended(connection: socket.socket) -> bool:
    try:
        while connection.recv(4096):
            pass
    except BlockingIOError:
        return False
    except ConnectionError:
        pass
    return True


async def test_a_full_process_refuses_new_work_and_goes_on_with_steps() -> None:
    async with probing() as (probe, channel):
        probe.calls.full = "there is no memory"
        assert await echoed(channel) == b"x"
        join: Any = channel.stream_unary(PATH + "Join")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await join(iter([b"a"]), timeout=TIMEOUT_S)
        assert reason_of(caught.value) is ErrorReason.BUSY
        probe.calls.full = ""
        assert await join(iter([b"a"]), timeout=TIMEOUT_S) == b"a"


async def test_what_the_system_has_none_left_of_is_to_be_tried_again() -> None:
    async with probing() as (_, channel):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await echoed(channel, "Exhausted")
        assert reason_of(caught.value) is ErrorReason.BUSY
        assert "no thread left" in str(caught.value.details())


def test_new_work_is_of_methods_that_there_are() -> None:
    methods = {
        method.name
        for file in (coordinator_service_pb2, parameter_service_pb2)
        for service in file.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    }
    assert methods >= NEW_WORK


@pytest.mark.parametrize(
    ("address", "machine"),
    [
        ("10.0.0.7:1234", "10.0.0.7"),
        ("[2001:db8:1:2:aaaa::1]:5", "2001:db8:1:2::/64"),
        ("[::1]:5", "::1"),
        ("[fe80::1%eth0]:5", "fe80::/64"),
        ("unix:", "unix"),
    ],
)
def test_a_network_of_ipv6_is_one_machine(address: str, machine: str) -> None:
    assert machine_of_address(address) == machine
