"""Who writes the values of a step under way: a thread beside the one that computes.

Values for a device are the exception: the thread that computes writes them when it
waits for them, on the stream that its script has chosen.
"""

from functools import partial
from typing import Protocol

from psworker.steps.overlap.arriving_values import ArrivingValues
from psworker.steps.overlap.copier import Copier


class Delivery(Protocol):
    """A push that has been started, as far as its values go."""

    def write_next(self, store: ArrivingValues) -> bool:
        """Writes what comes next; `False` when nothing more does."""
        ...

    def cancel(self) -> None:
        """Ends it: nothing more comes."""
        ...


class ValueWriter:
    """Writes the values of one step at a time.

    Its methods are for the thread that computes, which holds the values' `turn`.
    """

    def __init__(self, values: ArrivingValues, copier: Copier) -> None:
        """Writes nothing yet.

        Args:
            values: Where they go.
            copier: Writes those in host memory.
        """
        self._values = values
        self._copier = copier
        self._exchange: Delivery | None = None
        self._is_beside = False
        self._is_writing = False
        self._error: BaseException | None = None

    def begin(self, exchange: Delivery) -> None:
        """Writes what a push that has been started brings."""
        self._exchange = exchange
        # Again for each push: a script may move its model.
        self._is_beside = self._values.is_in_host
        if self._is_beside:
            self._is_writing = True
            try:
                self._copier.submit(partial(self._write_all, exchange))
            except BaseException:
                # Interrupted, before or after it was told: it does not write when
                # this ends, whichever it was.
                exchange.cancel()
                self._copier.submit(lambda: None).result()
                self._is_writing = False
                raise

    def wait_next(self) -> bool:
        """Waits until more has been written; `False` once nothing more will be.

        Raises:
            PsError: What came could not be written. The push can go on.
        """
        if self._exchange is not None and not self._is_beside:
            return self._exchange.write_next(self._values)
        if self._is_writing:
            self._values.turn.wait()
            return True
        self.end()
        return False

    def end(self) -> None:
        """Returns once nothing is written any more.

        Raises:
            PsError: What came could not be written. The push can go on.
        """
        while self._is_writing:
            self._values.turn.wait()
        self._exchange = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _write_all(self, exchange: Delivery) -> None:
        """Writes until the push is done or ended, in the thread that copies."""
        error: BaseException | None = None
        try:
            while exchange.write_next(self._values):
                pass
        except BaseException as caught:
            error = caught  # raised where the values are waited for
        with self._values.lock:
            self._error = error
            self._is_writing = False
            self._values.turn.notify_all()
