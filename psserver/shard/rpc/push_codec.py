"""Messages of the data plane <-> the core's values.

Chunks are read by hand; headers and trailers, a few hundred bytes, by the generated
code.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from itertools import compress
from typing import Protocol

from psserver.edge.access import check_speaks_for
from psserver.edge.decoding import check_protocol, decode, decoded, parsed, worker_key
from psserver.edge.monotonic import now_ms
from psserver.shard.core.effects import HyperparametersDiffer
from psserver.shard.core.push import PushId, Reply, Trailer
from psserver.shard.host.shard_host import ShardHost
from psserver.shard.host.shard_model import ShardModel
from pswire.frames import (
    SHARED_CHUNKS_FIELD,
    ChunkFrame,
    bits_from_bytes,
    decode_chunk,
    split_fields,
)
from pswire.limits import GRADIENT_NORM_MAX, PUSH_WEIGHT_MAX, SCHEDULER_COUNT_MAX
from pswire.membership import ClockChoice, WorkerKey
from pswire.membership_codec import read_choice, read_ranges
from pswire.reasons import ErrorReason, Refusal
from pswire.schema import OptimizerSpec
from pswire.v1 import membership_pb2, push_pb2

SEQUENCE_MAX = 1 << 62
"""No worker pushes that often; a larger number, of pushes or clocks, is garbage."""

UNACKNOWLEDGED_COUNT_MAX = 64
"""Pushes of a worker that a shard remembers after they are done. A worker has one on
its way at a time."""

HEADER_FIELD, TRAILER_FIELD, CHUNK_FIELD = 1, 2, 3


@dataclass(frozen=True, slots=True)
class PushMessage:
    """One message of a push without its header, read."""

    trailer: push_pb2.PushTrailer | None
    chunks: list[ChunkFrame]


class PushFields:
    """The fields of a `PushPullRequest` or `PushRequest`, as bytes.

    They are read one by one: the header says first whether the caller may push at all,
    and what else it has sent is looked at only then. Of a field that occurs twice the
    last counts, but for chunks in shared memory.
    """

    def __init__(self, message: bytes) -> None:
        """Splits a message.

        Raises:
            Refusal: `MALFORMED_MESSAGE` or `LIMIT_EXCEEDED`.
        """
        self._header: memoryview | None = None
        self._trailer: memoryview | None = None
        self._chunk: memoryview | None = None
        self._shared: list[memoryview] = []
        for number, view in split_fields(message):
            if number == HEADER_FIELD:
                self._header = view
            elif number == TRAILER_FIELD:
                self._trailer = view
            elif number == CHUNK_FIELD:
                self._chunk = view
            elif number == SHARED_CHUNKS_FIELD:
                self._shared.append(view)

    @property
    def is_whole(self) -> bool:
        """Whether it has a header and a trailer, be they as they may."""
        return self._header is not None and self._trailer is not None

    async def header(self) -> push_pb2.PushHeader:
        """Reads the header.

        Raises:
            Refusal: `MALFORMED_MESSAGE`, also if there is none, or `LIMIT_EXCEEDED`.
        """
        if self._header is None:
            raise Refusal(ErrorReason.MALFORMED_MESSAGE, "the push has no header")
        return await decoded(push_pb2.PushHeader, self._header)

    async def message(self) -> PushMessage:
        """Reads all but the header.

        Raises:
            Refusal: `MALFORMED_MESSAGE` or `LIMIT_EXCEEDED`.
        """
        # The bytes of a gradient are not read here, but pointed at.
        byte_count = sum(map(len, self._shared)) + len(self._trailer or b"")
        return await parsed(byte_count, self._read)

    def _read(self) -> PushMessage:
        trailer = self._trailer
        views = self._shared if self._chunk is None else [self._chunk, *self._shared]
        return PushMessage(
            None if trailer is None else decode(push_pb2.PushTrailer, trailer),
            [decode_chunk(view) for view in views],
        )


class CalledByWorker(Protocol):
    """A message that says which worker sends it to which start of which shard."""

    protocol_version: int
    job_id: str
    shard_incarnation: int

    @property
    def worker(self) -> membership_pb2.WorkerIdentity: ...


def check_caller(host: ShardHost, call: CalledByWorker) -> None:
    """Checks that a worker may call this start of this shard of this job.

    Raises:
        Refusal: `PERMISSION_DENIED` for another worker's name, or as `check_target`.
    """
    check_speaks_for(call.worker.worker_id)
    check_target(host, call)


class Addressed(Protocol):
    """A message that says for which start of which shard it is meant."""

    protocol_version: int
    job_id: str
    shard_incarnation: int


def check_target(host: ShardHost, call: Addressed) -> None:
    """Checks that a call is meant for this start of this shard of this job.

    Raises:
        Refusal: `PROTOCOL_VERSION`, `JOB_UNKNOWN` or `SHARD_INCARNATION_STALE`.
    """
    check_protocol(call.protocol_version)
    host.check_open()
    if call.job_id != host.job_id:
        raise Refusal(
            ErrorReason.JOB_UNKNOWN, f"job {call.job_id[:64]!r} is not served here"
        )
    if call.shard_incarnation != host.incarnation:
        raise Refusal(
            ErrorReason.SHARD_INCARNATION_STALE,
            f"shard {host.shard_index} is in incarnation {host.incarnation}, the call "
            f"is for {call.shard_incarnation}",
        )


def push_id(worker: membership_pb2.WorkerIdentity, sequence: int) -> PushId:
    """Reads a push's id.

    Raises:
        Refusal: `MALFORMED_MESSAGE`.
    """
    if not 1 <= sequence <= SEQUENCE_MAX:
        raise Refusal(
            ErrorReason.MALFORMED_MESSAGE, f"sequence {sequence} is not in 1 to 2^62"
        )
    return PushId(worker_key(worker), sequence)


def checked_clock(clock: int) -> int:
    """Reads a clock.

    Raises:
        Refusal: `MALFORMED_MESSAGE`.
    """
    if not 0 <= clock <= SEQUENCE_MAX:
        raise Refusal(
            ErrorReason.MALFORMED_MESSAGE, f"clock {clock} is not in 0 to 2^62"
        )
    return clock


def worker_choice(choice: membership_pb2.ClockChoice) -> ClockChoice:
    """Reads a clock with its contributors from a worker.

    Raises:
        Refusal: `MALFORMED_MESSAGE`.
    """
    workers = tuple(worker_key(each) for each in choice.workers)
    if not workers or list(workers) != sorted(set(workers)):
        raise Refusal(
            ErrorReason.MALFORMED_MESSAGE,
            f"{len(workers)} contributors that are none, not in the order of their "
            "ids, or not all different",
        )
    if not (math.isfinite(choice.sum_of_squares) and choice.sum_of_squares >= 0):
        raise Refusal(
            ErrorReason.MALFORMED_MESSAGE,
            f"sum of squares {choice.sum_of_squares} is not finite and at least 0",
        )
    if not 0 <= choice.gradient_scale <= 1:
        raise Refusal(
            ErrorReason.MALFORMED_MESSAGE,
            f"gradient scale {choice.gradient_scale} is not in 0 to 1",
        )
    read = read_choice(choice)
    if len(read.factors) not in (0, len(workers)):
        raise Refusal(
            ErrorReason.MALFORMED_MESSAGE,
            f"{len(read.factors)} factors of {len(workers)} contributors",
        )
    checked_clock(choice.clock)
    return read._replace(workers=workers, weights=(), products=())


def check_held(host: ShardHost, digest_count: int, chunk_count: int) -> None:
    """Checks that a caller names what it has for all chunks it wants, or for none.

    Raises:
        Refusal: `MALFORMED_MESSAGE`.
    """
    if digest_count not in (0, chunk_count):
        raise Refusal(
            ErrorReason.MALFORMED_MESSAGE,
            f"{digest_count} digests of what the caller has, for {chunk_count} chunks "
            f"of shard {host.shard_index}",
        )


def check_window(header: push_pb2.PushHeader) -> None:
    """Refuses a sender that never says which answers it has got.

    What a shard remembers of a push stays until then.

    Raises:
        Refusal: `LIMIT_EXCEEDED`.
    """
    count = header.sequence - header.sequence_unacknowledged_min
    if count > UNACKNOWLEDGED_COUNT_MAX:
        raise Refusal(
            ErrorReason.LIMIT_EXCEEDED,
            f"push {header.sequence} leaves {count} earlier ones unacknowledged, the "
            f"limit is {UNACKNOWLEDGED_COUNT_MAX}",
        )


def value_entries_of(model: ShardModel, header: push_pb2.PushHeader) -> frozenset[int]:
    """Tensors of which a push has values.

    Raises:
        Refusal: `MALFORMED_MESSAGE`.
    """
    if not header.value_entries:
        return frozenset()
    return _entries_of(header.value_entries, len(model.terms.schema.entries))


@lru_cache(maxsize=64)
def _entries_of(bits: bytes, entry_count: int) -> frozenset[int]:
    return frozenset(compress(range(entry_count), bits_from_bytes(bits, entry_count)))


def read_trailer(
    host: ShardHost,
    optimizer: str,
    trailer: push_pb2.PushTrailer,
    value_entries: frozenset[int] = frozenset(),
) -> Trailer:
    """Reads and checks a trailer.

    Args:
        host: The shard.
        optimizer: Whose push it is.
        trailer: As it came.
        value_entries: Tensors of which the push has values.

    Raises:
        Refusal: `MALFORMED_MESSAGE`, `LIMIT_EXCEEDED`, `HYPERPARAMETER_INVALID` or
            `OPTIMIZER_MISMATCH`.
    """
    model = host.model
    if not 0 <= trailer.weight <= PUSH_WEIGHT_MAX:
        raise Refusal(
            ErrorReason.MALFORMED_MESSAGE,
            f"weight {trailer.weight} is not in 0 to {PUSH_WEIGHT_MAX:g}: push with "
            "the number of samples behind the gradient",
        )
    if not 0 <= trailer.gradient_norm <= GRADIENT_NORM_MAX:
        raise Refusal(
            ErrorReason.MALFORMED_MESSAGE,
            f"gradient norm {trailer.gradient_norm} is not in 0 to "
            f"{GRADIENT_NORM_MAX:g}",
        )
    if not (math.isfinite(trailer.loss_scale) and trailer.loss_scale >= 0):
        raise Refusal(
            ErrorReason.MALFORMED_MESSAGE,
            f"loss scale {trailer.loss_scale} is not finite and at least 0",
        )
    if trailer.slack_ms < 0:
        raise Refusal(
            ErrorReason.MALFORMED_MESSAGE,
            f"a slack of {trailer.slack_ms} ms is not at least 0",
        )
    if len(trailer.scheduler_steps) > SCHEDULER_COUNT_MAX:
        raise Refusal(
            ErrorReason.LIMIT_EXCEEDED,
            f"the push has steps of {len(trailer.scheduler_steps)} schedulers of one "
            f"optimizer, the limit is {SCHEDULER_COUNT_MAX}",
        )
    hyperparameters = tuple(tuple(group.values) for group in trailer.groups)
    model.engine.declared.check_hyperparameters(
        optimizer, hyperparameters, spec_digest=trailer.optimizer_digest
    )
    if not trailer.publishes:
        _check_step(value_entries & model.engine.declared.trained)
    sent = bits_from_bytes(trailer.chunk_bitmap, len(model.chunks))
    return Trailer(
        optimizer=optimizer,
        weight=trailer.weight,
        hyperparameters=hyperparameters,
        finite=trailer.finite,
        loss_scale=trailer.loss_scale,
        chunk_indexes=frozenset(
            chunk.index
            for chunk, is_sent in zip(model.chunks, sent, strict=True)
            if is_sent
        ),
        ranges=read_ranges(trailer.ranges),
        averaged_buffers=_averaged_buffers(model, trailer.averaged_buffers),
        gradient_norm=trailer.gradient_norm,
        loads_state=trailer.loads_state,
        is_of_longest=trailer.is_of_longest,
        scheduler_steps=tuple(trailer.scheduler_steps),
        spec_digest=trailer.optimizer_digest,
        value_entries=value_entries,
        publishes=trailer.publishes,
        continues_batch=trailer.continues_batch,
        slack_ms=trailer.slack_ms if trailer.HasField("slack_ms") else None,
        is_last=trailer.is_last,
    )


def _check_step(values: frozenset[int]) -> None:
    """Refuses a step that has values of what is trained.

    They would be no gradient, which a norm or a rule of aggregation bounds.

    Raises:
        Refusal: `MALFORMED_MESSAGE`.
    """
    if values:
        raise Refusal(
            ErrorReason.MALFORMED_MESSAGE,
            f"a step has values of tensor {min(values)}, which is trained: only a push "
            "that publishes has them",
        )


def _averaged_buffers(model: ShardModel, bits: bytes) -> frozenset[int]:
    if not bits:
        return frozenset()
    entries = model.engine.buffer_entries
    return frozenset(compress(entries, bits_from_bytes(bits, len(entries))))


def check_frame(frame: ChunkFrame) -> None:
    """Refuses what this release can't read, and bytes that do not match.

    Bytes in shared memory were not on their way: what their digest is for is to tell
    them from those of another push with the same id.

    Raises:
        Refusal: `UNSUPPORTED` or `CHUNK_DIGEST_MISMATCH`.
    """
    if frame.part != 0 or not frame.last:
        raise Refusal(
            ErrorReason.UNSUPPORTED,
            f"chunk {frame.index} comes in parts, and a gradient's chunk goes in one "
            "message",
        )
    if frame.shared is None:
        frame.verify()


def reply_message(
    host: ShardHost, reply: Reply, worker: WorkerKey | None = None
) -> push_pb2.PushReply:
    """Writes a reply; one to a worker's push says what it has to hear once."""
    difference, waited_s = None, 0.0
    if worker is not None:
        member = host.members.of(worker)
        difference, member.difference = member.difference, None
        waited_s = member.peers.take_news()
    return push_pb2.PushReply(
        outcome=push_pb2.Outcome.ValueType(reply.outcome),
        shard_incarnation=host.incarnation,
        generation=reply.generation,
        version=reply.version,
        frontier=reply.frontier,
        clock=reply.clock,
        staleness=reply.staleness,
        nonfinite_worker_ids=reply.nonfinite_worker_ids,
        mode=membership_pb2.Mode.ValueType(reply.mode),
        staleness_bound=reply.staleness_bound,
        closed_sequence=reply.closed_sequence,
        grad_norm=reply.grad_norm,
        gradient_factor=None if reply.gradient_factor == 1 else reply.gradient_factor,
        hyperparameter_difference=None
        if difference is None
        else difference_message(host.model.terms.optimizers, difference),
        peer_wait_ms=round(1000 * waited_s),
    )


