"""The one factory for servers: every gRPC setting, with its reason."""

from enum import Enum
from typing import Final

import grpc
import grpc.aio

from pswire.keepalive import (
    CONTROL_KEEPALIVE,
    DATA_KEEPALIVE,
    Keepalive,
    keepalive_options,
    ping_allowance_options,
)
from pswire.limits import MESSAGE_BYTES_MAX
from pswire.security.certificates import Certificates, Pem

STREAM_COUNT_MAX: Final = 64
"""Calls of one connection at a time. A worker needs a dozen; no limit is advertised by
default, so that one client could open any number. gRPC takes up to 4 MiB of each before
it is known who calls."""

HANDSHAKE_TIMEOUT_MS: Final = 10_000
"""Time for a client to speak HTTP/2. gRPC's default of 120 s lets idle sockets pile
up."""

CONNECTION_COUNT_MAX: Final = 16_384
"""Connections at a time, where descriptors allow as many. A worker has one to each
process, and without a limit one stranger takes every descriptor there is."""

IDLE_TIMEOUT_MS: Final = 30_000
"""Time for which a connection may be open without a call, before it is closed. gRPC's
default is for ever. Workers and shards keep a call open to the coordinator; a channel
that comes back to a closed connection opens a new one for its next call."""

METADATA_BYTES_MAX: Final = 8_192
"""gRPC's own soft limit on the headers of a call, said here so that it is tested."""


class ServerKind(Enum):
    COORDINATOR = "coordinator"
    SHARD = "shard"


_KEEPALIVES: Final[dict[ServerKind, Keepalive]] = {
    # The coordinator is the one that must notice a dead worker.
    ServerKind.COORDINATOR: CONTROL_KEEPALIVE,
    ServerKind.SHARD: DATA_KEEPALIVE,
}


def server_options(
    kind: ServerKind,
    keepalive: Keepalive | None = None,
    connection_count_max: int = CONNECTION_COUNT_MAX,
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
        ("grpc.max_concurrent_streams", STREAM_COUNT_MAX),
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_TIMEOUT_MS),
        # One beyond is closed at once, and its client tries again after a while.
        ("grpc.max_allowed_incoming_connections", connection_count_max),
        ("grpc.max_connection_idle_ms", IDLE_TIMEOUT_MS),
        ("grpc.max_metadata_size", METADATA_BYTES_MAX),
        # Gradients are noise to a compressor, and a compressed bomb is a risk. Bit 0
        # of the set is "identity".
        ("grpc.default_compression_algorithm", 0),
        ("grpc.compression_enabled_algorithms_bitset", 1),
    ]


def make_server(
    kind: ServerKind,
    handlers: list[grpc.GenericRpcHandler],
    keepalive: Keepalive | None = None,
    connection_count_max: int = CONNECTION_COUNT_MAX,
    access: grpc.aio.ServerInterceptor | None = None,
) -> grpc.aio.Server:
    """Makes a server for the running event loop; it is not bound yet.

    Args:
        kind: What it serves.
        handlers: What answers calls.
        keepalive: Of connections, by default that of its kind.
        connection_count_max: Connections at a time.
        access: Lets in who may call, None for everybody.
    """
    options = server_options(kind, keepalive, connection_count_max)
    interceptors = () if access is None else (access,)
    server = grpc.aio.server(interceptors=interceptors, options=options)
    server.add_generic_rpc_handlers(tuple(handlers))
    return server


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
