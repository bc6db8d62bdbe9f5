"""A link of limited speed between workers and shards of one host.

As root on Linux it is the kernel's: all processes of the workload are in a network
namespace, where packets of the shards' ports pass a token bucket for each direction,
and all others go on unhindered (htb, see tc-htb(8): unlike tbf it tells directions
apart on one device). Elsewhere a process passes bytes on at the wanted speed, for each
connection by itself. Either way both directions are busy at once.
"""

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final, Protocol

from psctl.bench.machine import free_port
from psctl.daemons import ShardPlace
from psctl.failures import CommandError
from psctl.processes import Children

_BURST_BYTES: Final = 256 << 10
"""Packets of loopback have up to 64 KiB, and a bucket must hold several."""

_UP: Final = 1
_DOWN: Final = 2


class Link(Protocol):
    """A limited link."""

    @property
    def prefix(self) -> Sequence[str]:
        """A command that runs another one where the link is."""

    @property
    def text(self) -> str:
        """How it is limited, for people."""

    def shard_place(self, children: Children) -> ShardPlace:
        """Where another shard listens and is reached over the link."""


class NamespaceLink:
    """A link in a network namespace."""

    def __init__(self, name: str, mbit: float) -> None:
        self._name = name
        self._mbit = mbit

    @property
    def prefix(self) -> Sequence[str]:
        """Enters the namespace."""
        return (_tool("ip"), "netns", "exec", self._name)

    @property
    def text(self) -> str:
        """How it is limited."""
        return f"{self._mbit:g} Mbit/s each way by htb in a network namespace"

    def open(self) -> None:
        """Gives loopback a bucket for each direction; other packets pass by."""
        _ip("-n", self._name, "link", "set", "lo", "up")
        self._tc(*("qdisc", "add", "dev", "lo", "root", "handle", "1:", "htb"))
        for band in (_UP, _DOWN):
            self._tc(
                *("class", "add", "dev", "lo", "parent", "1:", "classid", f"1:{band}"),
                *("htb", "rate", f"{self._mbit:g}mbit", "burst", f"{_BURST_BYTES}b"),
            )

    def shard_place(self, children: Children) -> ShardPlace:
        """A port whose packets are limited in both directions."""
        port = free_port()
        for band, side in ((_UP, "dport"), (_DOWN, "sport")):
            self._tc(
                *("filter", "add", "dev", "lo", "parent", "1:", "protocol", "ip"),
                *("u32", "match", "ip", side, str(port), "0xffff"),
                *("flowid", f"1:{band}"),
            )
        return ShardPlace(f"127.0.0.1:{port}", f"127.0.0.1:{port}")

    def _tc(self, *arguments: str) -> None:
        _run(_tool("tc"), "-n", self._name, *arguments)


class ProxyLink:
    """A link that is a process before each shard; see `slow_link`."""

    prefix: Sequence[str] = ()

    def __init__(self, mbit: float, why: str) -> None:
        self._mbit = mbit
        self._why = why

    @property
    def text(self) -> str:
        """How it is limited."""
        return (
            f"{self._mbit:g} Mbit/s each way and connection by a process in between, "
            f"since {self._why}"
        )

    def shard_place(self, children: Children) -> ShardPlace:
        """Where a shard listens, and the process that workers reach in its stead."""
        listened, reached = free_port(), free_port()
        bytes_per_s = self._mbit * 125_000
        children.start(
            f"link to port {listened}",
            [
                "psctl.bench.slow_link",
                *(str(reached), str(listened), str(bytes_per_s), "0"),
            ],
            {},
        )
        return ShardPlace(f"127.0.0.1:{listened}", f"127.0.0.1:{reached}")


@contextmanager
def limited_link(mbit: float) -> Iterator[Link]:
    """The best link that this user of this machine can have.

    Args:
        mbit: Speed of each direction, in Mbit/s.

    Raises:
        CommandError: The kernel refused a namespace or its bucket to root.
    """
    why = no_namespace_reason()
    if why:
        yield ProxyLink(mbit, why)
        return
    name = f"psctl-bench-{os.getpid()}"
    _ip("netns", "add", name)
    try:
        link = NamespaceLink(name, mbit)
        link.open()
        yield link
    finally:
        _ip("netns", "delete", name)


def no_namespace_reason() -> str:
    """Why there can be no link by the kernel; empty if there can."""
    if os.geteuid() != 0:
        return "only root may make network namespaces"
    missing = [name for name in ("ip", "tc") if shutil.which(name) is None]
    if missing:
        return f"this machine has no {' and no '.join(missing)} (install iproute2)"
    return ""


def _ip(*arguments: str) -> None:
    _run(_tool("ip"), *arguments)


def _tool(name: str) -> str:
    path = shutil.which(name)
    assert path is not None, "`no_namespace_reason` has looked"
    return path


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise CommandError(
            f"`{' '.join(command)}` failed with exit code {done.returncode}: "
            f"{done.stderr.strip()}; run the benchmark as another user than root to "
            "have a link without the kernel's help"
        )
