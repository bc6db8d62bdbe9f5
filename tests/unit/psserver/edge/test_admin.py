"""The admin port: what it answers, to whom, and what it holds for strangers."""

import asyncio
import ipaddress
import json
import socket
import ssl
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Final

import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from uvicorn.protocols.http.h11_impl import H11Protocol

from psserver.config import ConfigurationError, ListenConfig, OptionError
from psserver.edge import admin, guard
from psserver.edge.access import Access
from psserver.edge.admin import AdminPort
from psserver.edge.limits import Limits
from psserver.logs import RefusalLog
from pswire.addresses import Address, parse_address
from pswire.reasons import ErrorReason, Refusal
from pswire.security.roles import Role
from tests.doubles.job_tokens import JobTokens
from tests.doubles.made_certificates import SERVER, MadeCertificates

WAIT_S: Final = 20.0
LIMITS: Final = replace(Limits(), admin_connections=4)
LOOPBACK: Final = ListenConfig(address=Address("127.0.0.1", 0))

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def error(self) -> str:
        return str(json.loads(self.body)["error"])


class Served:
    """A port that is served, what it does, and its clients."""

    port: AdminPort

    def __init__(self, tls: ssl.SSLContext | None) -> None:
        self._tls = tls
        self._writers: list[asyncio.StreamWriter] = []
        self.changes: list[bytes] = []
        self.waiting_count = 0
        self.go_on = asyncio.Event()

    async def change(self, request: Request) -> Response:
        self.changes.append(await request.body())
        return JSONResponse({"done": True})

    async def wait(self, _: Request) -> Response:
        self.waiting_count += 1
        await self.go_on.wait()
        return PlainTextResponse("1")

    @property
    def address(self) -> str:
        return self.port.url.split("/")[2]

    async def connected(self) -> Streams:
        host, number = astuple(parse_address(self.address))
        reader, writer = await asyncio.open_connection(
            host, number, ssl=self._tls, server_hostname=self._tls and "localhost"
        )
        self._writers.append(writer)
        return reader, writer

    def close(self) -> None:
        for each in self._writers:
            each.transport.abort()

    async def ask(
        self,
        path: str,
        method: str = "GET",
        body: bytes = b"",
        streams: Streams | None = None,
        **headers: str,
    ) -> Answer:
        reader, writer = streams or await self.connected()
        sent = {"Host": self.address, "Content-Length": str(len(body))}
        sent |= {name.replace("_", "-"): value for name, value in headers.items()}
        lines = [f"{method} {path} HTTP/1.1", *(f"{k}: {v}" for k, v in sent.items())]
        writer.write("\r\n".join([*lines, "", ""]).encode() + body)
        return await read_answer(reader)

    @property
    def is_timed(self) -> bool:
        """Whether the one connection ends by itself unless a request comes."""
        (connection,) = self.port._connections
        return connection._request_timer is not None

    async def is_full(self) -> None:
        """Returns when as many connections are open as may be."""
        await until(lambda: len(self.port._connections) == LIMITS.admin_connections)


async def read_answer(reader: asyncio.StreamReader) -> Answer:
    async with asyncio.timeout(WAIT_S):
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        first, *lines = head.splitlines()
        headers = dict(line.lower().split(": ", 1) for line in lines if line)
        length = int(headers.get("content-length", "0"))
        return Answer(int(first.split()[1]), headers, await reader.readexactly(length))


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not is_so():  # noqa: ASYNC110, nothing tells of a connection's end
            await asyncio.sleep(0.005)


async def ended(reader: asyncio.StreamReader) -> bytes:
    """What comes until the other side ends the connection."""
    async with asyncio.timeout(WAIT_S):
        try:
            return await reader.read()
        except ConnectionResetError:
            return b""


