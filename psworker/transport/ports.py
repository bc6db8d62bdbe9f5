"""What a worker needs of a shard and of the coordinator.

gRPC is behind both; see `shard_client` and `control_client`.
"""

from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from pswire.compression import Compression
from pswire.job_settings import JobSettings
from pswire.job_terms import JobTerms
from pswire.leased_data import DataReport, Origin, RecordedSplit
from pswire.membership import ClockChoice, WorkerKey
from pswire.placement import Placement
from pswire.schema import OptimizerSpec
from pswire.span_log import SpanLog
from psworker.transport import values
from psworker.transport.shard_segments import Declined, ShardSegments, SharedValues


@dataclass(slots=True)
class Traffic:
    """Bytes of all messages of the data plane."""

    sent_bytes: int = 0
    received_bytes: int = 0


def _ignore(_: ClockChoice) -> None:
    """For calls that carry no push."""


@dataclass(frozen=True, slots=True)
class Receiver:
    """Takes what comes before the reply, in order, on the event loop.

    Attributes:
        on_chunk: Takes the bytes of a `ParameterChunk`, or where its values are.
        on_waiting: Takes the workers that the call waits for.
        on_staged: Takes that everything of the clock is there and waits for a commit.
    """

    on_chunk: Callable[[memoryview | SharedValues], None]
    on_waiting: Callable[[values.Waiting], None]
    on_staged: Callable[[ClockChoice], None] = _ignore


class ShardPort(Protocol):
    """One start of one shard, as a worker calls it. Used on the event loop.

    Every call raises `CallError` when it fails.

    Attributes:
        shard: Which start of which shard, and where.
        segments: Memory shared with it, None where tensors go in messages.
    """

    shard: values.ShardAddress
    segments: ShardSegments | None

    async def close(self) -> None:
        """Ends the channel and the calls on it."""

    async def push_pull(
        self,
        requests: AsyncGenerator[bytes, None],
        receiver: Receiver,
        *,
        timeout_s: float | None,
    ) -> values.PushReply:
        """Sends a push and receives values, in both directions at once.

        Args:
            requests: Serialized `PushPullRequest`s, the header in the first.
            receiver: Takes the values.
            timeout_s: Deadline of the call, `None` for one that whoever awaits it ends.
        """

    async def push_pull_once(
        self, message: bytes, receiver: Receiver, *, timeout_s: float
    ) -> values.PushReply | None:
        """Sends a push that is one message and receives values.

        Args:
            message: A serialized `PushPullOnceRequest`.
            receiver: Takes the values.
            timeout_s: Longest time until the answer.

        Returns:
            The answer, `None` when the push waits at the shard for others or for a
            commit: it goes on by `push_pull`.
        """

    async def open_segments(
        self, generation: int, placement: Placement, *, timeout_s: float
    ) -> ShardSegments | Declined:
        """Shares memory with the shard if both can; see `shard_segments`."""

    async def pull(
        self,
        generation: int,
        clock: int,
        receiver: Receiver,
        *,
        held_digests: Sequence[int] = (),
        timeout_s: float,
        chunk_indexes: Iterable[int] = (),
    ) -> values.PushReply:
        """Receives the values that this member may see at a clock.

        Args:
            generation: Newest generation known here.
            clock: The clock.
            receiver: Takes the values.
            held_digests: Of the elements of each chunk of the shard as they are here.
            timeout_s: Deadline of the call.
            chunk_indexes: Only these, in messages; none for all.
        """

    async def seed(
        self, fence_number: int, chunks: Iterable[bytes], *, timeout_s: float
    ) -> None:
        """Stages first values.

        Args:
            fence_number: The fence that asked for them.
            chunks: Serialized `SeedRequest`s that hold only a chunk, all of the shard.
            timeout_s: Deadline of the call.
        """

    async def get_session(
        self, worker: WorkerKey, *, timeout_s: float
    ) -> values.ShardSession:
        """Asks what became of the pushes of one start of a worker."""

    async def commit(
        self, generation: int, choice: ClockChoice, *, timeout_s: float
    ) -> bool:
        """Commits a clock. False: its contributors are others, `staged` comes again."""

    async def ready(
        self, generation: int, clock: int, sequence: int, *, timeout_s: float
    ) -> ClockChoice:
        """Says that every shard has all of a push; returns when it's chosen who counts.

        Args:
            generation: Newest generation known here.
            clock: Clock of the push.
            sequence: Number of the push.
            timeout_s: Deadline of the call.
        """

    async def await_contribution(
        self, generation: int, clock: int, sequence: int, *, timeout_s: float
    ) -> values.ContributionAwaited:
        """Returns once a clock waits only for workers that make this call."""

    async def pull_optimizer_state(
        self,
        optimizer: str,
        generation: int,
        clock: int,
        *,
        spec_digest: str,
        only_settings: bool,
        on_waiting: Callable[[values.Waiting], None],
        timeout_s: float,
    ) -> tuple[list[tuple[int, bytes]], values.OptimizerSettings]:
        """Reads the state of an optimizer at a clock.

        Args:
            optimizer: Its name.
            generation: Newest generation known here.
            clock: Clock that the state must have reached.
            spec_digest: Declaration of the optimizer, empty for the first.
            only_settings: Whether the settings will do.
            on_waiting: Takes the workers that the call waits for.
            timeout_s: Deadline of the call.

        Returns:
            Chunk and safetensors file of each part, and the newest settings.
        """

    async def stage_optimizer_state(
        self,
        optimizer: str,
        generation: int,
        sequence: int,
        parts: Iterable[tuple[int, bytes]],
        *,
        spec_digest: str,
        timeout_s: float,
    ) -> None:
        """Stages state of an optimizer for a push.

        Args:
            optimizer: Its name.
            generation: Newest generation known here.
            sequence: The push.
            parts: Chunk and safetensors file of each.
            spec_digest: Declaration of the optimizer, empty for the first.
            timeout_s: Deadline of the call.
        """


