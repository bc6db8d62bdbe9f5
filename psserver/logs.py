"""Logs of the daemons, and lines that others can cause at will."""

import asyncio
import logging
import time
from collections.abc import Callable
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
        self,
        log: logging.Logger,
        clock: Callable[[], float] = time.monotonic,
        *,
        lines_max: int = REFUSAL_LINES_MAX,
        period_s: float = REFUSAL_PERIOD_S,
    ) -> None:
        self._log = log
        self._clock = clock
        self._lines_max = lines_max
        self._period_s = period_s
        self._began_s = clock()
        self._line_count = 0
        self._left_out_count = 0

    @property
    def is_over(self) -> bool:
        """Whether the period of its last lines is."""
        return self._clock() - self._began_s >= self._period_s

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
        if self.is_over:
            self._began_s, self._line_count = self._clock(), 0
        if self._line_count >= self._lines_max:
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


class PeerLog:
    """Lines about what peers may not do: one a minute for each.

    In the event loop. However many peers there are, what is kept does not grow.
    """

    def __init__(
        self, log: logging.Logger, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._log = log
        self._clock = clock
        self._logs: dict[str, RefusalLog] = {}

    def warning(self, peer: str, text: str) -> None:
        """Writes a line, unless there was one about this peer of late.

        The next one says how many were left out.
        """
        if peer not in self._logs and len(self._logs) >= PEER_COUNT_MAX:
            self._logs = {p: log for p, log in self._logs.items() if not log.is_over}
            if len(self._logs) >= PEER_COUNT_MAX:
                peer = _OTHERS
        if peer not in self._logs:
            self._logs[peer] = RefusalLog(
                self._log, self._clock, lines_max=1, period_s=PEER_PERIOD_S
            )
        self._logs[peer].warning("a call from %s is refused: %s", peer, text)


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
