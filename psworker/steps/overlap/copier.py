"""A thread that copies and hashes for the one that computes.

numpy and xxhash let go of the interpreter's lock while they go through a chunk, so that
the other thread computes meanwhile. A daemon: a script that ends without `close()`
isn't held up by a copy that waits for the network.
"""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


class Copier:
    """Does one thing after the other, in the order in which it was told to."""

    def __init__(self) -> None:
        """Starts the thread."""
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=self._serve, name="psworker-copier", daemon=True
        )
        self._thread.start()

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Has some work done.

        Returns:
            What it came to.
        """
        future: Future[T] = Future()

        def run() -> None:
            try:
                result = work()
            except BaseException as error:
                future.set_exception(error)  # raised where it is waited for
            else:
                future.set_result(result)

        self._work.put(run)
        return future

    def close(self) -> None:
        """Ends the thread, once it has done what it was told to."""
        self._work.put(None)
        self._thread.join()

    def _serve(self) -> None:
        while (run := self._work.get()) is not None:
            run()
            del run  # holds gradients
