"""A refusal arrives as it left, whatever its length, over a real server."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import cast

import grpc
import grpc.aio
import pytest
from google.rpc import status_pb2  # type: ignore[import-untyped]  # has no stubs
from grpc_status import rpc_status

from pswire.channels import ChannelKind, aio_channel, blocking_channel
from pswire.error_details import (
    DETAILS_KEY,
    STATUS_BYTES_MAX,
    details_text,
    is_decided,
    refusal_from_rpc_error,
    status_code,
    trailing_metadata,
)
from pswire.reasons import CATALOGUE, ErrorReason, Refusal
from pswire.v1 import error_pb2

METHOD = "/test.Refuser/Refuse"

Handler = Callable[[bytes, "grpc.aio.ServicerContext[bytes, bytes]"], Awaitable[bytes]]


@asynccontextmanager
async def serving(handler: Handler) -> AsyncIterator[str]:
    server = grpc.aio.server()
    server.add_generic_rpc_handlers(
        (
            grpc.method_handlers_generic_handler(
                "test.Refuser", {"Refuse": grpc.unary_unary_rpc_method_handler(handler)}
            ),
        )
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


def refusing(refusal: Refusal) -> Handler:
    async def refuse(
        request: bytes, context: "grpc.aio.ServicerContext[bytes, bytes]"
    ) -> bytes:
        await context.abort(
            status_code(refusal.reason),
            details_text(refusal),
            trailing_metadata(refusal),
        )

    return refuse


async def error_of(handler: Handler) -> grpc.aio.AioRpcError:
    async with (
        serving(handler) as address,
        aio_channel(address, ChannelKind.CONTROL) as channel,
    ):
        refuse: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]
        refuse = channel.unary_unary(METHOD)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await refuse(b"", timeout=10)
    return caught.value


def long_difference(line_count: int, line: str) -> Refusal:
    lines = "\n".join(line.format(number) for number in range(line_count))
    return Refusal(
        ErrorReason.SCHEMA_MISMATCH,
        f"the model differs from the job's:\n{lines}",
        **{f"fact{number}": "ä" * 1_000 for number in range(20)},
    )


async def test_a_refusal_arrives_whole() -> None:
    refusal = Refusal(
        ErrorReason.CHUNK_DIGEST_MISMATCH,
        "größer\nals 5 %",
        chunk_index=7,
        worker_id="w0",
    )

    error = await error_of(refusing(refusal))

    read = refusal_from_rpc_error(error)
    assert read is not None
    assert (read.reason, read.message, read.facts) == (
        refusal.reason,
        refusal.message,
        refusal.facts,
    )
    assert error.code() is grpc.StatusCode.DATA_LOSS
    assert error.details() == refusal.text


@pytest.mark.parametrize("reason", ErrorReason)
def test_every_reason_survives_encoding(reason: ErrorReason) -> None:
    # Beside it may be when to try again.
    encoded = dict(trailing_metadata(Refusal(reason, "it happened")))[DETAILS_KEY]
    assert isinstance(encoded, bytes)

    status = status_pb2.Status.FromString(encoded)
    detail = error_pb2.ErrorDetail()
    assert status.details[0].Unpack(detail)
    assert int(detail.reason) == int(reason)
    assert detail.retryable is CATALOGUE[reason].retryable
    assert status.code == status_code(reason).value[0]


async def test_a_cure_of_its_own_arrives() -> None:
    refusal = Refusal(ErrorReason.LIMIT_EXCEEDED, "too long", cure="shorten it")

    error = await error_of(refusing(refusal))

    assert error.details() == "too long; shorten it"
    read = refusal_from_rpc_error(error)
    assert read is not None
    assert read.text == refusal.text


async def test_a_blocking_client_reads_it_too() -> None:
    refusal = Refusal(ErrorReason.DRAINING, "stopping")

    async with serving(refusing(refusal)) as address:
        error = await asyncio.to_thread(blocking_error, address)

    read = refusal_from_rpc_error(error)
    assert read is not None
    assert (read.reason, read.message) == (refusal.reason, refusal.message)
    # gRPC's own library finds it where it looks for it.
    status = rpc_status.from_call(cast("grpc.Call", error))
    assert status is not None
    assert status.message == refusal.text


def blocking_error(address: str) -> grpc.RpcError:
    with blocking_channel(address, ChannelKind.CONTROL) as channel:
        refuse: grpc.UnaryUnaryMultiCallable[bytes, bytes]
        refuse = channel.unary_unary(METHOD)
        with pytest.raises(grpc.RpcError) as caught:
            refuse(b"", timeout=10)
    return caught.value


@pytest.mark.parametrize(
    ("line_count", "line"),
    [
        (5_000, "! model.layers.{}.weight: parameter [3, 4] float32 in the job"),
        (5_000, "- модель.слой.{}.вес: parameter [3, 4] float32 (only here)"),
        (3, "- " + "é" * 50_000 + "{}"),
        (1, "x" * 1_000_000 + "{}"),
        (50, "😀" * 100 + "%{}"),
    ],
)
async def test_a_long_difference_arrives_without_its_middle(
    line_count: int, line: str
) -> None:
    refusal = long_difference(line_count, line)

    error = await error_of(refusing(refusal))

    # gRPC puts RESOURCE_EXHAUSTED in its place when metadata is too large.
    assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
    read = refusal_from_rpc_error(error)
    assert read is not None
    for text in (read.message, error.details() or ""):
        lines = text.split("\n")
        assert lines[0] == "the model differs from the job's:"
        assert lines[-1][-9:] in f"{refusal.message}\n{refusal.text}"
    cure = CATALOGUE[refusal.reason].cure
    assert (error.details() or "").endswith(f"; {cure}")


def test_what_is_left_out_is_counted() -> None:
    refusal = long_difference(5_000, "- model.{}: parameter [3] float32 (only here)")

    detail = details_text(refusal).split("\n")
    (left_out,) = [line for line in detail if line.startswith("... and ")]
    assert left_out == f"... and {5_001 - (len(detail) - 1)} more"
    assert detail[1] == "- model.0: parameter [3] float32 (only here)"
    assert detail[-1].startswith("- model.4999: parameter")


@pytest.mark.parametrize("length", [0, 100, 1_000, 3_500, 3_700, 100_000])
@pytest.mark.parametrize("character", ["a", "%", "é", "😀", "\n", "\ud800"])
def test_the_metadata_is_bounded(length: int, character: str) -> None:
    facts = {f"{number}{character * length}": character * length for number in range(9)}
    refusal = Refusal(ErrorReason.INTERNAL, character * length, **facts)

    ((_, encoded),) = trailing_metadata(refusal)
    assert len(encoded) <= STATUS_BYTES_MAX


async def test_an_error_of_another_program_carries_none() -> None:
    async def fail(
        request: bytes, context: "grpc.aio.ServicerContext[bytes, bytes]"
    ) -> bytes:
        await context.abort(grpc.StatusCode.NOT_FOUND, "nothing here")

    error = await error_of(fail)

    assert refusal_from_rpc_error(error) is None
    assert is_decided(error.code())


def broken_details() -> list[bytes]:
    ((_, encoded),) = trailing_metadata(Refusal(ErrorReason.INTERNAL, "x"))
    status = status_pb2.Status.FromString(encoded)
    later, foreign, garbled = (status_pb2.Status() for _ in range(3))
    later.details.add().Pack(error_pb2.ErrorDetail(reason=999))  # type: ignore[arg-type]
    foreign.details.add().Pack(status)
    garbled.CopyFrom(status)
    garbled.details[0].value = b"\xff"
    return [
        b"",
        b"\xff\xff",
        encoded[:-3],
        *(item.SerializeToString() for item in (later, foreign, garbled)),
    ]


@pytest.mark.parametrize("encoded", broken_details())
def test_details_that_make_no_sense_carry_none(encoded: bytes) -> None:
    error = grpc.aio.AioRpcError(
        grpc.StatusCode.INTERNAL,
        grpc.aio.Metadata(),
        grpc.aio.Metadata((DETAILS_KEY, encoded)),
    )

    assert refusal_from_rpc_error(error) is None


def test_an_error_without_metadata_carries_none() -> None:
    assert refusal_from_rpc_error(grpc.RpcError()) is None
