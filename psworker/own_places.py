"""Which workers of which jobs this process is: a second one by accident waits for ever.

A connection that is dropped without `close()` stays a worker: what it has prepared may
still be used. A script that connects again from the same thread and gives no other
worker id has forgotten it, and in BSP the second would wait for the first, which is
itself.
"""

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


_taken: Final[list[_Taken]] = []
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
    taken = _Taken(place, is_out, os.getpid(), thread, coordinator, wanted_id)
    with _lock:
        _taken.append(taken)


def give_up(place: Place) -> None:
    """Notes that a connection has ended."""
    with _lock:
        _taken[:] = [each for each in _taken if each.place is not place]
