"""The admin port of a daemon: health, readiness, status and metrics by HTTP.

starlette answers, by uvicorn's protocol and in the daemon's own event loop. uvicorn's
server is left out: connections are accepted here, so that neither one that says
nothing, nor a handshake that doesn't end, nor an answer that nobody reads stays.
"""

import asyncio
import ipaddress
import logging
import socket
import ssl
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from typing import Final, Self

import grpc
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import BaseRoute, Mount, Route, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from typing_extensions import override
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from psserver.config import ListenConfig
from psserver.edge.access import Access
from psserver.edge.guard import as_refusal, machine_of_address
from psserver.edge.lifecycle import bind_problem
from psserver.edge.limits import Limits
from psserver.logs import PeerLog, RefusalLog
from pswire.addresses import Address, parse_address
from pswire.error_details import status_code
from pswire.names import printable
from pswire.security.certificates import Certificates, Pem, certificates_of
from pswire.security.credentials import TlsFiles
from pswire.security.roles import Role

BODY_BYTES_MAX: Final = 64 << 10
"""Longest body of a request."""

HEADER_BYTES_MAX: Final = 16 << 10
"""Longest line and headers of a request."""

REQUEST_S: Final = 10.0
"""Until a connection is secure, and then until each of its requests is whole."""

UNREAD_S: Final = 10.0
"""For which an answer may be unread; then its connection ends."""

UNREAD_KEPT_S: Final = 1.0
"""For which one may be unread where another connection wants its place."""

PROBES: Final = ("/healthz", "/readyz")
"""What load balancers ask, some by HTTP/1.0 without a `Host`."""

ACCEPT_PAUSE_S: Final = 0.1
"""Before the next try where there was no descriptor for a connection."""

PIECE_BYTES: Final = 4 << 10
"""Of what a connection brings, parsed before it is looked whether the rest counts."""

SAFE_METHODS: Final = frozenset({"GET", "HEAD", "OPTIONS"})
"""Methods that change nothing (RFC 9110, 9.2.1); all others are for admins."""

HEADERS: Final = (
    (b"cache-control", b"no-store"),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
)
"""Of all answers; what an answer says by itself counts."""

log = logging.getLogger("psserver")
_failures = RefusalLog(log)


