"""A daemon's file descriptors: how many connections may take, and word when they go.

Without any left, who connects is not refused: the connection waits in the kernel's
queue, and both sides look as if the other one was slow. So connections get a part only.
"""

import errno
import logging
import os
import sys
from dataclasses import replace
from typing import Final

from psserver.edge.limits import Limits

REPEAT_S: Final = 60.0
KEPT_COUNT: Final = 64
"""Least number that connections leave to files, shared memory and the daemon itself."""

DESCRIPTOR_COUNT_WANTED: Final = 65_536
"""Enough for the connections that a daemon accepts by default."""

CONNECTION_COUNT_MIN: Final = 8
"""Connections of a daemon whose limit leaves it no such number."""

_FOLDER: Final = "/dev/fd"

log = logging.getLogger("psserver")


class DescriptorLog:
    """What to say about descriptors, and not too often.

    Args:
        connection_count_max: How many of them connections may take.
    """

    def __init__(self, connection_count_max: int) -> None:
        self._most = connection_count_max
        self._level = logging.NOTSET
        self._said_at = 0.0

    def line(self, count: int, limit: int, now: float) -> tuple[int, str] | None:
        """Level and text of a line for the log, if there is one to write.

        Args:
            count: Descriptors in use.
            limit: How many there may be.
            now: Seconds on a clock that never goes back.
        """
        level = self._level_of(count, limit)
        is_worse = level > self._level
        is_due = level > logging.NOTSET and now - self._said_at >= REPEAT_S
        was_told = self._level > logging.NOTSET
        if not (is_worse or is_due):
            if level == logging.NOTSET and was_told:
                self._level = level
                return logging.INFO, f"{count} of {limit} file descriptors are in use"
            return None
        self._level, self._said_at = level, now
        return level, _text(count, limit, level, self._most)

    def _level_of(self, count: int, limit: int) -> int:
        if count >= limit - 1:
            return logging.ERROR
        return logging.WARNING if count >= self._most else logging.NOTSET


def descriptors() -> tuple[int, int]:
    """How many this process has in use, and how many it may have."""
    if sys.platform == "win32" or not os.path.isdir(_FOLDER):
        return 0, sys.maxsize
    import resource

    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit == resource.RLIM_INFINITY:
        limit = sys.maxsize
    try:
        return len(os.listdir(_FOLDER)) - 1, limit  # one of them was for the look
    except OSError as error:
        if error.errno != errno.EMFILE:  # that there is none left for the look
            raise
        return limit, limit


def fitted(limits: Limits, descriptor_limit: int) -> Limits:
    """The limits, with connections that so many descriptors leave room for.

    Three quarters, so that a stranger who opens all it can leaves the daemon able to
    write its state and to share memory with its workers; half of these for a machine,
    so that it leaves room for others.
    """
    most = min(
        limits.connections, descriptor_limit * 3 // 4, descriptor_limit - KEPT_COUNT
    )
    most = max(CONNECTION_COUNT_MIN, most)
    return replace(
        limits,
        connections=most,
        machine_connections=min(limits.machine_connections, max(1, most // 2)),
    )


def raise_descriptor_limit() -> None:
    """Raises this process's soft limit of descriptors as far as it may, and helps."""
    if sys.platform == "win32":
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTOR_COUNT_WANTED
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and wanted > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _text(count: int, limit: int, level: int, most: int) -> str:
    what = (
        "out of file descriptors: no worker, shard or psctl can connect before some "
        "connections end"
        if level == logging.ERROR
        else f"running out of file descriptors: at most {most} connections are taken, "
        "and who connects beyond them is turned away"
    )
    return (
        f"{what}: {count} of {limit} are in use; stop what holds connections without "
        "need, or start this daemon again with a higher limit (`ulimit -n 65536` "
        "before it, LimitNOFILE= of its systemd unit)"
    )
