"""What the interceptor decides of one call, without a server."""

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final, cast

import grpc
import pytest

from psserver.edge.access import (
    Access,
    KnownTokens,
    check_speaks_for,
    wanted_worker_id,
)
from pswire.reasons import Refusal
from pswire.security.roles import Identity, Role
from pswire.security.tokens import Metadata
from tests.doubles.job_tokens import JobTokens

WATCH: Final = "/pswire.v1.CoordinatorService/WatchWorker"
STATUS: Final = "/pswire.v1.CoordinatorService/GetStatus"
SAN: Final = "x509_subject_alternative_name"


class Context:
    """What a handler sees of its call, and how it was ended."""

    def __init__(self, metadata: Metadata = (), *names: str) -> None:
        self._metadata = metadata
        self._names = names
        self.ended: tuple[grpc.StatusCode, str] | None = None

    def invocation_metadata(self) -> Metadata:
        return self._metadata

    def auth_context(self) -> dict[str, list[bytes]]:
        return {SAN: [name.encode() for name in self._names]}

    def peer(self) -> str:
        return "ipv4:10.0.0.1:1"

    async def abort(self, code: grpc.StatusCode, text: str, _: object) -> None:
        self.ended = code, text
        raise grpc.aio.AbortError


async def admitted(access: Access, method: str, behavior: Any, **kind: bool) -> Any:  # noqa: ANN401
    """The checked behavior of a method."""

    async def find(_: grpc.HandlerCallDetails) -> "grpc.RpcMethodHandler[Any, Any]":
        if kind:
            return grpc.unary_stream_rpc_method_handler(behavior)
        return grpc.unary_unary_rpc_method_handler(behavior)

    details = cast("grpc.HandlerCallDetails", type("Details", (), {"method": method}))
    handler = await access.intercept_service(find, details)
    assert handler is not None
    return handler.unary_stream if kind else handler.unary_unary


async def speaks_for(request: str, _: object) -> str:
    check_speaks_for(request)
    return wanted_worker_id("")


@pytest.mark.parametrize(
    ("names", "worker_id", "spoken"),
    [
        (("DNS:x", Identity(Role.WORKER, "w0").uri), "w0", "w0"),
        ((Identity(Role.WORKER).uri,), "w7", ""),
    ],
)
async def test_a_certificate_says_who_calls(
    names: tuple[str, ...], worker_id: str, spoken: str
) -> None:
    behavior = await admitted(Access(), STATUS, speaks_for)
    assert await behavior(worker_id, Context((), *names)) == spoken


@pytest.mark.parametrize("names", [(), ("localhost", "paramserver:root/")])
async def test_a_certificate_without_a_role_is_none(names: tuple[str, ...]) -> None:
    behavior = await admitted(Access(), STATUS, speaks_for)
    context = Context((), *names)
    with pytest.raises(grpc.aio.AbortError):
        await behavior("", context)
    assert context.ended is not None
    code, text = context.ended
    assert code is grpc.StatusCode.UNAUTHENTICATED
    assert text.startswith("missing or invalid credential")


async def test_a_certificate_of_a_worker_speaks_for_no_other_one() -> None:
    behavior = await admitted(Access(), STATUS, speaks_for)
    with pytest.raises(Refusal, match="'w0' may not speak for worker 'w1'"):
        await behavior("w1", Context((), Identity(Role.WORKER, "w0").uri))


def test_without_credentials_everybody_speaks_for_everybody() -> None:
    check_speaks_for("w0")
    assert wanted_worker_id("w1") == "w1"


async def test_a_call_ends_when_its_token_expires(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And one whose token counts goes on, though the file was written anew."""
    now = datetime(2026, 11, 30, tzinfo=UTC)
    tokens = JobTokens(tmp_path)
    tokens.create("short", Role.WORKER, expires=now + timedelta(hours=1))
    clock = [now]
    access = Access(KnownTokens(tokens.store, lambda: clock[0]))

    async def watch(_: object, __: object) -> AsyncIterator[int]:
        yield 1
        await asyncio.Event().wait()

    behavior = await admitted(access, WATCH, watch, is_stream=True)
    short, lasting = (Context(tokens.metadata(name)) for name in ("short", "worker"))

    async def read(context: Context, started: asyncio.Event) -> None:
        async for _ in behavior(None, context):
            started.set()

    events = [asyncio.Event(), asyncio.Event()]
    tasks = [
        asyncio.ensure_future(read(context, event))
        for context, event in zip((short, lasting), events, strict=True)
    ]
    for event in events:
        await event.wait()
    tokens.create("another")
    for _ in range(2):
        access.look()
    (warning,) = (each for each in caplog.messages if "ends at" in each)
    assert "has calls open: replace it before" in warning
    clock[0] += timedelta(hours=1)
    access.look()
    with pytest.raises(grpc.aio.AbortError):
        await tasks[0]
    assert not tasks[1].done()
    tasks[1].cancel()
    await asyncio.gather(tasks[1], return_exceptions=True)
    assert not access._calls
    assert short.ended is not None
    code, text = short.ended
    assert (code, "has expired" in text) == (grpc.StatusCode.UNAUTHENTICATED, True)
    assert lasting.ended is None


async def test_a_stranger_who_makes_methods_up_is_given_no_memory(
    tmp_path: Path,
) -> None:
    access = Access(KnownTokens(JobTokens(tmp_path).store))
    for number in range(100):
        behavior = await admitted(access, f"/made.Up/Method{number}", speaks_for)
        with pytest.raises(grpc.aio.AbortError):
            await behavior("", Context())
    assert not access._checked
    assert not access._calls


async def test_what_a_refused_caller_still_sends_is_read_and_dropped() -> None:
    """Its gRPC would say INTERNAL in place of the reason (grpc/grpc#36066)."""
    read = []

    async def send() -> AsyncIterator[int]:
        for number in range(3):
            read.append(number)
            yield number

    async def find(_: grpc.HandlerCallDetails) -> "grpc.RpcMethodHandler[Any, Any]":
        return grpc.stream_unary_rpc_method_handler(speaks_for)

    details: Any = type("Details", (), {"method": STATUS})
    handler: Any = await Access().intercept_service(find, details)
    with pytest.raises(grpc.aio.AbortError):
        await handler.stream_unary(send(), Context())
    assert read == [0, 1, 2]
