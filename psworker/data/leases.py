"""Ranges of one epoch, leased ahead of their use.

One thread, the user's, owns an `EpochLeases`; requests run on the event loop and are
collected here. Waiting never spins: an idle worker waits for a lease and for a clock
that waits for it, whichever comes first.
"""

import logging
import time
from collections import deque
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any, Final

from pswire.limits import WAITING_INTERVAL_MS
from psworker.data.source import DataSource, Lease, LeaseRequest
from psworker.pending import DataRange

_log = logging.getLogger(__name__)

BATCH_COUNT_AHEAD: Final = 4
"""Batches leased ahead: enough that a coordinator's restart starves nobody at once,
few enough that the last batches of an epoch are shared out evenly."""


class EpochLeases:
    """The ranges of an epoch that this worker may use."""

    def __init__(
        self,
        source: DataSource,
        *,
        loader: str,
        epoch: int,
        order_digest: int,
        batch_count_ahead: int = BATCH_COUNT_AHEAD,
    ) -> None:
        self._source = source
        self._loader = loader
        self._epoch = epoch
        self._order_digest = order_digest
        self._batch_count_ahead = batch_count_ahead
        self._ready: deque[DataRange] = deque()
        self._told_starts: set[int] = set()
        self._request: Future[Lease] | None = None
        self._request_consumed: tuple[DataRange, ...] = ()
        self._is_dry = False
        self._is_closed = False

    def take(self) -> DataRange | None:
        """The next range, or `None` while others hold all that is left.

        Waits for a coordinator's answer at most, never for other workers.
        """
        self._settle(block=not self._ready)
        if not self._ready and not self._is_closed and self._may_bring_more():
            self._ask(wait=False)
            self._settle(block=True)
        if not self._ready:
            return None
        data_range = self._ready.popleft()
        self._top_up()
        return data_range

    def wait(self) -> bool:
        """Waits until `take` has a range, or, with `False`, the epoch is closed.

        While it waits, the worker pushes weight 0 for clocks that wait for it.
        """
        self._settle(block=not self._ready)
        while not self._ready and not self._is_closed:
            self._ask(wait=True)
            self._idle_until_answered()
            self._settle(block=True)
        return bool(self._ready)

    def close(self) -> None:
        """Ends a request that is under way. What it was to report is kept."""
        if self._request is None:
            return
        self._request.cancel()
        self._source.pending.return_consumed(self._request_consumed)
        self._request = None

    def _may_bring_more(self) -> bool:
        """After an empty answer, only news of ours can change the next one."""
        return not self._is_dry or self._source.pending.has_consumed

    def _top_up(self) -> None:
        if (
            self._request is None
            and not self._is_closed
            and len(self._ready) <= self._batch_count_ahead // 2
            and self._may_bring_more()
        ):
            self._ask(wait=False)

    def _ask(self, *, wait: bool) -> None:
        pending = self._source.pending
        self._request_consumed = pending.take_consumed()
        # Who waits at the end of an epoch with batches drawn and not pushed (skipped,
        # or the rest of an accumulation) would wait for itself: the epoch can't close
        # before they are reported. They still go with the next push, if there is one.
        kept = pending.unpushed(self._loader, self._epoch) if wait else ()
        self._request = self._source.lease_data(
            LeaseRequest(
                loader=self._loader,
                epoch=self._epoch,
                order_digest=self._order_digest,
                consumed=self._request_consumed + kept,
                batch_count_max=self._batch_count_ahead - len(self._ready),
                wait=wait,
            )
        )

    def _settle(self, *, block: bool) -> None:
        """Takes in the answer of a request, if there is one."""
        request = self._request
        if request is None or not (block or request.done()):
            return
        try:
            lease = request.result()
        except BaseException:
            self.close()
            raise
        self._request = None
        fresh = [one for one in lease.ranges if one.start not in self._told_starts]
        self._told_starts.update(one.start for one in fresh)
        self._ready.extend(fresh)
        self._is_dry = not fresh
        self._is_closed = lease.closed

    def _idle_until_answered(self) -> None:
        request = self._request
        assert request is not None
        contribution: Future[None] | None = None
        idle_since = time.monotonic()
        try:
            while not request.done():
                if contribution is None:
                    contribution = self._source.await_contribution()
                either: set[Future[Any]] = {request, contribution}
                done, _ = wait(
                    either,
                    timeout=WAITING_INTERVAL_MS / 1000,
                    return_when=FIRST_COMPLETED,
                )
                if request in done:
                    return
                if contribution in done:
                    contribution.result()
                    contribution = None
                    self._source.push_nothing()
                else:
                    self._report_idle(time.monotonic() - idle_since)
        except BaseException:
            self.close()
            raise
        finally:
            if contribution is not None:
                contribution.cancel()

    def _report_idle(self, idle_s: float) -> None:
        _log.info(
            "waiting for data for %.0f s: all that is left of epoch %d of %r is leased "
            "to other workers",
            idle_s,
            self._epoch,
            self._loader,
        )
