"""The connections that a server has accepted, found by their descriptors.

gRPC neither counts them by machine nor ends one that takes nothing of what it has asked
for. A socket that is shut down looks to it as one whose client has gone.
"""

import os
import socket
import stat
from collections import defaultdict
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from typing import Final

from psserver.edge.guard import machine_of_address
from pswire.addresses import Address

FOLDER: Final = "/dev/fd"


class Connections:
    """Those that came to one port. In the event loop."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._since_s: dict[str, float] = {}
        # By descriptor the socket that it was of, and that one's peer: to ask for that
        # takes ten times as long as to see that a socket is the same.
        self._known: dict[int, tuple[int, str]] = {}

    def look(self, now_s: float) -> dict[str, float]:
        """Peers as `HOST:PORT`, each with when it was first seen."""
        found: dict[int, tuple[int, str]] = {}
        for descriptor, inode in _sockets():
            known = self._known.get(descriptor)
            if known is None or known[0] != inode:
                known = inode, _peer_of(descriptor, self._port)
            found[descriptor] = known
        self._known = found
        peers = (peer for _, peer in found.values() if peer)
        self._since_s = {peer: self._since_s.get(peer, now_s) for peer in peers}
        return self._since_s

    def end(self, peers: Collection[str]) -> None:
        """Ends connections, with all their calls."""
        for descriptor, _ in _sockets():
            with _opened(descriptor) as connection:
                if connection is not None and _peer(connection, self._port) in peers:
                    with suppress(OSError):  # its client was faster
                        connection.shutdown(socket.SHUT_RDWR)


def surplus(
    since_s: dict[str, float], busy: Collection[str], machine_max: int
) -> dict[str, list[str]]:
    """Connections to end of machines that have too many.

    First those without a call, the oldest first: a client begins a call when it has
    connected. Then the newest.

    Args:
        since_s: When each was first seen.
        busy: Those with calls.
        machine_max: Most of one machine.

    Returns:
        Peers by machine.
    """
    of_machine: dict[str, list[str]] = defaultdict(list)
    for peer in since_s:
        of_machine[machine_of_address(peer)].append(peer)

    def order(peer: str) -> tuple[bool, float]:
        is_busy = peer in busy
        return is_busy, -since_s[peer] if is_busy else since_s[peer]

    return {
        machine: sorted(peers, key=order)[: len(peers) - machine_max]
        for machine, peers in of_machine.items()
        if len(peers) > machine_max
    }


def _peer_of(descriptor: int, port: int) -> str:
    """The other end of a connection to a port; empty for any other socket."""
    with _opened(descriptor) as connection:
        return "" if connection is None else _peer(connection, port)


def _peer(connection: socket.socket, port: int) -> str:
    if connection.family not in (socket.AF_INET, socket.AF_INET6):
        return ""
    try:
        if connection.getsockname()[1] != port:
            return ""
        host, its_port = connection.getpeername()[:2]
    except OSError:  # it listens, or has ended
        return ""
    # As gRPC writes an IPv4 address that came by IPv6.
    return str(Address(host.removeprefix("::ffff:"), its_port))


@contextmanager
def _opened(descriptor: int) -> Iterator[socket.socket | None]:
    """A socket by a descriptor of its own; None if it was closed meanwhile."""
    try:
        # gRPC's may be another connection's by then.
        connection = socket.socket(fileno=os.dup(descriptor))
    except OSError:
        yield None
        return
    with connection:
        yield connection


def _sockets() -> Iterator[tuple[int, int]]:
    """Descriptor and inode of each socket of this process."""
    try:
        names = os.listdir(FOLDER)
    except OSError:  # there is no such folder, or no descriptor for it
        return
    for name in names:
        with suppress(OSError):
            about = os.fstat(int(name))
            if stat.S_ISSOCK(about.st_mode):
                yield int(name), about.st_ino
