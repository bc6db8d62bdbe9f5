"""`HOST:PORT`, as every flag, log line and message writes it."""

import ipaddress
from dataclasses import dataclass

PORT_MAX = 65_535


@dataclass(frozen=True, slots=True)
class Address:
    """Where a process is reached or listens.

    Attributes:
        host: Name or number, without the brackets of IPv6.
        port: 0 asks the machine for any free port.
    """

    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach it.

        Names other than localhost can't be told without asking the resolver, and
        count as reachable by others.
        """
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def is_unspecified(self) -> bool:
        """Whether it is every address of the machine, which nobody can connect to."""
        try:
            return ipaddress.ip_address(self.host).is_unspecified
        except ValueError:
            return False


def parse_address(text: str) -> Address:
    """Reads `HOST:PORT` or `[IPV6]:PORT`.

    Raises:
        ValueError: It is neither; the text says what is wrong with it.
    """
    shown = repr(text[:80])
    odd = [each for each in text if each.isspace() or not each.isprintable()]
    if odd:
        raise ValueError(f"{shown} is no address: {odd[0]!a} can't be in one")
    if "://" in text:
        raise ValueError(
            f"{shown} is no address: leave out {text.partition('://')[0]}://"
        )
    host, colon, port = text.rpartition(":")
    if not colon or not host.strip("[]"):
        raise ValueError(f"{shown} is no address: expected HOST:PORT")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError(f"{shown} is no address: write IPv6 as [HOST]:PORT")
    # A port of more digits is looked at no further: Python refuses thousands of them.
    if not port.isdigit() or len(port.lstrip("0")) > 5 or int(port[-5:]) > PORT_MAX:
        raise ValueError(f"{shown} is no address: the port is 0 to {PORT_MAX}")
    return Address(host, int(port))
