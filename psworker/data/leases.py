"""Ranges of one epoch, leased ahead of their use.

One thread, the user's, owns an `EpochLeases`; requests run on the event loop and are
collected here. Waiting never spins: an idle worker waits for a lease and for a clock
that waits for it, whichever comes first.
"""

import logging
import time
from collections import deque
from dataclasses import dataclass, replace
from typing import Final

from pswire.activity import Activity
from pswire.awaited import next_due
from pswire.leased_data import DataRange, DataReport, EpochReport, EpochShape
from pswire.limits import HELD_COUNT_MAX, WAITING_INTERVAL_MS
from psworker.data.source import DataSource
from psworker.event_loop import LoopFuture, first_of
from psworker.transport.values import Lease, LeaseRequest

_log = logging.getLogger(__name__)

BATCH_COUNT_AHEAD: Final = 4
"""Batches leased ahead: enough that a coordinator's restart starves nobody at once,
few enough that the last batches of an epoch are shared out evenly."""

ROUND_BATCH_COUNT_AHEAD_MAX: Final = 64
"""Most that a worker with local steps leases ahead, which is half of a round: each
answer repeats what no push has carried yet, so that a few at a time cost much."""


@dataclass(frozen=True, slots=True)
class _Request:
    """A lease request under way.

    Attributes:
        own: What it reports, and nothing else does.
        reported: All ranges that it reports.
        answer: Of the coordinator.
    """

    own: DataReport
    reported: frozenset[DataRange]
    answer: LoopFuture[Lease]


