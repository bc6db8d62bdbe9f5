"""Which workers of which jobs this process is: a second one by accident waits for ever.

A connection that is dropped without `close()` stays a worker: what it has prepared may
still be used. A script that connects again from the same thread and gives no other
worker id has forgotten it, and in BSP the second would wait for the first, which is
itself. One that connects from another thread, or under another id, may well mean to be
several workers, and is told once what that takes.
"""

import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

from psworker.errors import ConfigurationError


class Place(Protocol):
    """A connection that is open."""

    @property
    def worker_id(self) -> str:
        """Of the worker."""
        ...

    def close(self) -> None:
        """Ends it."""
        ...


@dataclass(frozen=True, slots=True)
class _Taken:
    """A place, and who has taken it."""

    place: Place
    is_out: Callable[[], bool]
    process_id: int
    thread: threading.Thread
    coordinator: str
    wanted_id: str


logger: Final = logging.getLogger("psworker")

_taken: Final[list[_Taken]] = []
_has_told_several = False
_lock: Final = threading.RLock()  # a signal handler may close too


def make_room(coordinator: str, wanted_id: str) -> None:
    """Checks that this thread may connect as one more worker.

    A connection that is of no use any more is closed for it.

    Args:
        coordinator: Where it goes.
        wanted_id: The wanted id, empty for none.

    Raises:
        ConfigurationError: It is connected already, and gives no other id.
    """
    coordinator = _as_told_apart(coordinator)
    with _lock:
        here = (os.getpid(), threading.current_thread(), coordinator, wanted_id)
        earlier = [
            each
            for each in _taken
            if (each.process_id, each.thread, each.coordinator, each.wanted_id) == here
        ]
    for each in earlier:
        if not each.is_out():
            raise ConfigurationError(
                f"this process is connected to {coordinator} already, as worker "
                f"{each.place.worker_id}, and one would wait for the other: call "
                "close() on that connection first, which `with psworker.connect() as "
                "ps:` does by itself; or give connect() worker ids that differ, to be "
                "several workers"
            )
        each.place.close()


def take(
    place: Place, coordinator: str, wanted_id: str, *, is_out: Callable[[], bool]
) -> None:
    """Notes that this thread has connected.

    Args:
        place: The connection.
        coordinator: Where it goes.
        wanted_id: The wanted id, empty for none.
        is_out: Whether the job is over, or goes on without it.
    """
    thread = threading.current_thread()
    coordinator = _as_told_apart(coordinator)
    taken = _Taken(place, is_out, os.getpid(), thread, coordinator, wanted_id)
    with _lock:
        others = [
            each
            for each in _taken
            if (each.process_id, each.coordinator) == (os.getpid(), coordinator)
            and not each.is_out()
        ]
        _taken.append(taken)
    _tell_several(taken, others)


def give_up(place: Place) -> None:
    """Notes that a connection has ended."""
    with _lock:
        _taken[:] = [each for each in _taken if each.place is not place]


def _tell_several(taken: _Taken, others: list[_Taken]) -> None:
    """Says once that this process is several workers, unless that is clearly meant.

    It is by whoever gives ids, and has a thread for each of them.
    """
    global _has_told_several
    here = [each for each in others if each.thread is taken.thread]
    unnamed = [each for each in others if each.wanted_id == taken.wanted_id]
    if _has_told_several or not (here or unnamed):
        return
    _has_told_several = True
    other = (here or unnamed)[0].place.worker_id or "the first"
    why = (
        "in BSP a step of one waits for the other's: step them in threads of their own"
        if here
        else "each must make its steps, since in BSP they wait for each other"
    )
    logger.warning(
        "connect() was called again, so that this process is two workers of the job at "
        "%s, %s and %s, and %s; if one is meant, connect once and pass the connection "
        "on, or call close() on the first one before",
        taken.coordinator,
        other,
        taken.place.worker_id or "this one",
        why,
    )


def _as_told_apart(coordinator: str) -> str:
    """One name for what is written in two ways."""
    host, _, port = coordinator.rpartition(":")
    return f"127.0.0.1:{port}" if host == "localhost" else coordinator
