"""What became of a push, for those who count its data and read the log."""

import logging
from typing import Final

from pswire.leased_data import DataRange
from psworker.data.pending import PendingData
from psworker.optim.push_result import PushResult
from psworker.steps.drop_log import DropLog

logger: Final = logging.getLogger("psworker")


class PushAccount:
    """Takes the result of each push of a worker."""

    def __init__(self, pending: PendingData) -> None:
        self._pending = pending
        self._drops = DropLog()

    def note(
        self, result: PushResult, ranges: tuple[DataRange, ...], *, is_discarded: bool
    ) -> None:
        """A push is settled.

        Args:
            result: What became of it.
            ranges: Data behind it.
            is_discarded: Whether its gradient was thrown away here, which was told.
        """
        if result.dropped:
            self._pending.drop(ranges)
            if not is_discarded:
                self._drops.note(result.clock)
            return
        self._pending.acknowledge(ranges)
        if result.skipped:
            logger.warning(
                "clock %d was skipped: the gradient of %s was not finite",
                result.clock,
                ", ".join(result.nonfinite_worker_ids) or "some worker",
            )
