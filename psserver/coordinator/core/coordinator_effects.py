"""What the coordinator's core asks its owner to do, in order."""

from collections.abc import Mapping
from dataclasses import dataclass

from psserver.coordinator.core.checkpoints import PendingCheckpoint
from psserver.coordinator.core.data.epoch_ledger import EpochLedger
from psserver.coordinator.core.data.ledger import Enrolments
from psserver.coordinator.core.fence import ActiveFence
from psserver.coordinator.core.shard_map import ShardSlot
from psserver.coordinator.core.start_point import StartPoint
from pswire.checkpoint.place import CheckpointPlace
from pswire.job_terms import JobTerms
from pswire.leased_data import RecordedSplit
from pswire.membership import CutPurpose, FenceKind, Record, WorkerKey


@dataclass(frozen=True, slots=True, kw_only=True)
class Persist:
    """Make a change durable, all of it or nothing, then say which to the core.

    The core waits for it: a change is sent to nobody before it is on the disk.
    Without any part it only tries whether the disk takes something.

    Attributes:
        record: The newest record.
        epochs: Data of epochs that change.
        enrolments: Who leases data from now on.
        incarnations: Last incarnation of each worker id.
        processes: Which process is which start of a worker, of those not over.
        shards: The shard map.
        terms: What the job trains, and how.
        split: A split of data that is recorded.
        start_point: Checkpoint that the job goes on from: there is no record any more,
            and no epoch but those that are given.
    """

    record: Record | None = None
    epochs: tuple[EpochLedger, ...] = ()
    enrolments: Enrolments | None = None
    incarnations: Mapping[str, int] | None = None
    processes: Mapping[WorkerKey, str] | None = None
    shards: tuple[ShardSlot, ...] | None = None
    terms: JobTerms | None = None
    split: RecordedSplit | None = None
    start_point: StartPoint | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepare:
    """Open a fence on every shard; shards list the data of those `evicting`.

    For a start they stage the values of the seeder, or those of the checkpoint.
    """

    fence_number: int
    kind: FenceKind
    seeder: WorkerKey | None
    evicting: tuple[WorkerKey, ...] = ()
    start_point: StartPoint | None = None

    @classmethod
    def of(cls, fence: ActiveFence) -> "Prepare":
        return cls(
            fence_number=fence.number,
            kind=fence.kind,
            seeder=fence.seeder,
            evicting=fence.evicting,
            start_point=fence.start_point,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Announce:
    """Send a record to every shard and worker."""

    record: Record


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort:
    """End a fence on every shard without a record.

    Attributes:
        fence_number: Number of the fence.
        reason: Why, for logs.
        batch_floors: When a checkpoint waits for all workers to be between two batches,
            of each a push beyond which shards apply none that begins a batch.
    """

    fence_number: int
    reason: str
    batch_floors: tuple[tuple[WorkerKey, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderSeed:
    """Have a worker write the first values."""

    worker: WorkerKey
    fence_number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DecideCut:
    """Tell every shard where the cut lies.

    Attributes:
        fence_number: Number of the fence.
        snapshot_id: Name of the snapshot.
        clock: In BSP, the clock; otherwise the smallest one, for people.
        sequences: Of each member, its last push that is in.
        purpose: What it is for.
    """

    fence_number: int
    snapshot_id: int
    clock: int
    sequences: tuple[tuple[WorkerKey, int], ...] = ()
    purpose: CutPurpose = CutPurpose.SNAPSHOT


@dataclass(frozen=True, slots=True, kw_only=True)
class NameCheckpoint:
    """Find a name for a checkpoint that all shards have copied."""

    checkpoint: PendingCheckpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class WantState:
    """Ask a worker for what its script has registered, as of a push.

    Attributes:
        worker: The worker.
        snapshot_id: Name of the cut.
        sequence: Its last push that is in.
        epochs: By loader, the first epoch that is not over as of the cut.
    """

    worker: WorkerKey
    snapshot_id: int
    sequence: int
    epochs: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteCheckpoint:
    """Have every shard write what it has copied at a cut.

    Attributes:
        snapshot_id: Name of the cut.
        place: Where.
    """

    snapshot_id: int
    place: CheckpointPlace


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitCheckpoint:
    """Write the manifest of a checkpoint whose parts are all there."""

    checkpoint: PendingCheckpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFailed:
    """Say in the log why a checkpoint has come to nothing."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseImage:
    """Have every shard free an image, and end the writing of it."""

    snapshot_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EndJob:
    """Report to everybody that the job can't go on."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReturnToCheckpoint:
    """End what shards and workers watch: they register again, as new starts."""

    start_point: StartPoint
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaceStartPoint:
    """Find another checkpoint to start from: this one can't be loaded."""

    start_point: StartPoint
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemaFixed:
    """What the job trains is known, or an optimizer has changed: send it to shards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerCutOff:
    """Say in the log that a worker is cut off from a shard, so that it is left out.

    Attributes:
        worker: The worker.
        reason: From which shard, and who reaches it.
        silent_ms: For how long the shard has not answered it.
        is_joining: Whether it is not yet a member, and else to be evicted.
    """

    worker: WorkerKey
    reason: str
    silent_ms: int
    is_joining: bool = False


CoordinatorEffect = (
    Persist
    | Prepare
    | Announce
    | Abort
    | OrderSeed
    | DecideCut
    | NameCheckpoint
    | WantState
    | WriteCheckpoint
    | CommitCheckpoint
    | CheckpointFailed
    | ReleaseImage
    | EndJob
    | ReturnToCheckpoint
    | ReplaceStartPoint
    | SchemaFixed
    | WorkerCutOff
)
