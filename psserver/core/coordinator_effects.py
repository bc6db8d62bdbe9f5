"""What the coordinator's core asks its owner to do, in order."""

from dataclasses import dataclass

from psserver.core.epoch_ledger import EpochLedger
from psserver.core.ledger import Enrolments
from psserver.core.record import FenceKind, Record, WorkerKey


@dataclass(frozen=True, slots=True, kw_only=True)
class Persist:
    """Make a record durable, at once with what it changes, before anything after this.

    Attributes:
        record: The record.
        epochs: Data of epochs that it changes: what those held whom it ends.
        enrolments: Who leases data from now on.
    """

    record: Record
    epochs: tuple[EpochLedger, ...] = ()
    enrolments: Enrolments = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepare:
    """Open a fence on every shard; shards list the data of those `evicting`."""

    fence_number: int
    kind: FenceKind
    seeder: WorkerKey | None
    evicting: tuple[WorkerKey, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Announce:
    """Tell a record to every shard and worker."""

    record: Record


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort:
    """End a fence on every shard without a record."""

    fence_number: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderSeed:
    """Tell a worker to write the first values."""

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
    """

    fence_number: int
    snapshot_id: int
    clock: int
    sequences: tuple[tuple[WorkerKey, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseImage:
    """Tell every shard to free an image."""

    snapshot_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EndJob:
    """Tell everybody that the job can't go on."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemaFixed:
    """A worker has told what the job trains, or of its optimizers: tell every shard."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerCutOff:
    """Say in the log that a member is cut off from a shard, and is to be taken out.

    Attributes:
        worker: The member.
        reason: From which shard, and who reaches it.
        silent_ms: For how long the shard has not answered it.
    """

    worker: WorkerKey
    reason: str
    silent_ms: int


CoordinatorEffect = (
    Persist
    | Prepare
    | Announce
    | Abort
    | OrderSeed
    | DecideCut
    | ReleaseImage
    | EndJob
    | SchemaFixed
    | WorkerCutOff
)