def difference_message(
    optimizers: Iterable[OptimizerSpec], difference: HyperparametersDiffer
) -> push_pb2.HyperparameterDifference:
    """Says which hyperparameters count, and which the worker has, by their names."""
    spec = next(each for each in optimizers if each.name == difference.optimizer)
    used, own = difference.values
    return push_pb2.HyperparameterDifference(
        worker_id=difference.used.worker_id,
        optimizer=difference.optimizer,
        clock=difference.clock,
        group=difference.group,
        names=spec.hyperparameter_names,
        used=used,
        own=own,
    )


def waiting_message(
    host: ShardHost, waited_ms: int, *, to_coordinator: bool = False
) -> push_pb2.Waiting:
    """Says whom a call waits for.

    Args:
        host: The shard.
        waited_ms: For how long.
        to_coordinator: Whether it is for the coordinator, whose own words would come
            back to it, and not for a worker.
    """
    core = host.model.core
    number = core.clocks.next_clock
    return push_pb2.Waiting(
        clock=core.clocks.frontier + 1 if number is None else number,
        waited_ms=waited_ms,
        reason=host.waiting_reason if to_coordinator else host.reason_for_workers,
        awaited=[
            push_pb2.Awaited(
                name=each.name,
                clock=each.clock,
                step_ms=each.step_ms,
                lost_ms=each.lost_ms,
            )
            for each in core.awaited(now_ms())
        ],
    )
