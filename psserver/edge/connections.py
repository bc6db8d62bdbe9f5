"""The connections that a server has accepted, found by their descriptors.

gRPC neither counts them by machine nor ends one that takes nothing of what it has asked
for. A socket that is shut down looks to it as one whose client has gone.
"""

import os
import socket
import stat
from collections import defaultdict
from collections.abc import Collection, Iterator
from contextlib import suppress
from typing import Final

from psserver.edge.guard import machine_of_address
from pswire.addresses import Address

FOLDER: Final = "/dev/fd"


class Connections:
    """Those that came to one port. In the event loop."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._since_s: dict[str, float] = {}

    def look(self, now_s: float) -> dict[str, float]:
        """Peers as `HOST:PORT`, each with when it was first seen."""
        found = (peer for peer, _ in _accepted(self._port))
        self._since_s = {peer: self._since_s.get(peer, now_s) for peer in found}
        return self._since_s

    def end(self, peers: Collection[str]) -> None:
        """Ends connections, with all their calls."""
        for peer, connection in _accepted(self._port):
            if peer in peers:
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


def _accepted(port: int) -> Iterator[tuple[str, socket.socket]]:
    """Peer and socket of each connection to a port."""
    for descriptor in _sockets():
        try:
            # A descriptor of its own: gRPC's may be another connection's by then.
            connection = socket.socket(fileno=os.dup(descriptor))
        except OSError:  # it was closed meanwhile
            continue
        with connection:
            if connection.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            try:
                is_ours = connection.getsockname()[1] == port
                host, its_port = connection.getpeername()[:2]
            except OSError:  # it listens, or has ended
                continue
            if is_ours:
                # As gRPC writes an IPv4 address that came by IPv6.
                peer = Address(host.removeprefix("::ffff:"), its_port)
                yield str(peer), connection


def _sockets() -> Iterator[int]:
    try:
        names = os.listdir(FOLDER)
    except OSError:  # there is no such folder, or no descriptor for it
        return
    for name in names:
        with suppress(OSError):
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                yield int(name)
