"""A joiner's way to its first step, when others had to go on before it was there.

In the user's thread.
"""

import logging
import time
from typing import Final

from pswire.reasons import ErrorReason
from psworker.errors import StepTimeoutError
from psworker.event_loop import EventLoop
from psworker.member.catch_up import pull_values
from psworker.member.core import Pull
from psworker.member.session import Session
from psworker.member.stand_in import JOIN_LIMIT_S, StandIn
from psworker.tensors.value_store import ValueStore

logger: Final = logging.getLogger("psworker")


class Arrival:
    """One start of a worker, and who stands in for it until it is there."""

    def __init__(
        self,
        loop: EventLoop,
        session: Session,
        store: ValueStore,
        *,
        stand_in: StandIn | None,
        timeout_s: float,
    ) -> None:
        """Has the worker arrive.

        Args:
            loop: Where calls run.
            session: The worker.
            store: Takes the values.
            stand_in: Who stands in for it, if anybody does.
            timeout_s: Longest wait for a clock or its values.
        """
        self._loop = loop
        self._session = session
        self._store = store
        self._stand_in = stand_in
        self._timeout_s = timeout_s
        self._is_behind = False

    @property
    def is_over(self) -> bool:
        """Whether the worker is there, with the values of its clock."""
        return self._stand_in is None and not self._is_behind

    def relieve(self) -> int:
        """The worker is there: the last push made in its place, 0 for none.

        Raises:
            StepTimeoutError: That push is not complete in time.
        """
        if self._stand_in is None:
            return 0
        try:
            sequence = self._loop.run(self._stand_in.relieve(), self._timeout_s)
        except TimeoutError:
            raise StepTimeoutError(
                "the clock that others began while this worker was not there is not "
                f"complete within {self._timeout_s:g} s; step() again goes on",
                reason=ErrorReason.WAIT_TIMEOUT,
            ) from None
        self._stand_in = None
        if sequence:
            self._is_behind = True
            logger.warning(
                "this worker took longer than %.0f s from joining to its first step, "
                "and %d clocks went on without it: what it has computed meanwhile is "
                "thrown away",
                JOIN_LIMIT_S,
                sequence,
            )
        return sequence

    def pull_missed(self, pull: Pull) -> None:
        """Pulls the values of clocks that went on without the worker, if any did.

        Args:
            pull: Of its clock.

        Raises:
            StepTimeoutError: They did not come in time.
        """
        if self._is_behind:
            deadline = time.monotonic() + self._timeout_s
            pull_values(self._loop, self._session, self._store, pull, deadline)
            self._is_behind = False

    def dismiss(self) -> None:
        """Ends who stands in for the worker, whatever it has under way."""
        if self._stand_in is not None:
            self._loop.run(self._stand_in.abandon())
            self._stand_in = None
