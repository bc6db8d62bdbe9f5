"""What a worker's log says of its pushes: each thing once, or now and then."""

import logging
from collections.abc import Iterable
from typing import Final

from psworker.optim.push_result import PushResult
from psworker.transport.values import HyperparameterDifference, PushReply

logger: Final = logging.getLogger("psworker")

DROP_COUNT_PER_LINE: Final = 100
"""With backup workers a slow worker's gradients are dropped all the time."""

LATE_COUNT_MIN: Final = 10
"""Clocks in a row that one step is late for before a line is worth it."""


class Notices:
    """Knows what of the pushes of a worker has been logged already."""

    def __init__(self) -> None:
        self._drop_count = 0
        self._bad_count = 0
        self._has_said_factor = False
        self._has_said_late = False
        self._differences: set[tuple[str, str]] = set()

    def note_result(self, result: PushResult, *, is_discarded: bool) -> None:
        """A push is settled.

        Args:
            result: What became of it.
            is_discarded: Whether its gradient was thrown away here, which was logged.
        """
        if result.dropped and result.gradient_factor == 0:
            self._note_bad(result.clock)
        elif result.dropped and not is_discarded:
            self._note_drop(result.clock)
        elif result.skipped:
            logger.warning(
                "clock %d was skipped: the gradient of %s was not finite, or larger "
                "than the job's --gradient-norm-max",
                result.clock,
                ", ".join(result.nonfinite_worker_ids) or "some worker",
            )
        elif result.gradient_factor != 1:
            self._note_factor(result)

    def note_late(self, clock: int, count: int, timeout_s: float) -> None:
        """A step was late for a clock of mode quorum, and is made for the next one.

        Args:
            clock: The clock.
            count: Clocks in a row that it was late for.
            timeout_s: Until when it is tried.
        """
        if count < LATE_COUNT_MIN or self._has_said_late:
            return
        self._has_said_late = True
        logger.warning(
            "a step of this worker was late for %d clocks in a row, up to clock %d, "
            "and is sent again for each next one, for %g s at most: the job closes "
            "clocks without it faster than its push comes; raise the quorum or the "
            "grace window (psctl mode quorum), send fewer bytes (compression), or "
            "push less often (a strategy of local steps)",
            *(count, clock, timeout_s),
        )

    def note_differences(self, replies: Iterable[PushReply]) -> None:
        """Reads from replies which workers step with other hyperparameters.

        Each optimizer and worker is logged once, whichever shard says so.
        """
        for reply in replies:
            difference = reply.difference
            if difference is None:
                continue
            pair = (difference.optimizer, difference.worker_id)
            if pair not in self._differences:
                self._differences.add(pair)
                logger.warning("%s", _text(difference))

    def _note_bad(self, clock: int) -> None:
        self._bad_count += 1
        if self._bad_count == 1:
            logger.warning(
                "this worker's gradient was rejected at clock %d: it is not finite, or "
                "its norm is above the job's --gradient-norm-max; ps.last_push says so "
                "of each step, and `psctl status` counts them",
                clock,
            )
        elif self._bad_count % DROP_COUNT_PER_LINE == 0:
            logger.warning("%d gradients were rejected so far", self._bad_count)

    def _note_factor(self, result: PushResult) -> None:
        if self._has_said_factor:
            return
        self._has_said_factor = True
        what = (
            "the job's --aggregation has not taken this worker's gradient"
            if result.gradient_factor == 0
            else "this worker's gradient was scaled to the job's --gradient-norm-max"
        )
        logger.info(
            "%s, first at clock %d; `psctl status` counts them", what, result.clock
        )

    def _note_drop(self, clock: int) -> None:
        self._drop_count += 1
        if self._drop_count == 1:
            logger.warning(
                "what this worker pushed was thrown away, since clock %d was complete "
                "without it: it was not among the first of a job with backup workers, "
                "or another worker has published values in that clock; its samples "
                "count as dropped",
                clock,
            )
        elif self._drop_count % DROP_COUNT_PER_LINE == 0:
            logger.warning("%d pushes were thrown away so far", self._drop_count)


def _text(difference: HyperparameterDifference) -> str:
    changed = [
        (name, own, used)
        for name, own, used in zip(
            difference.names, difference.own, difference.used, strict=True
        )
        if own != used
    ]
    own = ", ".join(f"{name}={own:g}" for name, own, _ in changed)
    used = ", ".join(f"{name}={used:g}" for name, _, used in changed)
    return (
        f"workers step {difference.optimizer} with different hyperparameters, first "
        f"seen at clock {difference.clock}: those of {difference.worker_id} count, "
        f"which is longest in the job, {used} in group {difference.group}, and this "
        f"worker's do not, {own}; let scripts and schedules of all workers agree"
    )
