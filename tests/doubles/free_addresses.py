"""Addresses that a test gives away before anybody listens there."""

import os
import random
import socket
from typing import Final

from pswire.addresses import Address, parse_address

_PROCESSES_MAX: Final = 16
_PROCESS: Final = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))

PORTS: Final = range(20_000 + _PROCESS % _PROCESSES_MAX, 32_768, _PROCESSES_MAX)
"""Below those that Linux gives to whoever asks for any: else a daemon that does so, or
a connection, may be given the address before the one that it is for listens. Each
process of pytest has its own, so that none gives away what another one has."""


_given: Final[set[int]] = set()
"""Nobody may listen yet on those that were given away: none is given twice."""


def free_address() -> Address:
    """Where nobody listens now, on this machine."""
    drawn = random.SystemRandom()
    while True:
        port = drawn.choice(PORTS)
        if port in _given:
            continue
        try:
            with socket.create_server(("127.0.0.1", port)):
                _given.add(port)
                return parse_address(f"127.0.0.1:{port}")
        except OSError:
            continue


def free_ports(count: int) -> list[int]:
    """Of so many addresses the ports."""
    return [free_address().port for _ in range(count)]
