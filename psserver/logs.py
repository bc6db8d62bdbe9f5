"""Logs of the daemons, and lines that others can cause at will."""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from pswire import logs

REFUSAL_LINES_MAX: Final = 5
"""Lines about refusals that one place writes in a period."""

REFUSAL_PERIOD_S: Final = 10.0
"""Length of a period. Five lines in each are some 10 MB a day."""


class RefusalLog:
    """Lines that whoever calls can cause at will, of which a few are enough.

    In the event loop.
    """

    def __init__(
        self, log: logging.Logger, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._log = log
        self._clock = clock
        self._began_s = clock()
        self._line_count = 0
        self._left_out_count = 0

    def warning(
        self, text: str, *args: object, error: BaseException | None = None
    ) -> None:
        """Writes a line, unless there were too many of late.

        The first one that is written after others were left out says how many.

        Args:
            text: What happened, a format of `logging`.
            args: Its arguments.
            error: What the line has the traceback of, which makes it an error.
        """
        now_s = self._clock()
        if now_s - self._began_s >= REFUSAL_PERIOD_S:
            self._began_s, self._line_count = now_s, 0
        if self._line_count >= REFUSAL_LINES_MAX:
            self._left_out_count += 1
            return
        self._line_count += 1
        if self._left_out_count:
            text += " (%d lines like this were left out before)"
            args = (*args, self._left_out_count)
            self._left_out_count = 0
        level = logging.WARNING if error is None else logging.ERROR
        self._log.log(level, text, *args, exc_info=error)


PEER_PERIOD_S: Final = 60.0
"""Between two lines about the same peer."""

PEER_COUNT_MAX: Final = 256
"""Peers that are told apart; all others are one."""

_OTHERS: Final = "other peers"


@dataclass(slots=True)
class _Told:
    at_s: float
    left_out_count: int = 0


class PeerLog:
    """Lines about what peers may not do: one a minute for each.

    In the event loop. However many peers there are, what is kept does not grow.
    """

    def __init__(
        self, log: logging.Logger, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._log = log
        self._clock = clock
        self._told: dict[str, _Told] = {}

    def warning(self, peer: str, text: str) -> None:
        """Writes a line, unless there was one about this peer of late.

        The next one says how many were left out.
        """
        now_s = self._clock()
        if peer not in self._told and len(self._told) >= PEER_COUNT_MAX:
            self._forget(now_s)
            if len(self._told) >= PEER_COUNT_MAX:
                peer = _OTHERS
        told = self._told.get(peer)
        if told is not None and now_s - told.at_s < PEER_PERIOD_S:
            told.left_out_count += 1
            return
        left_out = told.left_out_count if told is not None else 0
        self._told.pop(peer, None)  # so that the oldest one is the first
        self._told[peer] = _Told(now_s)
        more = f" ({left_out} calls like this were left out before)" if left_out else ""
        self._log.warning("a call from %s is refused: %s%s", peer, text, more)

    def _forget(self, now_s: float) -> None:
        """Peers of whom nothing is left to say, if the oldest is one."""
        oldest = next(iter(self._told.values()))
        if now_s - oldest.at_s >= PEER_PERIOD_S:
            self._told = {
                peer: told
                for peer, told in self._told.items()
                if now_s - told.at_s < PEER_PERIOD_S
            }


def configure_logs(*, role: str, verbose: bool = False, name: str = "") -> None:
    """Sends all logs of a daemon to stderr, and to a file if there is a folder.

    Raises:
        LogFolderError: The file can't be written.
    """
    logs.configure_logs(role=role, verbose=verbose, name=name or role)
    logging.getLogger("grpc._cython.cygrpc").addFilter(_is_worth_telling)


def _is_worth_telling(record: logging.LogRecord) -> bool:
    """Leaves out the traceback that gRPC writes for each call whose client is gone.

    It comes when an answer can't be sent any more, which is what a dead worker is
    like; that it is gone is logged elsewhere, by name. So does a call that ends in the
    moment in which the server does.
    """
    kind = record.exc_info[0] if record.exc_info else None
    is_cancelled = kind is not None and issubclass(kind, asyncio.CancelledError)
    return not is_cancelled and "ExecuteBatchError" not in record.getMessage()
