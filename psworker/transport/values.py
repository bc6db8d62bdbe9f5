"""What crosses the boundary between the transport and the rest: plain values."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from pswire.activity import Activity
from pswire.awaited import Awaited
from pswire.leased_data import DataRange, DataReport, EpochReport, EpochShape
from pswire.membership import Mode, Outcome, Record, WorkerKey
from pswire.schema import ModelSchema


@dataclass(frozen=True, slots=True)
class JoinAnswer:
    """What the coordinator says of a model that agrees with the job's.

    Attributes:
        order: Position in the job of each of the worker's tensors; empty where the
            job has them in the same order.
        notes: What the worker's log should say, a line each.
        epochs: Of each of the worker's loaders, the first epoch that is not over.
        checkpoint: Name of the newest checkpoint, if it has registered state.
        start_checkpoint: Name of the one that the job has gone on from last, if any.
        generation_before: Newest generation before that.
        are_new: Of each of `epochs`, whether nothing of it was trained yet.
    """

    order: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()
    epochs: tuple[int, ...] = ()
    checkpoint: str = ""
    start_checkpoint: str = ""
    generation_before: int = 0
    are_new: tuple[bool, ...] = ()


@dataclass(frozen=True, slots=True)
class DrawnData:
    """Data that a push carries.

    Attributes:
        sample_count: Samples behind the gradient, `None` when no loader counted.
        ranges: Leased ranges the samples came from.
        is_of_lost: Whether some of the gradient is of batches that others have now.
        continues_batch: Whether it is a further step on the batch of the push before.
    """

    sample_count: int | None
    ranges: tuple[DataRange, ...]
    is_of_lost: bool = False
    continues_batch: bool = False


@dataclass(frozen=True, slots=True)
class ShardAddress:
    """Where a shard is reached; the address is empty while it is missing."""

    shard_index: int
    address: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class JobEnd:
    """The end of a job."""

    failed: bool
    reason: str


@dataclass(frozen=True, slots=True)
class SeedOrder:
    """Asks a worker to write the first values to all shards."""

    fence_number: int
    shards: tuple[ShardAddress, ...]


@dataclass(frozen=True, slots=True)
class ShardMap:
    """Where all shards are, for those who wait while another worker seeds."""

    shards: tuple[ShardAddress, ...]


@dataclass(frozen=True, slots=True)
class FirstValues:
    """Whose values and optimizer state the job has started with."""

    worker_id: str
    values_digest: int
    state_digest: int


@dataclass(frozen=True, slots=True)
class WorkerView:
    """The job as the watch begins."""

    record: Record | None
    shards: tuple[ShardAddress, ...]
    first_values: FirstValues | None = None
    makes_checkpoints: bool = False


@dataclass(frozen=True, slots=True)
class StateWanted:
    """A cut's checkpoint takes registered state, as of the worker's push in it.

    Attributes:
        snapshot_id: Name of the cut.
        sequence: The push.
        epochs: By loader, the first epoch that was not over as of the cut.
    """

    snapshot_id: int
    sequence: int
    epochs: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Waiting:
    """Whom a call waits for, and how long it has."""

    clock: int
    waited_ms: int
    reason: str
    awaited: tuple[Awaited, ...]

    def __str__(self) -> str:
        names = ", ".join(map(str, self.awaited[:8]))
        if len(self.awaited) > 8:
            names += f" and {len(self.awaited) - 8} more"
        return ": ".join(part for part in (self.reason, names) if part) or "the server"


WatchEvent = WorkerView | SeedOrder | ShardMap | Record | JobEnd | Waiting | StateWanted


@dataclass(frozen=True, slots=True, kw_only=True)
class PushHeader:
    """Identity and place of a push, but for the shard's incarnation.

    `value_entries` has a bit for each tensor of which it has values and no gradient.
    """

    job_id: str
    optimizer: str
    worker: WorkerKey
    generation: int
    sequence: int
    sequence_unacknowledged_min: int
    clock: int
    value_entries: bytes = b""

    @property
    def seed_text(self) -> str:
        """Of this push alone, for random numbers that it needs.

        Not of the job's id, which differs from run to run: a run that is repeated has
        the same numbers.
        """
        return f"{self.worker.worker_id} {self.sequence}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PushTrailer:
    """What completes a push, but for the shard's bitmap.

    Attributes:
        weight: Samples behind the gradient.
        groups: Current hyperparameters of each group.
        is_finite: The verdict on the whole gradient.
        ranges: Data consumed since the push before.
        loss_scale: Factor that the gradient still carries, for shards to divide by.
        gradient_norm: L2 norm of the whole gradient without that factor, 0 if it is
            not finite.
        optimizer_digest: Declaration of the optimizer that the push was made by, empty
            for the first.
        loads_state: Whether state was staged that replaces the optimizer's.
        is_of_longest: Whether it was made by the longest member.
        scheduler_steps: Steps that each scheduler has taken.
        averaged_buffers: Bits of the buffers that are averaged in SSP and ASP.
        publishes: Whether it has values alone and is no step.
        continues_batch: Whether it is a further step on the batch of the push before.
        slack_ms: How long the worker can go on without the answer, as mode quorum wants
            to know; None for as long as it takes.
        is_last: Whether there is no data for another one, so that mode quorum waits
            for it.
    """

    weight: float
    groups: tuple[tuple[float, ...], ...]
    is_finite: bool
    ranges: tuple[DataRange, ...]
    loss_scale: float = 1.0
    gradient_norm: float = 0.0
    optimizer_digest: str = ""
    loads_state: bool = False
    is_of_longest: bool = False
    scheduler_steps: tuple[int, ...] = ()
    averaged_buffers: bytes = b""
    publishes: bool = False
    continues_batch: bool = False
    slack_ms: int | None = None
    is_last: bool = False


@dataclass(frozen=True, slots=True)
class OptimizerSettings:
    """What the newest update of an optimizer was made with.

    Attributes:
        groups: Hyperparameters of each group; none before the first update.
        scheduler_steps: Steps of the schedulers of whose hyperparameters counted.
        next_scheduler_steps: Those that they have taken at their next push, as far as
            the last ones show: a script steps some of them after each.
    """

    groups: tuple[tuple[float, ...], ...] = ()
    scheduler_steps: tuple[int, ...] = ()
    next_scheduler_steps: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PushReply:
    """One shard's answer to a push or a pull.

    Attributes:
        outcome: What became of the push; `APPLIED` for a pull.
        shard_incarnation: Start of the shard.
        generation: Newest generation it knows.
        version: Steps of all workers ever that are in the values.
        frontier: Smallest clock over the members.
        clock: This worker's clock after it; when dropped, the newest clock.
        mode: Mode under which the values were returned.
        staleness_bound: Bound under which they were returned, in clocks.
        staleness: Updates between the values pushed against and the push.
        nonfinite_worker_ids: For whose gradient the clock was skipped.
        closed_sequence: This worker's pushes up to it are done or closed.
        grad_norm: Norm of the gradient before it was clipped, if the job clips.
        gradient_factor: What the gradient was multiplied by, 0 if it did not count.
        difference: Reported once, where this worker's hyperparameters do not count.
        peer_wait_s: How long the push has waited for those of other workers.
    """

    outcome: Outcome
    shard_incarnation: int
    generation: int
    version: int
    frontier: int
    clock: int
    mode: Mode = Mode.BSP
    staleness_bound: int = 0
    staleness: int = 0
    nonfinite_worker_ids: tuple[str, ...] = ()
    closed_sequence: int = 0
    grad_norm: float | None = None
    gradient_factor: float = 1.0
    difference: "HyperparameterDifference | None" = None
    peer_wait_s: float = 0.0


@dataclass(frozen=True, slots=True)
class HyperparameterDifference:
    """Whose hyperparameters count, in the first group in which they differ.

    Attributes:
        worker_id: The worker whose values count.
        optimizer: The optimizer.
        clock: Where it was seen.
        group: Parameter group.
        names: Of the values.
        used: Values that count.
        own: This worker's.
    """

    worker_id: str
    optimizer: str
    clock: int
    group: int
    names: tuple[str, ...]
    used: tuple[float, ...]
    own: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class ShardSession:
    """What a shard holds of this worker's pushes.

    Attributes:
        sequence_done_max: Every push up to this one is done.
        held_chunks: Chunks of later pushes that need not be sent again.
    """

    sequence_done_max: int
    held_chunks: dict[int, frozenset[int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochRequest:
    """A request to open an epoch.

    Attributes:
        loader: Name of the loader.
        epoch: Epoch, from 0.
        shape: How it is cut.
        origin: What this worker would draw its order from; that of the first counts.
        report: What became of data since the last report.
    """

    loader: str
    epoch: int
    shape: EpochShape
    origin: bytes
    report: DataReport


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRequest:
    """A request for ranges.

    Attributes:
        loader: Name of the loader.
        epoch: Epoch, from 0.
        order_digest: XXH3-64 of the epoch's order.
        report: What became of data since the last report.
        batch_count_max: Most batches to lease.
        wait: Whether to wait while there is nothing to lease.
    """

    loader: str
    epoch: int
    order_digest: int
    report: DataReport
    batch_count_max: int
    wait: bool


@dataclass(frozen=True, slots=True)
class Lease:
    """Answer to a lease request.

    Attributes:
        ranges: Ranges that this worker holds, one a batch, in the order to use them.
            They may repeat earlier ones.
        closed: Whether every range of the epoch is accounted for.
        report: When it is closed, what became of the epoch.
    """

    ranges: tuple[DataRange, ...]
    closed: bool
    report: EpochReport | None = None


@dataclass(frozen=True, slots=True)
class ContributionAwaited:
    """A clock that waits only for workers without data."""

    clock: int
    optimizer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PinnedSnapshot:
    """A snapshot that shards keep for a reader; `chunk_bytes` as `place` takes it."""

    job_id: str
    snapshot_id: int
    version: int
    clock: int
    generation: int
    shards: tuple[ShardAddress, ...]
    schema: ModelSchema
    pin_ttl_ms: int
    pin_id: int
    chunk_bytes: int = 0


@dataclass(frozen=True, slots=True)
class WorkDone:
    """What a script has done, as of a moment.

    Attributes:
        step_count: Steps of its optimizers.
        sample_count: Samples behind these, as far as they are counted.
        seconds: By activity, how long it has done that.
        activity: What it does.
        activity_s: For how long it has done that.
        metrics: By name, the mean of what was logged lately and the step of the newest.
        round_step_count: Local steps of a round, 0 where each step is a push.
        steps_since_push: Local steps since its newest push began.
        fragment_under_way: Which fragment is being pushed beside further steps, from 1;
            0 for none.
    """

    step_count: int
    sample_count: int
    seconds: tuple[float, ...]
    activity: Activity
    activity_s: float
    metrics: Mapping[str, tuple[float, int]] = field(default_factory=dict)
    round_step_count: int = 0
    steps_since_push: int = 0
    fragment_under_way: int = 0
