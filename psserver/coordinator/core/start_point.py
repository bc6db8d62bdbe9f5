"""The checkpoint that a job goes on from, as if each of its workers had joined anew."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from psserver.coordinator.core.data.epoch_ledger import EpochLedger
from pswire.checkpoint.place import CheckpointPlace
from pswire.job_terms import JobTerms
from pswire.leased_data import RecordedSplit
from pswire.membership import Mode, ModeTerms


@dataclass(frozen=True, slots=True, kw_only=True)
class StartPoint:
    """Where a job starts whose first values are those of a checkpoint.

    Attributes:
        place: Where the checkpoint is.
        clock: Clock that all members start at.
        version: Steps of all workers ever that are in it.
        mode: Mode that the job was in.
        staleness_bound: Its staleness bound, in clocks.
        quorum: Pushes that closed a clock, in mode quorum.
        grace_window_ms: How much longer it waited for more.
        generation: Newest generation before the start.
        incarnation_floor: Starts of workers and shards are numbered above it. The
            state of the processes before may be lost, with how often each was started.
        participation_count_before: See `DataLedger`.
    """

    place: CheckpointPlace
    clock: int
    version: int
    mode: Mode
    staleness_bound: int
    generation: int
    incarnation_floor: int = 0
    participation_count_before: int = 0
    quorum: int = 0
    grace_window_ms: int = 0

    @property
    def terms(self) -> ModeTerms:
        """The mode that the job was in, with its numbers."""
        return ModeTerms.of(
            self.mode,
            staleness_bound=self.staleness_bound,
            quorum=self.quorum,
            grace_window_ms=self.grace_window_ms,
        )

    def __str__(self) -> str:
        """For logs and texts."""
        name = self.place.name
        return f"checkpoint {name} (clock {self.clock}, version {self.version})"


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedJob:
    """What a checkpoint has of a job beside its values.

    Attributes:
        job_id: The job.
        job_seed: From which the seeds of all epochs follow; 0 for none.
        point: Where it goes on.
        terms: What it trains.
        epochs: Its data, as of the cut.
        splits: Splits of data that were recorded.
        incarnations: Last incarnation of each worker id that was known then.
        has_state: Whether scripts have registered state, which is with it.
    """

    job_id: str
    job_seed: int
    point: StartPoint
    terms: JobTerms
    epochs: tuple[EpochLedger, ...]
    splits: tuple[RecordedSplit, ...] = ()
    incarnations: Mapping[str, int] = field(default_factory=dict)
    has_state: bool = False

    def copied_epochs(self) -> tuple[EpochLedger, ...]:
        """Its data, which does not change with the job's: it may be needed again."""
        return tuple(each.copy() for each in self.epochs)
