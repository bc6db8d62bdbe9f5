"""Says in the log that gradients are dropped, and not once for each."""

import logging
from typing import Final

logger: Final = logging.getLogger("psworker")

DROP_COUNT_PER_LINE: Final = 100
"""With backup workers a slow worker's gradients are dropped all the time."""


class DropLog:
    """One line for the first dropped push, then one for each hundred."""

    def __init__(self) -> None:
        self._count = 0

    def note(self, clock: int) -> None:
        """A push was dropped, and the worker went on after this clock."""
        self._count += 1
        if self._count == 1:
            logger.warning(
                "what this worker pushed was thrown away, since clock %d was complete "
                "without it: it was not among the first of a job with backup workers, "
                "or another worker has published values in that clock; its samples "
                "count as dropped",
                clock,
            )
        elif self._count % DROP_COUNT_PER_LINE == 0:
            logger.warning("%d pushes were thrown away so far", self._count)
