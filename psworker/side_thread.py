"""A thread beside the script's, for work that the script does not wait for."""

import queue
import threading
from collections.abc import Callable
from typing import Final, TypeVar

from psworker.event_loop import LoopFuture

T = TypeVar("T")

_END: Final = None


class SideThread:
    """Does one thing after the other, in the order of `submit`.

    A daemon: a script that ends without `close()` isn't held up by work that waits for
    the network.
    """

    def __init__(self, name: str) -> None:
        """Starts the thread, under a name for debuggers."""
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def submit(
        self, work: Callable[[], T], future: LoopFuture[T] | None = None
    ) -> LoopFuture[T]:
        """Has some work done; the future has its result, or raises its error.

        Args:
            work: What to do.
            future: What gets the result, for who has to know of it before the work can
                begin. Submitted twice with one, the work is done once.
        """
        future = LoopFuture() if future is None else future

        def run() -> None:
            if future.done():
                return
            try:
                result = work()
            except BaseException as error:
                future.set_exception(error)  # raised where it is waited for
            else:
                future.set_result(result)

        self._work.put(run)
        return future

    def close(self, *, waits: bool = True) -> None:
        """Ends the thread, once it has done what was submitted; waits for that."""
        self._work.put(_END)
        if waits:
            self._thread.join()

    def _serve(self) -> None:
        while (run := self._work.get()) is not _END:
            run()
            del run  # holds what it worked on
