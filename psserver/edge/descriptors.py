"""A daemon's file descriptors: how many connections may take, and word when they go.

Without any left, who connects is not refused: the connection waits in the kernel's
queue, and both sides look as if the other one was slow. So connections get a part only.
"""

import asyncio
import errno
import logging
import os
import sys
from typing import Final

from psserver.edge.server import CONNECTION_COUNT_MAX

LOOK_INTERVAL_S: Final = 2.0
REPEAT_S: Final = 60.0
KEPT_COUNT: Final = 64
"""Least number that connections leave to files, shared memory and the daemon itself."""

CONNECTION_COUNT_MIN: Final = 8
"""Connections of a daemon whose limit leaves it no such number."""

_FOLDER: Final = "/dev/fd"

log = logging.getLogger("psserver")


class DescriptorLog:
    """What to say about descriptors, and not too often."""

    def __init__(self) -> None:
        self._level = logging.NOTSET
        self._said_at = 0.0

    def line(self, count: int, limit: int, now: float) -> tuple[int, str] | None:
        """Level and text of a line for the log, if there is one to write.

        Args:
            count: Descriptors in use.
            limit: How many there may be.
            now: Seconds on a clock that never goes back.
        """
        level = _level(count, limit)
        is_worse = level > self._level
        is_due = level > logging.NOTSET and now - self._said_at >= REPEAT_S
        was_told = self._level > logging.NOTSET
        if not (is_worse or is_due):
            if level == logging.NOTSET and was_told:
                self._level = level
                return logging.INFO, f"{count} of {limit} file descriptors are in use"
            return None
        self._level, self._said_at = level, now
        return level, _text(count, limit, level)


async def watch_descriptors() -> None:
    """Looks at this process's descriptors as long as it runs."""
    if not _can_look():
        await asyncio.Event().wait()
    log_of_descriptors = DescriptorLog()
    loop = asyncio.get_running_loop()
    while True:
        found = log_of_descriptors.line(*descriptors(), loop.time())
        if found is not None:
            level, text = found
            log.log(level, "%s", text)
        await asyncio.sleep(LOOK_INTERVAL_S)


def descriptors() -> tuple[int, int]:
    """How many this process has in use, and how many it may have."""
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


def connection_count_max(limit: int) -> int:
    """How many of so many descriptors connections may take.

    Three quarters, so that a stranger who opens all it can leaves the daemon able to
    write its state and to share memory with its workers.
    """
    most = min(CONNECTION_COUNT_MAX, limit * 3 // 4, limit - KEPT_COUNT)
    return max(CONNECTION_COUNT_MIN, most)


def _can_look() -> bool:
    return sys.platform != "win32" and os.path.isdir(_FOLDER)


def _level(count: int, limit: int) -> int:
    if count >= limit - 1:
        return logging.ERROR
    if count >= connection_count_max(limit):
        return logging.WARNING
    return logging.NOTSET


def _text(count: int, limit: int, level: int) -> str:
    most = connection_count_max(limit)
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
