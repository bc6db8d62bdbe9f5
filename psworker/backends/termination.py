"""A process that is told to end leaves its jobs first, and says why.

A scheduler that wants the machine back sends SIGTERM, a terminal that is closed SIGHUP.
By default the process is gone at once: the others wait for a lease, and the job calls
it lost. With a connection it leaves, and is then ended by the same signal as before; a
second signal, unless it comes in the same moment, ends it while it still leaves. A
handler of the script's own is left alone, and so is SIGQUIT, which is for who wants to
see the process as it stands.

What a handler interrupts may hold any lock of this process, so nothing is asked here
but of the event loop's thread.
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
    """Whoever has a place in a job."""

    def leave_at_once(self, signal_name: str) -> None:
        """Gives it up, whatever is under way, within seconds."""
        ...


_workers: Final[list[Worker]] = []
_handled: Final[list[signal.Signals]] = []
_wish = EndWish()


def watch(worker: Worker) -> None:
    """From now on the worker leaves when its process is told to end."""
    _workers.append(worker)
    if _handled or threading.current_thread() is not threading.main_thread():
        return
    for name in ("SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)  # not all are there on Windows
        if number is not None and signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, _end)
            _handled.append(number)


def unwatch(worker: Worker) -> None:
    """Notes that a worker has no place any more."""
    if worker in _workers:
        _workers.remove(worker)
    if not _workers and threading.current_thread() is threading.main_thread():
        _give_back()


def _end(number: int, frame: FrameType | None) -> None:
    global _wish
    heard = _wish.hear()
    if heard is Heard.SAME:
        return  # that of a launcher, say, and that to its whole group
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
    """A child has no place in a job, and is ended as any process."""
    global _wish
    _workers.clear()
    _wish = EndWish()
    _give_back()


if sys.platform != "win32":
    os.register_at_fork(after_in_child=_after_fork)
