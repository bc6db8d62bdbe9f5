"""Data that was drawn from a prepared loader and not yet pushed or reported.

A loader draws, the next push takes what went through a backward pass, and its result
makes the ranges consumed or dropped ones, which the next lease request or the leave
reports. What was drawn and is behind no push is skipped. Thread-safe: any thread may
draw, autograd's note backward passes, and reports may fail on the event loop's.
"""

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Final

import torch

from pswire.leased_data import DataRange, DataReport
from psworker.data.drawn_batches import (
    Batch,
    BatchMemory,
    CallInputs,
    DrawnBatches,
)
from psworker.transport.values import DrawnData

logger: Final = logging.getLogger("psworker")


class UnreportedData:
    """What became of ranges, until a report carries it to the coordinator."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # see `PendingData`
        self._consumed: list[DataRange] = []
        self._dropped: list[DataRange] = []
        self._skipped: list[DataRange] = []
        self._incarnation = 0

    def note(self, ranges: Iterable[DataRange], *, is_dropped: bool) -> None:
        """A push that carried these ranges was applied, or dropped."""
        with self._lock:
            (self._dropped if is_dropped else self._consumed).extend(ranges)

    def skip(self, ranges: Iterable[DataRange]) -> None:
        """These ranges are behind no gradient."""
        with self._lock:
            self._skipped.extend(ranges)

    @property
    def has_news(self) -> bool:
        """Whether there is something to report."""
        with self._lock:
            return bool(self._consumed or self._dropped or self._skipped)

    @property
    def by_pushes(self) -> DataReport:
        """What pushes have done with ranges; it stays to be reported."""
        with self._lock:
            return DataReport(
                tuple(self._consumed), tuple(self._dropped), self._incarnation
            )

    def take(self) -> DataReport:
        """What no report has carried yet."""
        with self._lock:
            # What is noted meanwhile is in the old lists, or in the new ones.
            consumed, self._consumed = self._consumed, []
            dropped, self._dropped = self._dropped, []
            skipped, self._skipped = self._skipped, []
            return DataReport(
                tuple(consumed), tuple(dropped), self._incarnation, tuple(skipped)
            )

    def put_back(self, report: DataReport) -> None:
        """A report failed: the next one carries what it should have."""
        with self._lock:
            if report.incarnation == self._incarnation:
                self._consumed[:0] = report.consumed
                self._dropped[:0] = report.dropped
                self._skipped[:0] = report.skipped

    def start_over(self) -> None:
        """The worker has rejoined: the ranges of its start before are not its own."""
        with self._lock:
            self._incarnation += 1
            self._consumed = []
            self._dropped = []
            self._skipped = []


class PendingData:
    """Ranges on their way from a loader through a push to the coordinator.

    Attributes:
        unreported: What became of those that are no longer on their way.
    """

    def __init__(self) -> None:
        # Of the same thread a signal handler may ask too, and complete a step: what is
        # under way here must bear what that notes.
        self._lock = threading.RLock()
        self.unreported = UnreportedData()
        self._batches = DrawnBatches()
        self._gradient_is_new: Callable[[], bool] | None = None
        self._parameters: Sequence[torch.Tensor] = ()
        self._has_warned_of_doubt = False
        self._stepping_thread: int | None = None

    def watch(
        self,
        gradient_is_new: Callable[[], bool],
        *,
        parameters: Sequence[torch.Tensor],
        optimizer_count: int,
    ) -> None:
        """Tells batches apart that are drawn between two steps, from now on.

        Args:
            gradient_is_new: Whether a gradient was begun since the last call, for
                scripts whose calls of a model are not seen.
            parameters: Those that are trained: without a gradient of any, what was
                begun was thrown away.
            optimizer_count: With one, a step ends what is done with a batch.
        """
        with self._lock:
            self._gradient_is_new = gradient_is_new
            self._parameters = parameters
            self._stepping_thread = threading.get_ident()
            self._batches = DrawnBatches(optimizer_count)

    def draw(
        self,
        sample_count: int,
        data_range: DataRange | None = None,
        loader: str = "",
        memory: BatchMemory | None = None,
    ) -> None:
        """Notes a batch as it is handed out; its loader is named if it has no range."""
        if data_range is not None:
            loader = data_range.loader
        with self._lock:
            self._look()
            batch = Batch(loader, sample_count, data_range, memory)
            self._skip(self._batches.draw(batch))

    def end(self, loader: str) -> None:
        """A loader has no more for the script."""
        with self._lock:
            self._batches.end(loader)

    def note_call(self, inputs: CallInputs) -> tuple[Batch, ...]:
        """A model was called where gradients are recorded: the batches it was of."""
        with self._lock:
            if self._batches.has_trained and all(
                each.grad is None for each in self._parameters
            ):
                self._batches.throw_away()
            return self._batches.call(inputs)

    def note_backward(self, batches: Iterable[Batch]) -> None:
        """A backward pass has reached a call that was of these."""
        with self._lock:
            self._batches.reach(batches)

    def throw_away(self) -> None:
        """Forgets what is behind the gradient that was begun and thrown away."""
        with self._lock:
            self._batches.throw_away()

    @property
    def has_trained(self) -> bool:
        """Whether a batch is known to be behind the gradient that is there."""
        with self._lock:
            return self._batches.has_trained

    @property
    def trained(self) -> tuple[Batch, ...]:
        """Batches behind the gradient that is there, as far as is known."""
        with self._lock:
            return tuple(each for each in self._batches.waiting if each.is_trained)

    def has_ahead(self, loader: str) -> bool:
        """Whether a script that asks for more goes on with what it has drawn before."""
        with self._lock:
            return self._is_used_elsewhere(loader) or self._batches.has_ahead(loader)

    def is_used_elsewhere(self, loader: str) -> bool:
        """Whether another thread than this one goes on with what was drawn before."""
        with self._lock:
            return self._is_used_elsewhere(loader)

    def _is_used_elsewhere(self, loader: str) -> bool:
        is_here = self._stepping_thread in (None, threading.get_ident())
        return not is_here and self._batches.has_open(loader)

    def skip(self, loader: str) -> None:
        """What was drawn from a loader since the last push is behind no gradient.

        The next push neither names nor weighs it.
        """
        with self._lock:
            self._look()
            self._skip(self._batches.give_up(loader))

    @property
    def is_of_lost(self) -> bool:
        """Whether the gradient that is there is of batches that others have now."""
        with self._lock:
            return any(
                each.is_trained and each.is_lost for each in self._batches.waiting
            )

    def goes_on(self, optimizer: str) -> bool:
        """Whether a step of an optimizer goes on with the batch of the one before."""
        with self._lock:
            return self._batches.goes_on(optimizer)

    def take(self, optimizer: str = "") -> DrawnData:
        """What the next push of an optimizer carries.

        The caller says later what became of it.
        """
        with self._lock:
            batches = self._batches
            self._stepping_thread = threading.get_ident()
            if not (batches.sees_calls or batches.has_trained):
                batches.reach_unseen(is_all=self._gradient_is_new is None)
            else:
                self._look()
            pushed = batches.push(optimizer)
            self._warn_of_doubt()
            self._skip(pushed.passed_over)
            trained = pushed.trained
            # A count of 0 was counted, too: an empty batch weighs nothing.
            return DrawnData(
                sum(each.sample_count for each in trained) if trained else None,
                tuple(e.data_range for e in trained if e.data_range is not None),
                pushed.is_of_lost,
                pushed.continues_round,
            )

    def _look(self) -> None:
        """Without calls that are seen, a new gradient is of what was drawn before."""
        if self._gradient_is_new is None or self._batches.sees_calls:
            return
        if self._gradient_is_new():
            self._batches.reach_unseen()

    def _skip(self, batches: Iterable[Batch]) -> None:
        ranges = (each.data_range for each in batches)
        self.unreported.skip(each for each in ranges if each is not None)

    def _warn_of_doubt(self) -> None:
        counts, self._batches.in_doubt = self._batches.in_doubt, ()
        if not counts or self._has_warned_of_doubt:
            return
        self._has_warned_of_doubt = True
        logger.warning(
            "batches of %s samples were drawn before one step, and it can't be seen "
            "which of them it is of: its weight may be that of another batch; call the "
            "prepared model itself with tensors of the batch, or name the number of "
            "samples in optimizer.step(weight=n)",
            " and ".join(map(str, counts)),
        )

    def take_last_report(self, loader: str | None = None) -> DataReport:
        """What no report has carried, at the end of an epoch of a loader, or of all.

        What was drawn and not pushed counts as skipped, unless it is pushed yet.
        """
        report = self.unreported.take()
        with self._lock:
            drawn = [
                each.data_range
                for each in self._batches.waiting
                if each.data_range is not None and loader in (None, each.loader)
            ]
            return replace(report, skipped=(*report.skipped, *drawn))

    def start_over(self) -> None:
        """The worker has rejoined: what its start before held is not its own any more.

        What the script has in hand of it may reach a step yet, which is of lost data.
        What of it counts the coordinator learns from the shards.
        """
        with self._lock:
            self.unreported.start_over()
            self._batches.lose()

    @property
    def has_drawn(self) -> bool:
        """Whether anything was drawn that may be behind a gradient that is there."""
        with self._lock:
            if self._batches.sees_calls:
                return self._batches.has_trained
            return bool(self._batches.waiting)
