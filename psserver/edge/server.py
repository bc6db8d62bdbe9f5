"""The one factory for servers: every gRPC setting, with its reason."""

import asyncio
from collections.abc import AsyncIterator
from enum import Enum
from typing import Any, Final

import grpc
import grpc.aio
from grpc_reflection.v1alpha import reflection
from grpc_reflection.v1alpha.reflection_pb2 import (
    ServerReflectionRequest,
    ServerReflectionResponse,
)

from psserver.edge.decoding import decoded
from psserver.edge.guard import Context, streaming
from psserver.edge.limits import DEFAULT_LIMITS, Limits
from psserver.edge.open_calls import OpenCalls
from pswire.keepalive import (
    CONTROL_KEEPALIVE,
    DATA_KEEPALIVE,
    Keepalive,
    keepalive_options,
    ping_allowance_options,
)
from pswire.limits import MESSAGE_BYTES_MAX, NAME_BYTES_MAX
from pswire.reasons import ErrorReason, Refusal
from pswire.security.certificates import Certificates, Pem


class ServerKind(Enum):
    COORDINATOR = "coordinator"
    SHARD = "shard"


_SERVICES: Final[dict[ServerKind, str]] = {
    ServerKind.COORDINATOR: "pswire.v1.CoordinatorService",
    ServerKind.SHARD: "pswire.v1.ParameterService",
}

REFLECTION_BYTES_MAX: Final = 2 * NAME_BYTES_MAX
"""Longest question about what a server serves; it comes back with the answer."""

_KEEPALIVES: Final[dict[ServerKind, Keepalive]] = {
    # The coordinator is the one that must notice a dead worker.
    ServerKind.COORDINATOR: CONTROL_KEEPALIVE,
    ServerKind.SHARD: DATA_KEEPALIVE,
}


def server_options(
    kind: ServerKind,
    limits: Limits = DEFAULT_LIMITS,
    keepalive: Keepalive | None = None,
) -> list[tuple[str, str | int]]:
    """All settings of a server of this kind."""
    return [
        *keepalive_options(keepalive or _KEEPALIVES[kind]),
        *ping_allowance_options(),
        # On by default: a second server then binds the same port without an error,
        # and a zombie shard and its replacement share the clients.
        ("grpc.so_reuseport", 0),
        # Kept at gRPC's default on purpose: see the constant.
        ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
        ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
        # By default no limit is advertised, and one client could open any number, of
        # each of which gRPC takes up to 4 MiB before it is known who calls.
        ("grpc.max_concurrent_streams", limits.connection_calls),
        # gRPC's default of 120 s lets idle sockets pile up.
        ("grpc.server_handshake_timeout_ms", _ms(limits.handshake_s)),
        # One beyond is closed at once, and its client tries again after a while.
        ("grpc.max_allowed_incoming_connections", limits.connections),
        # For ever by default. Workers and shards keep a call open to the coordinator;
        # a channel that comes back to a closed connection opens a new one.
        ("grpc.max_connection_idle_ms", _ms(limits.idle_s)),
        ("grpc.max_metadata_size", limits.metadata_bytes),
        # Gradients are noise to a compressor, and a compressed bomb is a risk. Bit 0
        # of the set is "identity".
        ("grpc.default_compression_algorithm", 0),
        ("grpc.compression_enabled_algorithms_bitset", 1),
    ]


def make_server(
    kind: ServerKind,
    handlers: list[grpc.GenericRpcHandler],
    calls: OpenCalls,
    keepalive: Keepalive | None = None,
) -> grpc.aio.Server:
    """Makes a server for the running event loop; it is not bound yet.

    Args:
        kind: What it serves.
        handlers: What answers calls.
        calls: Admits calls within the limits, of whoever may call.
        keepalive: Of connections, by default that of its kind.
    """
    server = grpc.aio.server(
        options=server_options(kind, calls.limits, keepalive),
        # Who may not call is counted, too.
        interceptors=(calls,) if calls.access is None else (calls, calls.access),
    )
    server.add_generic_rpc_handlers((*handlers, _reflection(kind, calls.limits)))
    return server


def _reflection(kind: ServerKind, limits: Limits) -> grpc.GenericRpcHandler:
    """Tells tools such as grpcurl what a server of this kind serves."""
    names = (_SERVICES[kind], "grpc.health.v1.Health", reflection.SERVICE_NAME)
    servicer = reflection.aio.ReflectionServicer(names)

    async def questions(
        requests: AsyncIterator[bytes],
    ) -> AsyncIterator[ServerReflectionRequest]:
        while True:
            try:
                async with asyncio.timeout(limits.message_s):
                    data = await anext(requests, None)
            except TimeoutError:
                raise Refusal(
                    ErrorReason.WAIT_TIMEOUT,
                    f"no question came for {limits.message_s:g} s (message-s)",
                ) from None
            if data is None:
                return
            if len(data) > REFLECTION_BYTES_MAX:
                raise Refusal(
                    ErrorReason.LIMIT_EXCEEDED,
                    f"the question has {len(data)} bytes, of at most "
                    f"{REFLECTION_BYTES_MAX}",
                )
            yield await decoded(ServerReflectionRequest, data)

    async def reflect(
        requests: AsyncIterator[bytes], context: Context
    ) -> AsyncIterator[ServerReflectionResponse]:
        answers: Any = servicer.ServerReflectionInfo(questions(requests), context)
        async for each in answers:
            yield each

    return grpc.method_handlers_generic_handler(
        reflection.SERVICE_NAME,
        {
            "ServerReflectionInfo": grpc.stream_stream_rpc_method_handler(
                streaming(reflect),
                response_serializer=ServerReflectionResponse.SerializeToString,
            )
        },
    )


def server_credentials(
    certificates: Certificates, *, demands_certificates: bool
) -> grpc.ServerCredentials:
    """What a server shows each client that connects: the certificates then in force.

    Args:
        certificates: Of this process.
        demands_certificates: Whether clients must show one of the same authority.
    """

    def configuration(pem: Pem) -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration(
            [pem.pair] if pem.pair else [],
            pem.ca if demands_certificates else None,
        )

    in_force = certificates.current()

    def renewed() -> grpc.ServerCertificateConfiguration | None:
        """Called for each connection, in a thread of gRPC's; None for no change."""
        nonlocal in_force
        pem = certificates.current()
        if pem is in_force:
            return None
        in_force = pem
        return configuration(pem)

    return grpc.dynamic_ssl_server_credentials(
        configuration(in_force),
        renewed,  # type: ignore[arg-type]  # its docstring allows None
        demands_certificates,
    )


def _ms(seconds: float) -> int:
    return max(1, round(1000 * seconds))
