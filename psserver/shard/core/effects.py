"""What a shard's core asks its owner to do.

The owner takes effects in order and carries them out. Only `ApplyChunk`, `MeasureClock`
and `CopyImage` take long; the owner reports to the core when they are done.
"""

from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from psserver.edge.fence_report import FenceReport
from psserver.shard.core.core_image import CoreImage
from psserver.shard.core.push import PushId, Reply
from psserver.shard.core.quorum import Merge
from psserver.shard.core.shard_fence import Cut
from pswire.membership import ClockChoice, Outcome, WorkerKey
from pswire.reasons import Refusal


@dataclass(frozen=True, slots=True)
class BufferAverage:
    """A running average: there is no clock whose pushes a mean could be taken over.

    Attributes:
        entry_indexes: Buffers that move towards the pushed value by one member's share.
            The others are replaced.
        member_count: Members of the job, at least 1.
    """

    entry_indexes: AbstractSet[int]
    member_count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedContribution:
    """One worker's part of a chunk; `payload` is whatever the owner staged.

    Attributes:
        factor: What its gradient is multiplied by.
        value_entries: Tensors of which it has values and no gradient.
        is_source: Whether its values count where others have sent different ones.
    """

    worker_id: str
    weight: float
    presence: tuple[bool, ...]
    payload: object
    loss_scale: float = 1.0
    factor: float = 1.0
    value_entries: frozenset[int] = frozenset()
    is_source: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplyChunk:
    """Apply the mean of these contributions, then call `chunk_applied`.

    Attributes:
        clock: Clock it belongs to.
        chunk_index: The chunk.
        optimizer: Optimizer to run.
        contributions: In the order of worker ids.
        total_weight: Weight of all contributors, also those absent here.
        hyperparameters: For each group, those of the longest contributor.
        pusher: In SSP and ASP, whose push it is; None for a clock of BSP.
        staleness: In SSP and ASP, updates since the values it came from.
        average: In SSP and ASP, how its buffers enter those of the shard.
        gradient_scale: What the mean is multiplied by.
        spec_digest: Declaration of the optimizer that they are of.
    """

    clock: int
    chunk_index: int
    optimizer: str
    contributions: tuple[StagedContribution, ...]
    total_weight: float
    hyperparameters: tuple[tuple[float, ...], ...]
    spec_digest: str = ""
    pusher: WorkerKey | None = None
    staleness: int = 0
    average: BufferAverage | None = None
    gradient_scale: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureClock:
    """Measure a clock's gradients, then call `clock_measured`.

    By the sum of the squares of what they become, or by the products of each.

    Attributes:
        choice: The clock and whose pushes it consists of.
        chunks: Chunks that somebody has sent, each with its contributions in the
            order of worker ids.
        total_weight: Weight of all contributors, also those absent here.
        optimizer: Optimizer that will be run.
        spec_digest: Declaration of it that will be, as in `ApplyChunk`.
        measures_each: Whether products are wanted, of each gradient with itself.
        measures_pairs: Whether also of each with those after it.
    """

    choice: ClockChoice
    chunks: tuple[tuple[int, tuple[StagedContribution, ...]], ...]
    total_weight: float
    optimizer: str
    spec_digest: str = ""
    measures_each: bool = False
    measures_pairs: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadState:
    """Replace an optimizer's state by what was staged for a push, before its update."""

    push: PushId
    optimizer: str
    spec_digest: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PushDone:
    """A push is done here, for the history; its answer may have to wait."""

    push: PushId
    outcome: Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """A push is done: answer it.

    Attributes:
        push: The push.
        reply: The answer.
        needs_all: Whether chunks that this push did not change go with it, since
            others may have changed them.
    """

    push: PushId
    reply: Reply
    needs_all: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusePush:
    """A push is beyond its worker's last one, or the worker has ended: end its call."""

    push: PushId
    refusal: Refusal


@dataclass(frozen=True, slots=True, kw_only=True)
class ContributionAwaited:
    """A clock waits for nobody but workers that said they have no data.

    Attributes:
        worker: One of them.
        clock: The clock.
        optimizer: Optimizer that the contributors named.
    """

    worker: WorkerKey
    clock: int
    optimizer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """With two-phase steps: everything of a clock is here.

    Attributes:
        push: The push whose call hears it.
        choice: The clock with its contributors; without any when only this push is
            meant, as with backup workers.
    """

    push: PushId
    choice: ClockChoice


@dataclass(frozen=True, slots=True, kw_only=True)
class WakeAt:
    """Call `wake` at this time, in which nothing else may happen."""

    at_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockClosed:
    """Shard 0 has closed a clock of mode quorum: whose pushes it has is certain."""

    merge: Merge


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitSeed:
    """The staged values are the values now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiscardSeed:
    """Forget the staged values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyImage:
    """Copy the state as it is now. What is ordered after this is not in the copy.

    Attributes:
        cut: What the image is of.
        clock: Highest clock that is in; in SSP and ASP the smallest one, for people.
        core: For a checkpoint, the protocol.
    """

    cut: Cut
    clock: int
    core: CoreImage | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HyperparametersDiffer:
    """Workers of one clock carry different hyperparameters; the first one counts."""

    clock: int
    optimizer: str
    used: WorkerKey
    other: WorkerKey
    group: int
    values: tuple[tuple[float, ...], tuple[float, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeclarationsDiffer:
    """Workers of one clock step different declarations; the first one's counts."""

    clock: int
    optimizer: str
    used: WorkerKey
    other: WorkerKey


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkTorn:
    """A worker's bytes contradicted its finite verdict; it was left out."""

    clock: int
    chunk_index: int
    worker_ids: tuple[str, ...]


ShardEffect = (
    ApplyChunk
    | MeasureClock
    | LoadState
    | PushDone
    | Finish
    | RefusePush
    | Staged
    | WakeAt
    | ClockClosed
    | ContributionAwaited
    | FenceReport
    | CommitSeed
    | DiscardSeed
    | CopyImage
    | HyperparametersDiffer
    | DeclarationsDiffer
    | ChunkTorn
)