@asynccontextmanager
async def served(
    listen: ListenConfig = LOOPBACK,
    access: Access | None = None,
    unready_reason: str = "",
    folder: Path | None = None,
) -> AsyncIterator[Served]:
    async def refuse(_: Request) -> Response:
        raise Refusal(ErrorReason.WAIT_TIMEOUT, "nobody trains")

    async def fail(_: Request) -> Response:
        raise ValueError("a secret")

    async def large(_: Request) -> Response:
        return PlainTextResponse(b"x" * (16 << 20))

    tls = None
    if (files := listen.credentials.tls) is not None:
        assert files.ca is not None
        tls = ssl.create_default_context(cafile=str(files.ca))
    client = Served(tls)
    async with AdminPort(
        listen,
        access,
        LIMITS,
        unready_reason=lambda: unready_reason,
        routes=[
            Route("/value", lambda _: PlainTextResponse("1"), methods=["GET"]),
            Route("/change", client.change, methods=["POST"]),
            Route("/refuse", refuse),
            Route("/fail", fail),
            Route("/large", large),
            Route("/wait", client.wait),
        ],
        open_routes=[Mount("/page", StaticFiles(directory=folder))] if folder else [],
    ) as port:
        client.port = port
        try:
            yield client
        finally:
            client.close()


async def test_health_and_readiness_are_apart() -> None:
    async with served(unready_reason="its state can't be written: no room") as port:
        assert (await port.ask("/healthz")).body == b"ok\n"
        answer = await port.ask("/readyz")
        assert answer.status == 503
        assert answer.body == b"not ready: its state can't be written: no room\n"
    async with served() as port:
        answer = await port.ask("/readyz")
        assert (answer.status, answer.body) == (200, b"ready\n")
        port.port.drain()
        assert (await port.ask("/readyz")).status == 503


async def test_a_connection_serves_several_requests() -> None:
    async with served() as port:
        streams = await port.connected()
        for _ in range(3):
            assert (await port.ask("/value", streams=streams)).body == b"1"
        answer = await port.ask("/nothing", streams=streams)
        assert answer.status == 404
        assert answer.headers["cache-control"] == "no-store"
    async with served() as port:
        reader, writer = await port.connected()
        writer.write(b"HEAD /value HTTP/1.1\r\nHost: localhost\r\n\r\n" * 2)
        for _ in range(2):
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200 OK")


async def test_files_are_those_of_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "page"
    folder.mkdir()
    (folder / "a.txt").write_text("a")
    (tmp_path / "secret.txt").write_text("secret")
    async with served(folder=folder) as port:
        assert (await port.ask("/page/a.txt")).body == b"a"
        for path in ("/page/../secret.txt", "/page/%2e%2e/secret.txt", "/page/%2e./"):
            answer = await port.ask(path)
            assert answer.status == 404
            assert b"secret" not in answer.body


async def test_a_refusal_is_told_and_a_bug_is_not(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Of other tests there may have been all lines of these ten seconds.
    monkeypatch.setattr(guard, "_refusal_log", RefusalLog(admin.log))
    async with served() as port:
        answer = await port.ask("/refuse")
        assert answer.status == 504
        assert "nobody trains" in answer.error
        answer = await port.ask("/fail")
        assert answer.status == 500
        assert "secret" not in answer.error
        assert "a secret" in caplog.text


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("evil.example", 421),
        ("evil.example:80", 421),
        ("", 421),
        ("[::1", 421),
        ("127.0.0.1", 200),
        ("10.0.0.7:9090", 200),
        ("[fe80::1]:80", 200),
        ("localhost:80", 200),
        (socket.gethostname(), 200),
    ],
)
async def test_a_name_of_somebody_elses_leads_nowhere(host: str, status: int) -> None:
    async with served() as port:
        assert (await port.ask("/value", Host=host)).status == status


@pytest.mark.parametrize("host", ["Trainer-1", "trainer-1:9090", "TRAINER-1"])
async def test_names_of_this_machine_have_no_case(
    host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "Trainer-1")
    async with served() as port:
        assert (await port.ask("/value", Host=host)).status == 200


