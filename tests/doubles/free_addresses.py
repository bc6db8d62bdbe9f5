"""Addresses that a test gives away before anybody listens there."""

import random
import socket
from typing import Final

from pswire.addresses import Address, parse_address

PORTS: Final = range(20_000, 32_768)
"""Below those that Linux gives to whoever asks for any: else a daemon that does so, or
a connection, may be given the address before the one that it is for listens."""


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
