"""A process that a signal ends leaves its jobs first, and logs that.

A scheduler that wants the machine back sends SIGTERM, a terminal that is closed SIGHUP.
By default the process ends at once: the others wait for a lease, and the job calls it
lost. With a connection it leaves, and is then ended by the same signal as before; a
second signal, unless it is of the same moment, ends it while it still leaves. A handler
of the script's own is left alone, and so is SIGQUIT, which is for whoever wants to see
the process as it is.

What a handler interrupts may hold any lock of this process, so it waits for nothing but
the event loop's thread.
"""

import logging
import os
import signal
import sys
import threading
from types import FrameType
from typing import Final, Protocol

from pswire.end_signals import EndWish, Heard
from psworker.errors import PsError

logger: Final = logging.getLogger("psworker")


class Worker(Protocol):
    """A worker of a job."""

    def leave_at_once(self, signal_name: str) -> None:
        """Leaves the job, whatever is under way, within seconds."""
        ...


_workers: Final[list[Worker]] = []
_handled: Final[list[signal.Signals]] = []
_wish = EndWish()


def watch(worker: Worker) -> None:
    """From now on the worker leaves when a signal ends its process."""
    _workers.append(worker)
    if _handled or threading.current_thread() is not threading.main_thread():
        return
    for name in ("SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)  # not all are there on Windows
        if number is not None and signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, _end)
            _handled.append(number)


def unwatch(worker: Worker) -> None:
    """Ends `watch`."""
    if worker in _workers:
        _workers.remove(worker)
    if not _workers and threading.current_thread() is threading.main_thread():
        _give_back()


def _end(number: int, frame: FrameType | None) -> None:
    global _wish
    heard = _wish.hear()
    if heard is Heard.SAME:
        return  # sent by a launcher, say, and to its whole process group
    if heard is Heard.FIRST:
        for worker in tuple(_workers):
            try:
                worker.leave_at_once(signal.Signals(number).name)
            except (PsError, TimeoutError) as error:
                logger.warning(
                    "could not leave the job, which counts this as lost: %s", error
                )
    _wish = EndWish()
    _give_back()
    os.kill(os.getpid(), number)


def _give_back() -> None:
    for number in _handled:
        if signal.getsignal(number) == _end:
            signal.signal(number, signal.SIG_DFL)
    _handled.clear()


def _after_fork() -> None:
    """A child is no worker, and is ended as any process."""
    global _wish
    _workers.clear()
    _wish = EndWish()
    _give_back()


if sys.platform != "win32":
    os.register_at_fork(after_in_child=_after_fork)