@pytest.mark.parametrize(
    ("path", "status"),
    [("/healthz", 200), ("/readyz", 200), ("/value", 421), ("/", 421)],
)
async def test_a_probe_by_an_old_protocol_needs_no_host(path: str, status: int) -> None:
    async with served() as port:
        reader, writer = await port.connected()
        writer.write(f"GET {path} HTTP/1.0\r\n\r\n".encode())
        assert (await read_answer(reader)).status == status


@pytest.mark.parametrize("everywhere", ["0.0.0.0", "::"])
async def test_where_it_listens_everywhere_it_names_a_number_that_answers(
    everywhere: str,
) -> None:
    listen = ListenConfig(address=Address(everywhere, 0), insecure=True)
    try:
        async with served(listen) as port:
            host = parse_address(port.address).host
            assert host == "localhost" or ipaddress.ip_address(host)
            assert (await port.ask("/value")).status == 200
    except ConfigurationError as error:
        pytest.skip(f"this machine has no such addresses: {error}")


async def test_another_origin_changes_nothing() -> None:
    async with served() as port:
        for origin in ("http://evil.example", "null", f"https://{port.address}"):
            answer = await port.ask("/change", "POST", b"{}", Origin=origin)
            assert answer.status == 403
            assert "may change nothing" in answer.error
        assert port.changes == []
        own = f"http://{port.address}"
        assert (await port.ask("/change", "POST", b"{}", Origin=own)).status == 200
        assert (await port.ask("/change", "POST", b"again")).status == 200
        assert port.changes == [b"{}", b"again"]


async def test_roles_say_who_reads_and_who_changes(tmp_path: Path) -> None:
    tokens = JobTokens(tmp_path)

    def bearer(role: Role) -> str:
        return f"Bearer {tokens.path(role.value).read_text()}"

    listen = replace(LOOPBACK, tokens=tokens.store)
    access = Access.of(listen)
    assert access is not None
    async with served(listen, access) as port:
        assert (await port.ask("/healthz")).status == 200
        assert (await port.ask("/readyz")).status == 200
        for shown in ("", "Bearer x", "Basic"):
            answer = await port.ask("/value", Authorization=shown)
            assert answer.status == 401
            assert answer.headers["www-authenticate"] == "bearer"
        # A page that has a token may have any name.
        answer = await port.ask(
            "/value", Authorization=bearer(Role.READER), Host="job.example"
        )
        assert answer.status == 200
        for role in Role:
            assert (await port.ask("/value", Authorization=bearer(role))).status == 200
            answer = await port.ask("/change", "POST", Authorization=bearer(role))
            assert answer.status == (200 if role is Role.ADMIN else 403)
        tokens.revoke(Role.ADMIN.value)
        access.look()  # as the daemon does each second
        former = bearer(Role.ADMIN)
        assert (await port.ask("/change", "POST", Authorization=former)).status == 401
        assert port.changes == [b""]


async def test_certificates_serve_https_and_let_nobody_change(tmp_path: Path) -> None:
    made = MadeCertificates(tmp_path)
    listen = ListenConfig(
        address=Address("127.0.0.1", 0), credentials=made.credentials(SERVER)
    )
    async with served(listen.admin(listen.address), Access.of(listen)) as port:
        assert port.port.url.startswith("https://127.0.0.1:")
        assert (await port.ask("/value")).body == b"1"
        answer = await port.ask("/change", "POST")
        assert answer.status == 403
        assert "certificates" in answer.error
        assert port.changes == []


async def test_renewed_certificates_are_shown_to_the_next_client(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pswire.security.certificates.LOOK_INTERVAL_S", 0.0)
    made, other = (MadeCertificates(tmp_path / name) for name in ("a", "b"))
    listen = ListenConfig(
        address=Address("127.0.0.1", 0), credentials=made.credentials(SERVER)
    )

    async def shown(port: Served) -> bytes | None:
        _, writer = await port.connected()
        return writer.get_extra_info("ssl_object").getpeercert(binary_form=True)  # type: ignore[no-any-return]

    async with served(listen) as port:
        port._tls = ssl.create_default_context()
        port._tls.check_hostname, port._tls.verify_mode = False, ssl.CERT_NONE
        before = await shown(port)
        assert await shown(port) == before
        made.take_over(other)
        assert await shown(port) != before


@pytest.fixture
def short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin, "REQUEST_S", 0.2)
    monkeypatch.setattr(admin, "UNREAD_S", 0.2)