class EpochLeases:
    """The ranges of an epoch that this worker may use.

    Attributes:
        was_over: Whether it was over when this worker first asked.
    """

    def __init__(
        self,
        source: DataSource,
        *,
        loader: str,
        epoch: int,
        shape: EpochShape,
        order_digest: int,
        batch_count_ahead: int = BATCH_COUNT_AHEAD,
    ) -> None:
        self._source = source
        self._loader = loader
        self._epoch = epoch
        self._shape = shape
        self._order_digest = order_digest
        self._batch_count_ahead = batch_count_ahead
        self._ready: deque[DataRange] = deque()
        self._known_starts: set[int] = set()
        self._dealt_stop = 0  # ranges are dealt in order, whoever gets them
        # One request ahead of need, and one that waits at the end of the epoch, each
        # with what it is to report.
        self._ahead: _Request | None = None
        self._waiting: _Request | None = None
        # Handed out here, and not yet reported to the coordinator as consumed.
        self._unreported: set[DataRange] = set()
        self._is_dry = False
        self._is_closed = False
        self._is_first = True
        self.was_over = False
        self._report: EpochReport | None = None

    def take(self) -> DataRange | None:
        """The next range, or `None` while others hold all that is left.

        Waits for a coordinator's answer at most, never for other workers.
        """
        self._fill()
        if not self._ready:
            return None
        data_range = self._ready.popleft()
        self._unreported.add(data_range)
        if (
            self._ahead is None
            and not self._is_closed
            and len(self._ready) <= self._ahead_count // 2
            and self._may_bring_more()
        ):
            self._ahead = self._ask(wait=False)
        return data_range

    @property
    def are_out(self) -> bool:
        """Whether all that is left, if anything, is what others may give back."""
        # What is consumed must not be reported while a later step on the same data, as
        # a GAN takes it, is under way: the epoch could close, and the others would
        # begin the next one with the clock of that step.
        if not self._ready and not self._is_closed and not self._is_settled():
            return True
        # Idle only once that has brought nothing: of two requests at once the order of
        # the answers would be a matter of chance.
        self._fill()
        return not self._ready

    def wait(self) -> bool:
        """Waits until `take` has a range, or, with `False`, the epoch is closed.

        While it waits, the worker pushes weight 0 for clocks that wait for it.
        """
        rejoin_count = self._source.rejoin_count
        if not self.are_out:
            return True
        if len(self._unreported) >= HELD_COUNT_MAX:
            _log.warning(
                "this worker has %d batches of epoch %d of %r that it has not pushed, "
                "and may not have more: its round ends here. Give it larger batches, "
                "or rounds of fewer local steps",
                len(self._unreported),
                self._epoch,
                self._loader,
            )
        self._source.end_round()
        if rejoin_count != self._source.rejoin_count:
            return False
        before = self._source.work.enter(Activity.IDLE)  # others have the data
        try:
            while not self._ready and not self._is_closed:
                if self._waiting is None:
                    self._waiting = self._ask(wait=True)
                elif self._source.pending.unreported.has_news:
                    # An older one waits on: what was done since must not wait with it.
                    self._note(self._answer(self._ask(wait=False)))
                self._idle_until_answered(self._waiting)
        finally:
            self._source.work.enter(before)
        return bool(self._ready)

    def _is_settled(self) -> bool:
        """Completes a step under way, before what is drawn and not pushed is reported.

        Returns:
            Whether the ranges are still this worker's: not when it had to join again.
        """
        rejoin_count = self._source.rejoin_count
        # A thread that draws ahead must not write values where another one computes.
        if not self._source.pending.is_used_elsewhere(self._loader):
            self._source.settle()
        return rejoin_count == self._source.rejoin_count

    def _fill(self) -> None:
        self._collect()
        if not self._ready and not self._is_closed and self._may_bring_more():
            self._ahead = self._ask(wait=False)
            self._collect()

    def take_report(self) -> EpochReport | None:
        """Once the epoch is over, what became of it; returned once."""
        report, self._report = self._report, None
        return report

    def close(self) -> None:
        """Ends requests that are under way. What they were to report is kept."""
        for request in (self._ahead, self._waiting):
            if request is not None:
                self._give_up(request)
        self._ahead = self._waiting = None

    def _may_bring_more(self) -> bool:
        """After an empty answer, only news of ours can change the next one."""
        return not self._is_dry or self._source.pending.unreported.has_news

    def _ask(self, *, wait: bool) -> _Request:
        pending = self._source.pending
        own = pending.unreported.take()
        settled = {*own.consumed, *own.dropped, *own.skipped}
        # Who waits at the end of an epoch with batches drawn and not pushed (skipped,
        # or the rest of an accumulation) would wait for itself: the epoch can't close
        # before they are reported. They still go with the next push, if there is one,
        # and count as seen then.
        drawn = sorted(self._unreported - settled) if wait else []
        report = replace(own, skipped=(*own.skipped, *drawn))
        request = LeaseRequest(
            loader=self._loader,
            epoch=self._epoch,
            order_digest=self._order_digest,
            report=report,
            batch_count_max=self._batch_count_max(),
            wait=wait,
        )
        try:
            answer = self._source.lease_data(request)
        except BaseException:
            pending.unreported.put_back(own)
            raise
        return _Request(own, frozenset(settled.union(drawn)), answer)

    @property
    def _ahead_count(self) -> int:
        """Ranges to lease ahead of their use."""
        of_round = self._source.work.round_step_count // 2
        of_round = min(of_round, ROUND_BATCH_COUNT_AHEAD_MAX)
        return max(self._batch_count_ahead, of_round)

    def _batch_count_max(self) -> int:
        """Most batches to ask for now.

        Where ranges go to whoever asks, the last ones of an epoch must not pile up at
        one worker while the others run dry: it takes at most half of its part of what
        is left, as in guided self-scheduling.
        """
        wanted = max(1, self._ahead_count - len(self._ready))
        sharer_count = self._source.sharer_count
        if not sharer_count:
            return wanted
        left = self._shape.batch_count - self._dealt_stop // self._shape.batch_size
        return min(wanted, max(1, left // (2 * sharer_count)))

    def _answer(self, request: _Request) -> Lease:
        try:
            lease = self._source.work.idle(request.answer.result)
        except BaseException:
            self._give_up(request)
            raise
        self._unreported.difference_update(request.reported)
        return lease

    def _give_up(self, request: _Request) -> None:
        request.answer.cancel()
        self._source.pending.unreported.put_back(request.own)

    def _collect(self) -> None:
        """Notes the answers that are there, and waits for one if need be."""
        waiting, ahead = self._waiting, self._ahead
        if waiting is not None and waiting.answer.done():
            self._waiting = None
            self._note(self._answer(waiting))
        if ahead is not None and (ahead.answer.done() or not self._ready):
            self._ahead = None
            self._note(self._answer(ahead))

    def _note(self, lease: Lease) -> None:
        fresh = [one for one in lease.ranges if one.start not in self._known_starts]
        self._known_starts.update(one.start for one in fresh)
        self._ready.extend(fresh)
        self._dealt_stop = max([self._dealt_stop, *(one.stop for one in fresh)])
        self._is_dry = not fresh
        if self._is_first:
            self._is_first = False
            self.was_over = lease.closed and not lease.ranges
        self._is_closed = self._is_closed or lease.closed
        self._report = lease.report or self._report

    def _idle_until_answered(self, waiting: _Request) -> None:
        """Waits for the answer, or for news before it."""
        contribution: LoopFuture[None] | None = None
        idle_since = time.monotonic()
        said_after_s = 0.0
        try:
            while not waiting.answer.done():
                if contribution is None:
                    contribution = self._source.await_contribution()
                due_s = idle_since + next_due(said_after_s, WAITING_INTERVAL_MS / 1000)
                left_s = max(0.0, due_s - time.monotonic())
                done = first_of((waiting.answer, contribution), left_s)
                if waiting.answer in done:
                    break
                if contribution in done:
                    contribution.result()
                    contribution = None
                    if self._has_news():
                        return
                    self._source.push_nothing()
                else:
                    said_after_s = time.monotonic() - idle_since
                    self._report_idle(said_after_s)
        finally:
            if contribution is not None:
                contribution.cancel()
        self._collect()

    def _has_news(self) -> bool:
        """Asks once more before pushing nothing for a clock that others have begun.

        They may have begun it with data of the next epoch, whose opening overtook the
        answer that this one is closed. Without asking, a race would decide which clock
        this worker's next batch goes with, and no run would repeat.
        """
        self._note(self._answer(self._ask(wait=False)))
        return bool(self._ready) or self._is_closed

    def _report_idle(self, idle_s: float) -> None:
        _log.warning(
            "waiting for data for %.0f s: all that is left of epoch %d of %r is leased "
            "to %s",
            idle_s,
            self._epoch,
            self._loader,
            self._source.holders() or "other workers",
        )
