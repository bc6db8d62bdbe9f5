"""What is left of a simulated world that is killed whole, and begins again from it."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from psserver.coordinator.core.data.epoch_ledger import EpochLedger
from psserver.coordinator.core.start_point import StartPoint
from psserver.edge.coordinator_settings import CoordinatorSettings
from pswire.job_terms import JobTerms
from pswire.leased_data import DataRange
from pswire.membership import WorkerKey
from tests.doubles.driven_worker import DrivenWorker
from tests.doubles.simulated_shard import Values

INCARNATION_FLOOR = 1_000
"""Of a world whose coordinator's state is lost too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOver:
    """A checkpoint, and messages of processes that are dead.

    Attributes:
        settings: The job.
        point: Where it goes on.
        terms: What it trains.
        values: Of all chunks, as of the cut.
        incarnations: How often workers were started, as far as that is not lost.
        start_count: Starts of the coordinator that are known.
        ghosts: Workers whose pushes may still be under way.
        used: Data that is behind pushes in the checkpoint, or was dropped.
        epoch: All data of the job as of the checkpoint, if it leases any.
    """

    settings: CoordinatorSettings
    point: StartPoint
    terms: JobTerms
    values: Values
    incarnations: Mapping[str, int] = field(default_factory=dict)
    start_count: int = 0
    ghosts: Mapping[WorkerKey, DrivenWorker] = field(default_factory=dict)
    used: frozenset[DataRange] = frozenset()
    epoch: EpochLedger | None = None

    def values_of(self, chunk_index: int) -> Counter[object]:
        """How often each push of before is in a chunk."""
        return Counter({p: n for p, n in self.values[chunk_index].items() if n})
