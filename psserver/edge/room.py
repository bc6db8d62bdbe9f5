"""Whether a daemon has room for new work, and who is ended to have it.

Looked at as long as it runs. New work is refused while there is none, to be asked for
again; what members do in their steps goes on.
"""

import asyncio
import logging

from psserver.edge.connections import Connections, surplus
from psserver.edge.descriptors import DescriptorLog, descriptors
from psserver.edge.open_calls import OpenCalls
from psserver.edge.usable_memory import memory_left
from psserver.logs import RefusalLog

LOOK_INTERVAL_S = 1.0

log = logging.getLogger("psserver")
_refusals = RefusalLog(log)


async def watch_room(calls: OpenCalls, port: int) -> None:
    """Looks at this process's descriptors, connections and memory until cancelled.

    Args:
        calls: Of its server, which admits no new work while there is no room.
        port: Where that listens.
    """
    room = Room(calls, port)
    loop = asyncio.get_running_loop()
    while True:
        room.look(loop.time())
        await asyncio.sleep(LOOK_INTERVAL_S)


class Room:
    """What is left of a process for one server."""

    def __init__(self, calls: OpenCalls, port: int) -> None:
        self._calls = calls
        self._connections = Connections(port)
        self._descriptors = DescriptorLog(calls.limits.connections)

    def look(self, now_s: float) -> None:
        """Looks once, and ends connections that have to.

        Args:
            now_s: Seconds on the event loop's clock.
        """
        self._note(self._lacking())
        count, limit = descriptors()
        if line := self._descriptors.line(count, limit, now_s):
            log.log(line[0], "%s", line[1])
        self._end_unread(now_s)
        if self._calls.full:
            self._end_idle(now_s)
        # Few descriptors are few connections, which need no look.
        if count > self._calls.limits.machine_connections:
            self._end_surplus(now_s)

    def _lacking(self) -> str:
        wanted = self._calls.limits.free_memory_mib << 20
        left, limit = memory_left()
        if left >= wanted:
            return ""
        return (
            f"{max(0, left) >> 20} MiB are left below {limit}, and "
            f"{wanted >> 20} have to be (free-memory-mib)"
        )

    def _note(self, full: str) -> None:
        if full and not self._calls.full:
            log.warning("new work is refused, and steps go on: %s", full)
        if self._calls.full and not full:
            log.info("there is room for new work again")
        self._calls.full = full

    def _end_unread(self, now_s: float) -> None:
        unread = self._calls.unread(now_s)
        for peer, method in unread.items():
            _refusals.warning(
                "the connection from %s ends: its answer of %s was not read in time",
                *(peer, method),
            )
        if unread:
            self._calls.ended["unread"] += len(unread)
            self._connections.end(unread)

    def _end_idle(self, now_s: float) -> None:
        """Ends connections without a call: what gRPC has read of them has no bound.

        Headers that do not end take up to 16 MiB before there is a call.
        """
        busy = self._calls.peers
        seen = self._connections.look(now_s).items()
        idle = {
            peer
            for peer, since_s in seen
            if peer not in busy and now_s - since_s >= LOOK_INTERVAL_S
        }
        self._calls.ended["idle"] += len(idle)
        self._connections.end(idle)

    def _end_surplus(self, now_s: float) -> None:
        most = self._calls.limits.machine_connections
        found = surplus(self._connections.look(now_s), self._calls.peers, most)
        for machine, peers in found.items():
            _refusals.warning(
                "%d connections from %s end: one machine may have %d "
                "(machine-connections)",
                *(len(peers), machine, most),
            )
        surplus_peers = {each for peers in found.values() for each in peers}
        if surplus_peers:
            self._calls.ended["surplus"] += len(surplus_peers)
            self._connections.end(surplus_peers)
