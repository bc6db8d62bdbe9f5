"""What a daemon answers to a doctor, as one who calls by gRPC has it."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest

from psserver.edge.limits import DEFAULT_LIMITS
from psserver.edge.open_calls import OpenCalls
from psserver.edge.probe import probe_handler
from psserver.edge.server import ServerKind, make_server
from pswire.error_details import refusal_from_rpc_error
from pswire.limits import PROBE_BYTES_MAX, PROTOCOL_VERSION
from pswire.reasons import ErrorReason
from pswire.shared_memory.machine import Machine
from pswire.v1 import probe_service_pb2 as pb
from pswire.v1.probe_service_pb2_grpc import ProbeServiceStub
from psworker.transport.probe_client import probing
from tests.doubles.http2_client import DATA, Http2Client, message

TIMEOUT_S = 10.0


@asynccontextmanager
async def serving(*, shares_memory: bool = True) -> AsyncIterator[str]:
    handler = probe_handler(None, shares_memory=shares_memory)
    server = make_server(ServerKind.SHARD, [handler], OpenCalls(DEFAULT_LIMITS))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


async def test_a_daemon_says_what_it_is() -> None:
    async with serving() as address, probing(address, "it") as client:
        found = await client.ask(TIMEOUT_S)
        assert await client.sent_bytes_per_s(TIMEOUT_S) > 0
        assert await client.received_bytes_per_s(TIMEOUT_S) > 0

    assert found.protocol_version == PROTOCOL_VERSION
    assert found.versions.keys() == {"torch", "grpcio", "protobuf", "python"}
    assert (found.caller_host, found.knows_callers) == ("127.0.0.1", False)
    assert abs(found.unix_s - found.halfway_unix_s) <= found.taken_s
    assert found.sharing_obstacle == Machine.here().obstacle(Machine.here())


async def test_a_shard_that_shares_no_memory_says_so() -> None:
    async with (
        serving(shares_memory=False) as address,
        probing(address, "it") as client,
    ):
        assert "switched off" in (await client.ask(TIMEOUT_S)).sharing_obstacle


def test_memory_is_shared_by_processes_of_one_user_and_one_machine() -> None:
    here = Machine("boot", "net:[1]", 5)
    assert here.obstacle(here) == ""
    assert "another machine" in here.obstacle(Machine("other", "net:[1]", 5))
    assert "network namespace" in here.obstacle(Machine("boot", "net:[2]", 5))
    assert "as user 5, the caller as 6" in here.obstacle(Machine("boot", "net:[1]", 6))
    assert "Linux" in here.obstacle(Machine("", "", 5))
    assert Machine.here().user_id == os.geteuid()


async def all_of(
    stub: ProbeServiceStub,
    **fields: Any,  # noqa: ANN401, of the message
) -> tuple[str, int]:
    """Why a call is refused, or how many bytes it has returned."""
    count = 0
    try:
        call: Any = stub.Probe(pb.ProbeRequest(**fields), timeout=TIMEOUT_S)
        async for each in call:
            count += len(each.payload)
    except grpc.aio.AioRpcError as error:
        refusal = refusal_from_rpc_error(error)
        assert refusal is not None
        return refusal.reason.name, count
    return "", count


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, ("", 0)),
        ({"wanted_byte_count": PROBE_BYTES_MAX}, ("", PROBE_BYTES_MAX)),
        ({"wanted_byte_count": 1_048_577}, ("", 1_048_577)),
        ({"payload": bytes(PROBE_BYTES_MAX)}, ("", 0)),
        ({"payload": bytes(PROBE_BYTES_MAX + 1)}, (ErrorReason.LIMIT_EXCEEDED.name, 0)),
        ({"wanted_byte_count": PROBE_BYTES_MAX + 1}, ("LIMIT_EXCEEDED", 0)),
        ({"wanted_byte_count": -1}, ("LIMIT_EXCEEDED", 0)),
    ],
)
async def test_bytes_are_limited(
    fields: dict[str, object], expected: tuple[str, int]
) -> None:
    async with serving() as address, grpc.aio.insecure_channel(address) as channel:
        assert await all_of(ProbeServiceStub(channel), **fields) == expected


async def test_one_machine_has_one_unread_answer_with_bytes() -> None:
    """What nobody reads takes memory, and training goes on beside it."""
    async with serving() as address, grpc.aio.insecure_channel(address) as channel:
        stub = ProbeServiceStub(channel)
        many = pb.ProbeRequest(wanted_byte_count=PROBE_BYTES_MAX)
        with Http2Client(address) as client:
            client.begin("/pswire.v1.ProbeService/Probe")
            client.send(message(many.SerializeToString()), ends=True)
            # Asked sooner, a probe would have the one place itself.
            await asyncio.to_thread(read_one, client)
            busy = await all_of(stub, wanted_byte_count=1)
            assert busy == (ErrorReason.BUSY.name, 0)
            assert await all_of(stub) == ("", 0), "what asks for no bytes is answered"
        await until(stub, ("", 1))


def read_one(client: Http2Client) -> None:
    """Reads the first data of the answer, and no more."""
    while not any(kind == DATA for kind, *_ in client.frames()):
        pass


async def until(stub: ProbeServiceStub, expected: tuple[str, int]) -> None:
    """Asks for a byte until it is answered so."""
    async with asyncio.timeout(TIMEOUT_S):
        while await all_of(stub, wanted_byte_count=1) != expected:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