@pytest.mark.usefixtures("short_times")
@pytest.mark.parametrize(
    "begun",
    [
        b"",
        b"GET /value HTTP/1.1\r\nHost: loc",
        b"POST /change HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{",
    ],
    ids=["nothing", "headers", "body"],
)
async def test_a_request_that_does_not_end_ends_its_connection(begun: bytes) -> None:
    async with served() as port:
        reader, writer = await port.connected()
        writer.write(begun)
        assert await ended(reader) == b""
        assert port.changes == []
        await until(lambda: not port.port._connections)


async def test_time_begins_again_with_each_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with served() as port:
        reader, writer = await port.connected()
        first = asyncio.create_task(port.ask("/wait", streams=(reader, writer)))
        await until(lambda: port.waiting_count == 1)
        assert not port.is_timed
        monkeypatch.setattr(admin, "REQUEST_S", 0.2)
        port.go_on.set()
        assert (await first).status == 200
        writer.write(b"GET /val")
        assert await ended(reader) == b""


@pytest.mark.usefixtures("short_times")
async def test_a_handshake_that_does_not_end_ends_its_connection(
    tmp_path: Path,
) -> None:
    made = MadeCertificates(tmp_path)
    listen = ListenConfig(
        address=Address("127.0.0.1", 0), credentials=made.credentials(SERVER)
    )
    async with served(listen) as port:
        port._tls = None
        reader, writer = await port.connected()
        assert await ended(reader) == b""
        reader, writer = await port.connected()
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        await ended(reader)
        await until(lambda: not port.port._connections)


