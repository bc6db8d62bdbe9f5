"""Keepalive: how fast a dead peer is noticed, on both ends of a connection.

The server closes a connection whose client pings more often than the server allows
("Too many pings"), so both ends take their numbers from here.

A hung peer (SIGSTOP) is found by the time-out of the HTTP/2 ping alone, whose default
is a minute, whatever `grpc.keepalive_timeout_ms` says; an unplugged network is found by
the keepalive time-out through TCP_USER_TIMEOUT. So both are set, to the same value.
Pings are answered by gRPC's own threads, without the interpreter's lock.
Source: https://github.com/grpc/grpc/blob/master/doc/keepalive.md, and grpc/grpc#39239
for `grpc.http2.ping_timeout_ms`.
"""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Keepalive:
    """How often an end pings, and how long it waits for the answer."""

    interval_ms: int
    timeout_ms: int


CONTROL_KEEPALIVE: Final = Keepalive(interval_ms=1_000, timeout_ms=1_500)
"""The membership stream is a worker's sign of life. Interval, time-out and the grace
for reconnecting together stay well below the lease of 10 s. Also how clients watch
their coordinator, whatever the lease: they learn it only when they have registered."""

RECONNECT_GRACE_MS: Final = 500
"""Time in which a stream that broke may be opened again. A client tries at once, and
then every tenth of a second or so."""

DATA_KEEPALIVE: Final = Keepalive(interval_ms=10_000, timeout_ms=5_000)
"""On the data plane a call's deadline decides first, so pings only end calls that wait
for others, and cost next to nothing."""

PING_INTERVAL_MIN_MS: Final = 500
"""A server allows pings this often: half the fastest client's interval, so that jitter
never looks like abuse. gRPC's default of 5 minutes closes a silent stream in 6 s."""

PING_STRIKE_COUNT_MAX: Final = 3
"""Pings sooner than allowed that a server takes before it closes the connection."""


def coordinator_keepalive(lease_ttl_ms: int) -> Keepalive:
    """How the coordinator watches its streams.

    Interval, time-out and `reconnect_grace_ms` take at most 0.6 of the lease, so that
    whoever stopped answering is evicted within it. From 5 s on nothing is gained by
    pinging less.
    """
    return Keepalive(
        interval_ms=min(CONTROL_KEEPALIVE.interval_ms, lease_ttl_ms // 5),
        timeout_ms=min(CONTROL_KEEPALIVE.timeout_ms, lease_ttl_ms * 3 // 10),
    )


def reconnect_grace_ms(lease_ttl_ms: int) -> int:
    """Time in which a stream that broke may be opened again."""
    return min(RECONNECT_GRACE_MS, lease_ttl_ms // 10)


def keepalive_options(keepalive: Keepalive) -> list[tuple[str, str | int]]:
    """Settings of an end that pings: any client channel, and the servers."""
    return [
        ("grpc.keepalive_time_ms", keepalive.interval_ms),
        ("grpc.keepalive_timeout_ms", keepalive.timeout_ms),
        ("grpc.http2.ping_timeout_ms", keepalive.timeout_ms),
        # A channel is watched between calls too: the next call then finds a new
        # connection instead of waiting on a dead one.
        ("grpc.keepalive_permit_without_calls", 1),
        # 0 is no limit. The default of 2 stops pinging on a stream that is silent, as
        # a watch stream is for hours.
        ("grpc.http2.max_pings_without_data", 0),
    ]


def ping_allowance_options() -> list[tuple[str, str | int]]:
    """Settings of a server that let its clients ping as `CONTROL_KEEPALIVE` says."""
    return [
        # Not `min_recv_ping_interval_without_data_ms`: gRPC's server reads this name.
        ("grpc.http2.min_ping_interval_without_data_ms", PING_INTERVAL_MIN_MS),
        ("grpc.http2.max_ping_strikes", PING_STRIKE_COUNT_MAX),
    ]
