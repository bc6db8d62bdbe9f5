"""Keeps a forked child from holding the sign of life of its parent.

A child, such as a worker process of a `DataLoader`, inherits the sockets. The
coordinator then hears of its parent's death only when the child is gone too (3.7 s
late for a DataLoader). So a child closes its copies at once. It does not shut them
down, which would end the parent's connection.
"""

import os
import socket
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress

from pswire.addresses import Address

_FD_FOLDER = "/dev/fd"

_peers: Counter[tuple[str, int]] = Counter()
_is_registered = False


def guard(address: Address) -> None:
    """From now on children close their connections to this address."""
    global _is_registered
    _peers.update(_resolved(address))
    if not _is_registered and sys.platform != "win32":
        os.register_at_fork(after_in_child=_close_inherited)
        _is_registered = True


def unguard(address: Address) -> None:
    """Ends one `guard`."""
    _peers.subtract(_resolved(address))


def _resolved(address: Address) -> set[tuple[str, int]]:
    found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    return {(str(sockaddr[0]), address.port) for *_, sockaddr in found}


def _close_inherited() -> None:
    peers = set(+_peers)
    if not peers:
        return
    for descriptor in _descriptors():
        with suppress(OSError):
            inherited = socket.socket(fileno=descriptor)
            try:
                peer = inherited.getpeername()
            except OSError:
                peer = None
            if isinstance(peer, tuple) and (_plain(peer[0]), peer[1]) in peers:
                inherited.close()
            else:
                inherited.detach()


def _plain(host: object) -> str:
    # gRPC reaches IPv4 addresses through sockets of IPv6 where it can.
    return str(host).removeprefix("::ffff:")


def _descriptors() -> Iterator[int]:
    with suppress(OSError):
        for name in os.listdir(_FD_FOLDER):
            if int(name) > 2:
                yield int(name)