class AdminPort:
    """The port, and what it serves as long as its context is entered.

    Attributes:
        refused_count: Connections that were closed for want of room.
    """

    def __init__(
        self,
        listen: ListenConfig,
        access: Access | None,
        limits: Limits,
        *,
        unready_reason: Callable[[], str],
        routes: Sequence[BaseRoute] = (),
        open_routes: Sequence[BaseRoute] = (),
    ) -> None:
        """Binds nothing yet.

        Args:
            listen: Where it listens, and what protects it.
            access: Knows the tokens of the job, if it has any.
            limits: Of those, most connections at a time.
            unready_reason: Why the daemon does not serve now, empty while it does.
            routes: For callers with any role; by methods that change something, for
                admins.
            open_routes: For everybody, beside `/healthz` and `/readyz`: what holds
                nothing of the job, as the files of a page do.
        """
        self.refused_count = 0
        self._listen = listen
        self._connections_max = limits.admin_connections
        self._unready_reason = unready_reason
        self._is_draining = False
        router = Router(
            [
                *map(Route, PROBES, (_healthy, self._ready)),
                *open_routes,
                Mount("", app=_ForCallers(Router(routes), listen, access)),
            ],
            redirect_slashes=False,
        )
        self._config = Config(
            _Front(router, listen),
            http=_Connection,
            loop="none",
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            log_level="critical",  # what a stranger sends is no line of the log
            access_log=False,
            proxy_headers=False,
            server_header=False,
            h11_max_incomplete_event_size=HEADER_BYTES_MAX,
        )
        self._config.load()
        self._state = ServerState()
        self._connections: dict[_Connection, None] = {}
        self._address = listen.address
        certificates = certificates_of(listen.credentials)
        self._tls = None if certificates is None else _tls_context(certificates)

    def bind(self) -> None:
        """Binds the port.

        Raises:
            ConfigurationError: The port is in use, or the address is not this
                machine's.
        """
        host, port = self._listen.address.host, self._listen.address.port
        is_v6 = ":" in host
        try:
            self._socket = socket.create_server(
                (host, port),
                family=socket.AF_INET6 if is_v6 else socket.AF_INET,
                dualstack_ipv6=is_v6 and host == "::" and socket.has_dualstack_ipv6(),
            )
        except OSError as error:
            raise bind_problem(error, self._listen) from error
        self._socket.setblocking(False)
        self._address = Address(host, self._socket.getsockname()[1])
        if self._listen.missing_protection:
            log.warning(
                "the admin port is on %s WITHOUT %s (--insecure)",
                *(self._address, self._listen.missing_protection),
            )

    @property
    def url(self) -> str:
        """Where it is reached."""
        shown = self._address
        if shown.is_unspecified:
            shown = Address(_own_number(shown.host), shown.port)
        return f"{'http' if self._tls is None else 'https'}://{shown}/"

    def drain(self) -> None:
        """Says from now on that the daemon is not ready: it stops."""
        self._is_draining = True

    async def __aenter__(self) -> Self:
        """Binds the port, and serves it from now on.

        Raises:
            ConfigurationError: As of `bind`.
        """
        self.bind()
        self._serving = asyncio.create_task(self._accept())
        return self

    async def __aexit__(self, *unused: object) -> None:
        """Ends all connections and frees the port."""
        self._serving.cancel()
        await asyncio.gather(self._serving, return_exceptions=True)
        for connection in list(self._connections):
            connection.end()
        tasks = list(self._state.tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._socket.close()

    @property
    def unready_reason(self) -> str:
        """Why the daemon does not serve now, empty while it does."""
        return "it stops" if self._is_draining else self._unready_reason()

    @property
    def connection_count(self) -> int:
        """Connections that are open."""
        return len(self._connections)

    async def _ready(self, _: Request) -> Response:
        if reason := self.unready_reason:
            return PlainTextResponse(f"not ready: {reason}\n", 503)
        return PlainTextResponse("ready\n")

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                accepted, _ = await loop.sock_accept(self._socket)
            except OSError as error:
                _failures.warning("the admin port takes no connection: %s", error)
                await asyncio.sleep(ACCEPT_PAUSE_S)
                continue
            if not self._has_room():
                self.refused_count += 1
                accepted.close()
                continue
            connection = _Connection(self._config, self._state, self._connections)
            connection.beginning = asyncio.create_task(
                self._begin(connection, accepted)
            )

    def _has_room(self) -> bool:
        """Whether one more is taken, in place of one whose client does not go on.

        First goes one that reads no answers, then the one that is idle longest.
        """
        if len(self._connections) < self._connections_max:
            return True
        all_of_them = self._connections
        unread = (each for each in all_of_them if each.is_unread)
        idle = (each for each in all_of_them if each.is_idle)
        for connection in chain(unread, idle):
            self.refused_count += 1
            connection.end()
            return True
        return False

    async def _begin(self, connection: "_Connection", accepted: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        try:
            await loop.connect_accepted_socket(
                lambda: connection,
                accepted,
                ssl=self._tls,
                ssl_handshake_timeout=None if self._tls is None else REQUEST_S,
            )
        except OSError:  # whoever came speaks no TLS, or is gone
            pass
        finally:
            if not connection.is_made:
                connection.forget()
                accepted.close()


class _Connection(H11Protocol):
    """A connection, which ends when its next request is not whole in time.

    Attributes:
        beginning: Makes it secure.
        is_made: Whether it is.
    """

    def __init__(
        self,
        config: Config,
        state: ServerState,
        connections: "dict[_Connection, None]",
    ) -> None:
        super().__init__(config, state, {})
        self.beginning: asyncio.Task[None] | None = None
        self.is_made = False
        self._all = connections
        self._all[self] = None
        self._request_timer: asyncio.TimerHandle | None = None
        self._unread_s: float | None = None
        self._unread_timer: asyncio.TimerHandle | None = None

    @property
    def is_idle(self) -> bool:
        """Whether nothing is being answered."""
        cycle = self.cycle
        return cycle is None or cycle.more_body or cycle.response_complete

    @property
    def is_unread(self) -> bool:
        """Whether its client has read nothing for a while of what it asked for."""
        since_s = self._unread_s
        return since_s is not None and self.loop.time() - since_s >= UNREAD_KEPT_S

    def end(self) -> None:
        """Ends it, with what it still has to send."""
        self.forget()
        if self.is_made:
            self.transport.abort()
        elif self.beginning is not None:
            self.beginning.cancel()

    def forget(self) -> None:
        """It takes no place any more."""
        self._all.pop(self, None)
        for timer in (self._request_timer, self._unread_timer):
            if timer is not None:
                timer.cancel()

    @override
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.is_made = True
        self._look()

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.forget()

    @override
    def data_received(self, data: bytes) -> None:
        for start in range(0, len(data), PIECE_BYTES):
            if self.cycle is not None and _is_chunked(self.cycle.scope["headers"]):
                break  # refused: to parse chunks of one byte would block the loop
            super().data_received(data[start : start + PIECE_BYTES])
        self._look()

    @override
    def on_response_complete(self) -> None:
        super().on_response_complete()
        # In the order in which they were last of use.
        if self._all.pop(self, self) is None:
            self._all[self] = None
        self._look()

    @override
    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread_s = self.loop.time()
        self._unread_timer = self.loop.call_later(UNREAD_S, self.end)

    @override
    def resume_writing(self) -> None:
        super().resume_writing()
        self._unread_s = None
        if self._unread_timer is not None:
            self._unread_timer.cancel()

    def _look(self) -> None:
        """Begins to wait for the next request, or ends the wait for it."""
        timer = self._request_timer
        if not self.is_idle and timer is not None:
            timer.cancel()
            self._request_timer = None
        elif self.is_idle and timer is None and self in self._all:
            self._request_timer = self.loop.call_later(REQUEST_S, self.end)


class _Front:
    """What holds for every request, and for every answer."""

    def __init__(self, app: ASGIApp, listen: ListenConfig) -> None:
        self._app = app
        self._listen = listen

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_begun = False

        async def answering(message: Message) -> None:
            nonlocal is_begun
            is_begun = True
            if message["type"] == "http.response.start":
                own = {name for name, _ in message["headers"]}
                message["headers"] += [each for each in HEADERS if each[0] not in own]
            await send(message)

        request = Request(scope, receive)
        try:
            _check_sender(request, self._listen)
            if _is_chunked(scope["headers"]):
                raise HTTPException(
                    411, "the body comes in chunks: send one with its Content-Length"
                )
            body = await _body(request)
            await self._app(scope, _replayed(body, receive), answering)
        except ClientDisconnect:
            pass
        except Exception as error:
            if is_begun:
                raise  # which ends the connection
            await _error_answer(error, scope["path"])(scope, receive, answering)


def _is_chunked(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Whether a request's body comes in chunks, by its headers."""
    return any(name == b"transfer-encoding" for name, _ in headers)


def _replayed(body: bytes, receive: Receive) -> Receive:
    """Receives a body that was read, and then what the connection brings."""
    is_received = False

    async def receive_again() -> Message:
        nonlocal is_received
        if is_received:
            return await receive()
        is_received = True
        return {"type": "http.request", "body": body, "more_body": False}

    return receive_again


async def _body(request: Request) -> bytes:
    """The body of a request.

    Raises:
        HTTPException: It is too long.
    """
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > BODY_BYTES_MAX:
            raise HTTPException(
                413,
                f"the body has more than {BODY_BYTES_MAX} bytes: send a shorter one",
            )
    return body


def _check_sender(request: Request, listen: ListenConfig) -> None:
    """Refuses what a page of somebody else makes a browser send.

    A name that such a page has from its own name server leads a browser here as well
    (DNS rebinding); a number does not. Where callers show tokens the page has none.

    Raises:
        HTTPException: It is such a request.
    """
    shown = request.headers.get("host", "")
    host = _host_of(shown)
    names = {"localhost", listen.address.host.lower(), socket.gethostname().lower()}
    is_ours = host in names or _is_number(host) or _is_plain_probe(request)
    if listen.tokens is None and not is_ours:
        raise HTTPException(
            421,
            f"the request is for {printable(shown)[:64]!r}, which is no name of this "
            "machine: use its address, or give the daemon --tokens",
        )
    if request.method in SAFE_METHODS:
        return
    origin = request.headers.get("origin")
    if origin is not None and origin != f"{request.url.scheme}://{shown}":
        raise HTTPException(
            403, f"a page of {printable(origin)[:64]!r} may change nothing here"
        )


def _host_of(shown: str) -> str:
    """The host of a `Host` header, empty for one that can't be read."""
    try:
        return parse_address(shown if _has_port(shown) else f"{shown}:0").host.lower()
    except ValueError:
        return ""


def _is_plain_probe(request: Request) -> bool:
    """Whether a program asks for health only; a browser always names a host."""
    return "host" not in request.headers and request.url.path in PROBES


def _own_number(everywhere: str) -> str:
    """A number by which others reach this machine, which listens everywhere.

    It is that of the interface that leads to other machines: to connect a datagram
    socket asks the system for it and sends nothing. The numbers are those for
    documentation (RFC 5737 and RFC 3849).
    """
    known = [(socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")]
    for family, other in reversed(known) if ":" in everywhere else known[:1]:
        with socket.socket(family, socket.SOCK_DGRAM) as asking, suppress(OSError):
            asking.connect((other, 9))
            return str(asking.getsockname()[0])
    return "localhost"  # no other machine is reached


def _has_port(shown: str) -> bool:
    return shown.rpartition(":")[2].isdigit() and not shown.endswith("]")


def _is_number(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


class _ForCallers:
    """Serves callers who show a token, where the job has any."""

    def __init__(
        self, app: ASGIApp, listen: ListenConfig, access: Access | None
    ) -> None:
        self._app = app
        self._listen = listen
        self._access = access
        self._refusals = PeerLog(log)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope)
        try:
            self._check_caller(request)
        except HTTPException as refused:
            if request.client is not None:
                peer = Address(request.client.host, request.client.port)
                machine = machine_of_address(str(peer))
                self._refusals.warning(machine, f"admin port: {refused.detail}")
            raise
        await self._app(scope, receive, send)

    def _check_caller(self, request: Request) -> None:
        changes = request.method not in SAFE_METHODS
        if self._access is None:
            return
        if self._listen.tokens is None:
            if changes:
                raise HTTPException(
                    403,
                    "the job knows who calls by certificates, which this port does not "
                    "ask for: change it by psctl, or give the daemon --tokens",
                )
            return
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        identity = self._access.identity_of(token if scheme.lower() == "bearer" else "")
        if identity is None:
            raise HTTPException(
                401,
                "missing or invalid token: send one of the job's in the header "
                "`Authorization: Bearer TOKEN`",
                {"www-authenticate": "Bearer"},
            )
        if changes and identity.role is not Role.ADMIN:
            raise HTTPException(
                403,
                f"a token of role {identity.role} may change nothing: send one of role "
                f"{Role.ADMIN}",
            )


_HTTP_STATUS: Final = {
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.UNAUTHENTICATED: 401,
    grpc.StatusCode.PERMISSION_DENIED: 403,
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.FAILED_PRECONDITION: 409,
    grpc.StatusCode.ABORTED: 409,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 429,
    grpc.StatusCode.INTERNAL: 500,
    grpc.StatusCode.UNIMPLEMENTED: 501,
    grpc.StatusCode.UNAVAILABLE: 503,
    grpc.StatusCode.DEADLINE_EXCEEDED: 504,
}
"""Of refusals, as `google.rpc.Code` has them."""


def _error_answer(error: Exception, path: str) -> Response:
    """What a caller may see of an error; the rest goes to the log.

    It leaves the connection open. One that ends while its client sends a body is reset,
    and the client may not see the answer; uvicorn drops what comes of it meanwhile.
    """
    if isinstance(error, HTTPException):
        return _error(error.status_code, error.detail, error.headers)
    refusal = as_refusal(error, printable(path)[:64])
    status = _HTTP_STATUS.get(status_code(refusal.reason), 500)
    return _error(status, refusal.text)


def _error(
    status: int, text: str, headers: Mapping[str, str] | None = None
) -> Response:
    return JSONResponse({"error": text}, status, headers)


async def _healthy(_: Request) -> Response:
    return PlainTextResponse("ok\n")


def _tls_context(certificates: Certificates) -> ssl.SSLContext:
    """What shows each client that connects the certificate then in force."""
    context = _context_of(certificates.files)
    in_force: tuple[Pem, ssl.SSLContext] = (certificates.current(), context)

    def renew(connection: ssl.SSLObject, _: str | None, __: ssl.SSLContext) -> None:
        """Called in each handshake."""
        nonlocal in_force
        pem = certificates.current()
        if pem is not in_force[0]:
            try:
                in_force = pem, _context_of(certificates.files)
            except OSError as error:  # they are being replaced: the next one looks
                log.info("the certificates of the admin port stay for now: %s", error)
        connection.context = in_force[1]

    context.sni_callback = renew
    return context


def _context_of(files: TlsFiles) -> ssl.SSLContext:
    assert files.certificate is not None, "a server has one"
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_cert_chain(files.certificate, files.key)
    return context
