"""How long a shard has not heard its coordinator."""

import asyncio
import logging

from psserver.edge.monotonic import now_ms
from psserver.shard.host.shard_host import ShardHost
from pswire.keepalive import CONTROL_KEEPALIVE
from pswire.limits import WAITING_INTERVAL_MS

UNNOTICED_MS = CONTROL_KEEPALIVE.interval_ms + CONTROL_KEEPALIVE.timeout_ms
"""Longest time for which an open watch may have been dead."""

log = logging.getLogger("psserver.shard")


class Outage:
    """Says that the coordinator does not answer: at first, then every few seconds."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._began_ms: int | None = None
        self._said_ms = 0

    def note(self, why: str) -> None:
        """An attempt has failed."""
        now = now_ms()
        is_first = self._began_ms is None
        if self._began_ms is None:
            self._began_ms = now
        if is_first or now - self._said_ms >= WAITING_INTERVAL_MS:
            self._said_ms = now
            so_far = "" if is_first else f" for {(now - self._began_ms) / 1000:.0f} s"
            log.warning(
                "waiting for the coordinator at %s%s: %s", self._address, so_far, why
            )

    def end(self) -> None:
        """It answers."""
        self._began_ms = None


class Silence:
    """Holds a shard's calls when its watch is broken for a lease.

    The coordinator may have given this shard up by then, and what it acknowledged
    would be lost. An open watch is a sign of life by itself: pings that are not
    answered break it. Any answer counts while it is broken.
    """

    def __init__(self, host: ShardHost) -> None:
        self._host = host
        self._heard_ms = now_ms()
        self._is_open = False
        self._timer: asyncio.TimerHandle | None = None

    def heard(self) -> None:
        """The coordinator has answered a call."""
        self._heard_ms = now_ms()

    def opened(self) -> None:
        """The watch is there, and what it has sent first is taken in."""
        self._is_open = True
        self.heard()
        self.close()
        if self._host.silent_since_ms is not None:
            log.info("the coordinator answers again: calls go on")
            self._host.set_silent(None)

    def broke(self) -> None:
        """The watch is broken, or could not be opened."""
        if self._is_open:
            self._is_open = False
            self._heard_ms = max(self._heard_ms, now_ms() - UNNOTICED_MS)
        if self._timer is None:
            self._check()

    def close(self) -> None:
        """Waits for nothing any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check(self) -> None:
        self._timer = None
        lease_ms = self._host.settings.lease_ttl_ms
        left_ms = self._heard_ms + lease_ms - now_ms()
        is_silent = self._host.silent_since_ms is not None
        if left_ms <= 0 and not is_silent:
            log.warning(
                "the coordinator has been silent for a lease of %.1f s: pushes and "
                "pulls are held until it answers again",
                lease_ms / 1000,
            )
            self._host.set_silent(self._heard_ms)
        elif not is_silent:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(left_ms / 1000, self._check)
