"""The one factory for client channels: every gRPC setting, with its reason.

Channels are cheap and connect on the first call. Nothing here is shared: who makes a
channel closes it.
"""

import functools
import ipaddress
import logging
import os
from enum import Enum
from typing import Final
from weakref import WeakSet

import grpc
import grpc.aio

from pswire.addresses import parse_address
from pswire.keepalive import (
    CONTROL_KEEPALIVE,
    DATA_KEEPALIVE,
    Keepalive,
    keepalive_options,
)
from pswire.limits import MESSAGE_BYTES_MAX
from pswire.security.certificates import Pem, certificates_of
from pswire.security.credentials import (
    TLS_CA_VARIABLE,
    Credentials,
    CredentialsError,
)
from pswire.security.proven_channel import ProvenChannel

log = logging.getLogger("pswire")

RECONNECT_BACKOFF_FIRST_MS: Final = 100
"""Wait before the second attempt to connect, growing by 1.6 each time."""

RECONNECT_BACKOFF_MAX_MS: Final = 2_000
"""Longest wait between attempts. gRPC's default of 120 s would keep a worker away from
a shard that came back long ago (4.5 s against 0.5 s after an outage of 12 s)."""

CONNECT_TIMEOUT_MS: Final = 2_000
"""Least time an attempt gets, handshake included; gRPC calls it the minimum backoff.
A lost SYN is sent again after 1 s, which must fit. A refused attempt does not wait."""

RESOLVE_INTERVAL_MIN_MS: Final = 2_000
"""Least time between two look-ups of a host name. gRPC's default of 30 s would keep a
worker at the old address of a process that was started again elsewhere."""


class ChannelKind(Enum):
    """What a channel is for. Each kind has a connection of its own."""

    CONTROL = "control"
    """Calls to the coordinator, the membership stream among them."""
    DATA = "data"
    """Pushes and pulls. A chunk on the way never delays a sign of life."""
    SNAPSHOT = "snapshot"
    """Readers' pulls, which must not delay training."""


_KEEPALIVES: Final[dict[ChannelKind, Keepalive]] = {
    ChannelKind.CONTROL: CONTROL_KEEPALIVE,
    ChannelKind.DATA: DATA_KEEPALIVE,
    ChannelKind.SNAPSHOT: DATA_KEEPALIVE,
}


def channel_options(kind: ChannelKind) -> list[tuple[str, str | int]]:
    """All settings of a channel of this kind."""
    return [
        *keepalive_options(_KEEPALIVES[kind]),
        ("grpc.initial_reconnect_backoff_ms", RECONNECT_BACKOFF_FIRST_MS),
        ("grpc.min_reconnect_backoff_ms", CONNECT_TIMEOUT_MS),
        ("grpc.max_reconnect_backoff_ms", RECONNECT_BACKOFF_MAX_MS),
        ("grpc.dns_min_time_between_resolutions_ms", RESOLVE_INTERVAL_MIN_MS),
        # A push is sent again by us, under the same id and after asking: gRPC's own
        # retries would resend unseen, and buffer 256 KiB of each call for it.
        ("grpc.enable_retries", 0),
        # `http_proxy` in the environment sends even calls to 127.0.0.1 to the proxy.
        ("grpc.enable_http_proxy", 0),
        # Kept at gRPC's default on purpose: see the constant.
        ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
        ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
        # Channels with equal settings share one connection otherwise, where a
        # snapshot's 4 MiB frames stand before a push.
        ("grpc.use_local_subchannel_pool", 1),
        # Gradients are noise to a compressor, and a compressed bomb is a risk. Bit 0
        # of the set is "identity".
        ("grpc.default_compression_algorithm", 0),
        ("grpc.compression_enabled_algorithms_bitset", 1),
    ]


_channels: Final[dict[int, WeakSet[grpc.aio.Channel]]] = {}
"""Channels for asyncio that are left, by the process that has made them. Threads add to
it, so that none may look through a set."""


def aio_channel(
    address: str, kind: ChannelKind, credentials: Credentials | None = None
) -> grpc.aio.Channel:
    """Makes a channel for the running event loop.

    Args:
        address: Whom to call.
        kind: What for.
        credentials: What calls prove themselves with, by default those of the process.

    Raises:
        CredentialsError: They can't be used; the text says why.
    """
    proof = Credentials.from_environment() if credentials is None else credentials
    certificates, options = certificates_of(proof), channel_options(kind)

    def opened(pem: Pem | None) -> grpc.aio.Channel:
        if pem is None:
            return _noted(grpc.aio.insecure_channel(address, options=options))
        target, shown = certified_name(address), channel_credentials(pem)
        return _noted(grpc.aio.secure_channel(target, shown, options=options))

    if proof.token is None and certificates is None:
        return opened(None)
    if certificates is None:
        _warn_of_clear_token(address)
    return ProvenChannel(certificates, proof.token, opened)


@functools.cache
def _warn_of_clear_token(address: str) -> None:
    """Says once that whoever listens to the network has the token."""
    if not parse_address(address).is_loopback:
        log.warning(
            "the token goes to %s without encryption: whoever sees the packets can use "
            "it; switch TLS on by --tls-ca (%s)",
            *(address, TLS_CA_VARIABLE),
        )


def _noted(channel: grpc.aio.Channel) -> grpc.aio.Channel:
    _channels.setdefault(os.getpid(), WeakSet()).add(channel)
    return channel


def has_own_channels() -> bool:
    """Whether a channel for asyncio of this process is left, be it a closed one."""
    return len(_channels.get(os.getpid(), ())) > 0


def has_inherited_channels() -> bool:
    """Whether one is left that a process has made which this one was forked from.

    Closed or not: as long as it is there, gRPC has its half of what threads of that
    process did, and a call of this one would crash or hang.
    """
    own = os.getpid()
    return any(len(left) > 0 for maker, left in [*_channels.items()] if maker != own)


def blocking_channel(address: str, kind: ChannelKind) -> grpc.Channel:
    """Makes a channel whose calls block, with the credentials of the process.

    It shows the certificates of now for as long as it lives, and no token.

    Raises:
        CredentialsError: They can't be used; the text says why.
    """
    options = channel_options(kind)
    certificates = certificates_of(Credentials.from_environment())
    if certificates is None:
        return grpc.insecure_channel(address, options=options)
    credentials = channel_credentials(certificates.current())
    return grpc.secure_channel(certified_name(address), credentials, options=options)


def check_credentials() -> None:
    """Checks what channels of this process would show, before one is made.

    Raises:
        CredentialsError: It can't be used; the text says why.
    """
    certificates = certificates_of(Credentials.from_environment())
    if certificates is not None:
        channel_credentials(certificates.current())


def channel_credentials(pem: Pem) -> grpc.ChannelCredentials:
    """What a client shows and checks servers by.

    Raises:
        CredentialsError: It could not check them.
    """
    if pem.ca is None:
        raise CredentialsError(
            f"--tls-ca ({TLS_CA_VARIABLE}) is missing: without the certificate of the "
            "job's authority nothing shows that a server is the right one; give it "
            "beside --tls-cert and --tls-key"
        )
    return grpc.ssl_channel_credentials(pem.ca, *(pem.pair or (None, None)))


def certified_name(address: str) -> str:
    """An address as certificates are compared with it.

    gRPC compares IPv6 letter by letter with the shortest form.
    """
    host, _, port = address.rpartition(":")
    if not host.startswith("["):
        return address
    try:
        return f"[{ipaddress.IPv6Address(host[1:-1])}]:{port}"
    except ValueError:
        return address
