"""What a shard answers to a fence. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from pswire.leased_data import DataRange
from pswire.membership import ClockChoice, MixedClock, WorkerKey

RANGE_COUNT_MAX = 7_000
"""Data ranges of all workers in one report: as many as one message takes with the
longest names. Workers report with each lease, and lease a few batches ahead, so that
the coordinator lacks only the newest."""


def newest_ranges(
    ranges: Sequence[tuple[int, DataRange]], worker_count: int
) -> tuple[tuple[int, DataRange], ...]:
    """Those of a worker that a report has room for, if it has those of so many."""
    return tuple(ranges[-max(1, RANGE_COUNT_MAX // worker_count) :])


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerHolding:
    """What the shard holds of one member, for a report.

    Attributes:
        worker: The member.
        complete_sequence: Highest push of which everything is there, done or not.
        trailer_sequence: Highest push of which the trailer is there, done or not.
        touched_sequence: Highest push of which something was applied.
        ranges: For one that may be evicted, data of its newest pushes, oldest first.
        batch_sequence: Last push whose batch is begun: a next one that begins another,
            and of which nothing is applied, does not count.
        is_between_batches: Whether the worker is known to be between two batches after
            it: by its next push, or since it waits for data.
        steps_again: Whether it has ever made a further step on a batch.
    """

    worker: WorkerKey
    complete_sequence: int
    trailer_sequence: int = 0
    touched_sequence: int = 0
    ranges: tuple[tuple[int, DataRange], ...] = ()
    batch_sequence: int = 0
    is_between_batches: bool = False
    steps_again: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FenceReport:
    """A shard's answer to a fence: one report for all kinds.

    Attributes:
        fence_number: Number of the fence.
        holdings: What the shard holds of each member.
        trailer_clock_max: Highest clock of which a trailer is there.
        touched_clock_max: Highest clock of which a chunk was applied.
        applied_clock: Highest clock that is complete.
        skip_clocks: The newest complete clock, if it was skipped.
        mixed_clocks: Clocks in which some step and some publish, and of which
            something was applied here, or on another shard as a record said.
        frontier: Smallest clock over the members.
        committed: With two-phase steps, the newest clock that was committed.
        chosen: With backup workers, on shard 0, the newest choice.
        is_settled: Whether everything of the mode before is applied.
        measured: When the job clips, the open clock with the sum of squares of this
            shard's part, if that is known.
        failure: For a start, why the values of a checkpoint can't be loaded.
    """

    fence_number: int
    holdings: tuple[WorkerHolding, ...]
    trailer_clock_max: int
    touched_clock_max: int
    applied_clock: int
    skip_clocks: tuple[int, ...] = ()
    mixed_clocks: tuple[MixedClock, ...] = ()
    frontier: int = 0
    committed: ClockChoice | None = None
    chosen: ClockChoice | None = None
    is_settled: bool = True
    measured: ClockChoice | None = None
    failure: str = ""

    def holding_of(self, worker: WorkerKey) -> WorkerHolding:
        """What the shard holds of a member; nothing when it does not know it."""
        return next(
            (holding for holding in self.holdings if holding.worker == worker),
            WorkerHolding(worker=worker, complete_sequence=0),
        )
