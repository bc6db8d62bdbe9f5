"""What a loader's forked processes must not keep.

A fork inherits the sockets of its parent. While a data process holds the worker's
connection to the coordinator, the death of the worker does not end that connection,
and the job learns of it seconds later. So each data process closes its copies. It
must not shut them down: that would end the connection itself.
"""

import os
import socket
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import psutil

from pswire.addresses import Address

Endpoint = tuple[str, int]


def endpoints_of(addresses: Iterable[Address]) -> frozenset[Endpoint]:
    """The IP addresses and ports that are meant; names that don't resolve are none."""
    found: set[Endpoint] = set()
    for address in addresses:
        try:
            resolved = socket.getaddrinfo(
                address.host, address.port, type=socket.SOCK_STREAM
            )
        except OSError:
            continue
        found.update((str(each[4][0]), address.port) for each in resolved)
    return frozenset(found)


def start_function(
    addresses: Iterable[Address], users: Callable[[int], None] | None
) -> Callable[[int], None]:
    """A `worker_init_fn` that closes connections, then does what the user's does."""
    return partial(_start, endpoints_of(addresses), users)


def _start(
    endpoints: frozenset[Endpoint], users: Callable[[int], None] | None, index: int
) -> None:
    close_connections(endpoints)
    if users is not None:
        users(index)


def close_connections(endpoints: frozenset[Endpoint]) -> int:
    """Closes this process's copies of connections; how many there were."""
    closed_count = 0
    for connection in psutil.Process().net_connections(kind="tcp"):
        remote: Any = connection.raddr
        # A socket for both IP versions writes IPv4 this way.
        if remote and (remote.ip.removeprefix("::ffff:"), remote.port) in endpoints:
            os.close(connection.fd)
            closed_count += 1
    return closed_count