class CoordinatorPort(Protocol):
    """One coordinator, as workers and readers call it. Used on the event loop.

    Every call raises `CallError` when it fails.

    Attributes:
        peer: What it is and where, for people.
    """

    peer: str

    async def close(self) -> None:
        """Ends the channel and the calls on it."""

    async def register_worker(
        self, process_id: str, worker_id: str, *, timeout_s: float
    ) -> tuple[WorkerKey, JobSettings]:
        """Gets an identity. Idempotent by `process_id`."""

    async def lease_ttl_ms(self, *, timeout_s: float) -> int:
        """The job's bound on the detection of a lost process, before registering."""

    def watch_worker(
        self, worker: WorkerKey
    ) -> AsyncGenerator[values.WatchEvent, None]:
        """Follows the job. The stream is the worker's sign of life.

        It has no deadline: keepalive on the channel bounds its silence.
        """

    async def join(
        self,
        worker: WorkerKey,
        terms: JobTerms,
        loaders: Sequence[str],
        *,
        values_digest: int = 0,
        state_digest: int = 0,
        timeout_s: float,
    ) -> values.JoinAnswer:
        """Asks to become a member; the record comes on the watch. Idempotent."""

    async def declare_optimizer(
        self, worker: WorkerKey, spec: OptimizerSpec, *, timeout_s: float
    ) -> None:
        """Declares an optimizer anew. Idempotent."""

    async def report_silence(
        self, worker: WorkerKey, silent_ms: Mapping[int, int], *, timeout_s: float
    ) -> None:
        """Reports for how long shards have not answered. Idempotent."""

    async def report_work(
        self,
        worker: WorkerKey,
        done: values.WorkDone,
        traffic: Traffic,
        compression: Compression,
        spans: SpanLog,
        *,
        timeout_s: float,
    ) -> None:
        """Reports what a script has done since its worker joined. Idempotent.

        Args:
            worker: The worker.
            done: What it has done.
            traffic: Bytes of its messages to and from shards.
            compression: How gradients and values are sent in these.
            spans: What it has recorded for a trace; takes what it is to record.
            timeout_s: Deadline of the call.
        """

    async def leave(
        self,
        worker: WorkerKey,
        sequence: int,
        report: DataReport,
        *,
        signal_name: str = "",
        timeout_s: float,
    ) -> None:
        """Ends the membership. Idempotent."""

    async def open_epoch(
        self, worker: WorkerKey, request: values.EpochRequest, *, timeout_s: float
    ) -> Origin:
        """Opens an epoch of a loader; what its order is drawn from. Idempotent."""

    async def lease_data(
        self, worker: WorkerKey, request: values.LeaseRequest, *, timeout_s: float
    ) -> values.Lease:
        """Leases ranges."""

    async def save_state(
        self, worker: WorkerKey, snapshot_id: int, state: bytes, *, timeout_s: float
    ) -> None:
        """Sends registered state as of a cut, 0 for the last push. Idempotent."""

    async def load_state(
        self, worker: WorkerKey, checkpoint: str, *, timeout_s: float
    ) -> bytes:
        """Registered state as a checkpoint has it."""

    async def record_split(
        self, worker: WorkerKey, split: RecordedSplit, *, timeout_s: float
    ) -> RecordedSplit:
        """Records a split; the one that then has its name. Idempotent."""

    async def list_splits(
        self, name: str = "", *, timeout_s: float
    ) -> tuple[RecordedSplit, ...]:
        """The split of a name with its recipe, or all without."""

    async def request_snapshot(
        self, newer_than: int, *, wait_s: float, timeout_s: float
    ) -> values.PinnedSnapshot:
        """Finds or makes a snapshot above a version; -1 for whatever is newest."""

    async def release_snapshot(
        self, snapshot_id: int, pin_id: int, *, timeout_s: float
    ) -> None:
        """Ends a reader's pin before its time. Idempotent."""
