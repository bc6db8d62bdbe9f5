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
from typing import Final

from psctl.bench.machine import free_port
from psctl.daemons import ShardPlace
from psctl.failures import CommandError
from psctl.processes import Children

_BURST_BYTES: Final = 256 << 10
"""Packets of loopback have up to 64 KiB, and a bucket must hold several."""

_UP: Final = 1
_DOWN: Final = 2


class ProxyLink:
    """A link that is a process before each shard; see `slow_link`.

    Attributes:
        prefix: A command that runs another one where the link is.
        text: How it is limited, for people.
    """

    prefix: Sequence[str] = ()

    def __init__(self, mbit: float, why: str, *, latency_ms: float = 0.0) -> None:
        self._mbit = mbit
        self._latency_ms = latency_ms
        self.text = (
            f"{mbit:g} Mbit/s each way and connection by a process in between, since "
            f"{why}"
        )

    def shard_place(self, children: Children) -> ShardPlace:
        """Where another shard listens, and the process by which workers reach it."""
        listened, reached = free_port(), free_port()
        children.start(
            f"link to port {listened}",
            [
                *("psctl.bench.slow_link", str(reached), str(listened)),
                *(str(self._mbit * 125_000), str(self._latency_ms / 1000)),
            ],
        )
        return ShardPlace(f"127.0.0.1:{listened}", f"127.0.0.1:{reached}")


class NamespaceLink:
    """A link in a network namespace, with the attributes of the other one."""

    def __init__(self, name: str, mbit: float) -> None:
        """Limits packets each way; others pass by. Needs the namespace."""
        self._name = name
        self.prefix: Sequence[str] = (_tool("ip"), "netns", "exec", name)
        self.text = f"{mbit:g} Mbit/s each way by htb in a network namespace"
        _run("ip", "-n", name, "link", "set", "lo", "up")
        self._tc(*("qdisc", "add", "dev", "lo", "root", "handle", "1:", "htb"))
        for band in (_UP, _DOWN):
            self._tc(
                *("class", "add", "dev", "lo", "parent", "1:", "classid", f"1:{band}"),
                *("htb", "rate", f"{mbit:g}mbit", "burst", f"{_BURST_BYTES}b"),
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
        _run("tc", "-n", self._name, *arguments)


Link = NamespaceLink | ProxyLink


@contextmanager
def limited_link(mbit: float) -> Iterator[Link]:
    """The best link that this user of this machine can have, as fast each way."""
    why = no_namespace_reason()
    if why:
        yield ProxyLink(mbit, why)
        return
    name = f"psctl-bench-{os.getpid()}"
    _run("ip", "netns", "add", name)
    try:
        yield NamespaceLink(name, mbit)
    finally:
        _run("ip", "netns", "delete", name)


def no_namespace_reason() -> str:
    """Why there can be no link by the kernel; empty if there can."""
    if os.geteuid() != 0:
        return "only root may make network namespaces"
    missing = [name for name in ("ip", "tc") if shutil.which(name) is None]
    if missing:
        return f"this machine has no {' and no '.join(missing)} (install iproute2)"
    return ""


def _tool(name: str) -> str:
    path = shutil.which(name)
    assert path is not None, "`no_namespace_reason` has looked"
    return path


def _run(tool: str, *arguments: str) -> None:
    command = (_tool(tool), *arguments)
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise CommandError(
            f"`{' '.join(command)}` failed with exit code {done.returncode}: "
            f"{done.stderr.strip()}; run the benchmark as another user than root to "
            "have a link without the kernel's help"
        )