@pytest.mark.usefixtures("short_times")
async def test_an_answer_that_nobody_reads_ends_its_connection() -> None:
    async with served() as port:
        _, writer = await port.connected()
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(b"GET /large HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await until(lambda: len(port.port._connections) == 1)
        await until(lambda: not port.port._connections)


async def test_answers_that_nobody_reads_make_room_for_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They don't hold every place for `UNREAD_S`, and who asks is not sent away."""
    monkeypatch.setattr(admin, "UNREAD_KEPT_S", 0.0)
    pipelined = b"GET /large HTTP/1.1\r\nHost: localhost\r\n\r\n" * 64
    async with served() as port:
        held = []
        for _ in range(LIMITS.admin_connections):
            reader, writer = await port.connected()
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            writer.write(pipelined)
            held.append(reader)
        connections = port.port._connections
        await until(
            lambda: (
                len(connections) == LIMITS.admin_connections
                and all(each.is_unread for each in connections)
            )
        )
        streams = await port.connected()
        assert (await port.ask("/value", streams=streams)).status == 200
        assert (await port.ask("/value")).status == 200
        # Whoever asks, and reads, is not sent away before those who don't.
        assert (await port.ask("/value", streams=streams)).status == 200
        assert port.port.refused_count == 2


async def test_a_body_in_chunks_is_refused_and_not_parsed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """To parse what comes at a time, in chunks of a byte, takes most of a second."""
    byte_counts: Counter[type] = Counter()

    def count(kind: type[H11Protocol]) -> None:
        receive = kind.data_received

        def counted(protocol: H11Protocol, data: bytes) -> None:
            receive(protocol, data)
            byte_counts[kind] += len(data)

        monkeypatch.setattr(kind, "data_received", counted)

    count(H11Protocol)
    count(admin._Connection)
    async with served() as port:
        reader, writer = await port.connected()
        head = b"POST /change HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked"
        sent = head + b"\r\n\r\n" + b"1\r\nx\r\n" * 20_000
        writer.write(sent)
        answer = await read_answer(reader)
        assert (answer.status, port.changes) == (411, [])
        assert "Content-Length" in answer.error
        await until(lambda: byte_counts[admin._Connection] == len(sent))
        assert byte_counts[H11Protocol] <= admin.PIECE_BYTES
        assert port.is_timed


async def test_an_endless_body_is_refused() -> None:
    async with served() as port:
        reader, writer = await port.connected()
        head = (
            b"POST /change HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10000000000"
        )
        writer.write(head + b"\r\n\r\n")
        for _ in range(32):
            writer.write(b"x" * 4096)
        answer = await read_answer(reader)
        assert (answer.status, port.changes) == (413, [])
        assert "65536 bytes" in answer.error
        assert port.is_timed


async def test_endless_headers_are_refused() -> None:
    async with served() as port:
        reader, writer = await port.connected()
        writer.write(b"GET / HTTP/1.1\r\n" + b"X-A: " + b"x" * 17_000)
        assert (await read_answer(reader)).status == 400
        await ended(reader)


async def test_bytes_that_are_no_http_are_refused() -> None:
    async with served() as port:
        reader, writer = await port.connected()
        writer.write(b"PRI * HTTP/2.0\r\n\r\n\x00\x01")
        assert (await read_answer(reader)).status in (400, 404, 421)


async def test_many_connections_make_room_for_the_next_one() -> None:
    async with served() as port:
        streams = [await port.connected() for _ in range(LIMITS.admin_connections)]
        await port.is_full()
        assert (await port.ask("/value")).status == 200
        assert await ended(streams[0][0]) == b""
        assert port.port.refused_count == 1
        # The one that was of use last stays longest.
        assert (await port.ask("/value", streams=streams[1])).status == 200
        await port.ask("/value")
        assert await ended(streams[2][0]) == b""
        assert (await port.ask("/value", streams=streams[1])).status == 200
        assert len(port.port._connections) == LIMITS.admin_connections


async def test_no_answer_under_way_ends_for_others() -> None:
    async with served() as port:
        asked = [
            asyncio.create_task(port.ask("/wait"))
            for _ in range(LIMITS.admin_connections)
        ]
        await until(lambda: port.waiting_count == len(asked))
        reader, _ = await port.connected()
        assert await ended(reader) == b""
        assert port.port.refused_count == 1
        port.go_on.set()
        assert [each.status for each in await asyncio.gather(*asked)] == [200] * 4


async def test_nothing_is_left_when_it_ends() -> None:
    async with AsyncExitStack() as stack:
        port = await stack.enter_async_context(served())
        reader, _ = await port.connected()
        await until(lambda: len(port.port._connections) == 1)
        address = port.port.url
    assert await ended(reader) == b""
    assert port.port._connections == {}
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", int(address.rsplit(":", 1)[1][:-1]))


async def test_a_port_in_use_is_named() -> None:
    async with served() as port:
        number = int(port.address.rpartition(":")[2])
        taken = LOOPBACK.admin(Address("127.0.0.1", number))
        with pytest.raises(ConfigurationError, match=r"in use.*--admin-listen"):
            async with served(taken):
                pass


def test_beyond_loopback_it_needs_what_listen_needs(tmp_path: Path) -> None:
    everywhere = Address("0.0.0.0", 9090)
    with pytest.raises(OptionError, match=r"--admin-listen 0\.0\.0\.0:9090 .*--tokens"):
        LOOPBACK.admin(everywhere).validate()
    # No client shows a certificate here: tokens say who calls.
    credentials = MadeCertificates(tmp_path).credentials(SERVER)
    mutual = replace(LOOPBACK, credentials=credentials)
    with pytest.raises(OptionError, match="without authentication: anyone"):
        mutual.admin(everywhere).validate()
    replace(mutual, tokens=tmp_path / "tokens.json").admin(everywhere).validate()
    replace(LOOPBACK, insecure=True).admin(everywhere).validate()
