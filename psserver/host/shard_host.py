"""A shard at work: its core, its values, and the threads that apply chunks.

Everything but the arithmetic happens in one event loop. A chunk of more than
`INLINE_BYTES_MAX` is applied and encoded in a thread that releases the GIL, so that
other calls are answered meanwhile; smaller ones are done at once, since handing them
over costs more than they do.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from psserver.core.effects import (
    ApplyChunk,
    ChunkTorn,
    CommitSeed,
    ContributionAwaited,
    CopyImage,
    DiscardSeed,
    FenceReport,
    Finish,
    HyperparametersDiffer,
    RefusePush,
    ShardEffect,
)
from psserver.core.push import PushId, Reply
from psserver.core.record import FenceKind, Record, WorkerKey
from psserver.core.shard import ShardCore
from psserver.host.changes import Changes
from psserver.host.push_session import Outgoing, PushSession
from psserver.tensors.aggregate import Contribution
from psserver.tensors.apply_engine import AppliedChunk, ApplyEngine
from psserver.tensors.shard_vectors import ShardVectors
from pswire.frames import RESPONSE_CHUNK_FIELD, bits_to_bytes, encode_chunk
from pswire.placement import Chunk, Placement
from pswire.reasons import ErrorReason, Refusal
from pswire.schema import ModelSchema, OptimizerSpec

INLINE_BYTES_MAX = 64 << 10
"""Largest chunk that is applied in the event loop: about 50 us of arithmetic, against
about 100 us for a thread's turn."""

log = logging.getLogger("psserver.shard")


@dataclass(frozen=True, slots=True)
class CutReport:
    """A shard's part of a snapshot is ready, or failed."""

    snapshot_id: int
    failure: str = ""


@dataclass(slots=True)
class ShardModel:
    """What a shard holds once the job's schema is known."""

    schema: ModelSchema
    optimizers: tuple[OptimizerSpec, ...]
    placement: Placement
    engine: ApplyEngine
    core: ShardCore
    chunks: tuple[Chunk, ...]


class ShardHost:
    """One shard of a job.

    Attributes:
        shard_index: Its place.
        incarnation: Count of starts.
        job_id: The job.
        shard_count: Shards of the job.
        changes: Notified whenever anything may have changed.
        outbox: Reports for the coordinator, in order.
        end_reason: Why the job is over, empty while it is not.
    """

    def __init__(
        self,
        *,
        shard_index: int,
        incarnation: int,
        job_id: str,
        shard_count: int,
        thread_count: int,
    ) -> None:
        self.shard_index = shard_index
        self.shard_count = shard_count
        self.incarnation = incarnation
        self.job_id = job_id
        self.changes = Changes()
        self.outbox: asyncio.Queue[FenceReport | CutReport] = asyncio.Queue()
        self.end_reason = ""
        self._model: ShardModel | None = None
        self._threads = ThreadPoolExecutor(thread_count, thread_name_prefix="apply")
        self._sessions: dict[PushId, PushSession] = {}
        self._awaiting: dict[WorkerKey, asyncio.Future[ContributionAwaited]] = {}
        self._images: dict[int, ShardVectors] = {}
        # Newest snapshot that was released before its image was here. Ids grow, and
        # images are made one at a time: none up to it is wanted any more.
        self._unwanted_max = 0
        self._is_pumping = False
        self._loop = asyncio.get_running_loop()

    @staticmethod
    def now_ms() -> int:
        """Monotonic time."""
        return time.monotonic_ns() // 1_000_000

    def close(self) -> None:
        """Ends every call and the threads."""
        self.end_sessions(Refusal(ErrorReason.DRAINING, "the shard is shutting down"))
        self._threads.shutdown(wait=True)

    def end_sessions(self, refusal: Refusal) -> None:
        """Ends every waiting call with an error."""
        for session in self._sessions.values():
            session.fail(refusal)
        for waiter in self._awaiting.values():
            if not waiter.done():
                waiter.set_exception(refusal)
        self.changes.notify()

    @property
    def model(self) -> ShardModel:
        """What the shard holds.

        Raises:
            Refusal: `RECOVERING` before the coordinator has told, `JOB_ENDED` after.
        """
        self.check_open()
        if self._model is None:
            raise Refusal(
                ErrorReason.RECOVERING, "the shard has no record to work under yet"
            )
        return self._model

    @property
    def has_model(self) -> bool:
        """Whether the job's schema is known."""
        return self._model is not None

    def check_open(self) -> None:
        """Refuses calls after the job's end.

        Raises:
            Refusal: `SHARD_LOST`, with the reason.
        """
        if self.end_reason:
            raise Refusal(
                ErrorReason.SHARD_LOST, f"the job has failed: {self.end_reason}"
            )

    # From the coordinator

    def adopt(
        self,
        schema: ModelSchema,
        placement: Placement,
        optimizers: tuple[OptimizerSpec, ...],
    ) -> None:
        """Learns what the job trains, which may change until the job starts."""
        known = self._model
        if known is not None and (
            known.core.clocks.record is not None
            or (known.schema, known.optimizers) == (schema, optimizers)
        ):
            return
        chunks = placement.chunks_by_shard[self.shard_index]
        engine = ApplyEngine(schema, placement, self.shard_index, optimizers)
        self._model = ShardModel(
            schema=schema,
            optimizers=optimizers,
            placement=placement,
            engine=engine,
            core=ShardCore([chunk.index for chunk in chunks]),
            chunks=chunks,
        )
        self.changes.notify()

    def prepare_fence(
        self, fence_number: int, kind: FenceKind, seeder: WorkerKey | None
    ) -> None:
        """Opens a fence."""
        self._call(lambda core: core.prepare_fence(fence_number, kind, seeder))

    def install_record(self, record: Record) -> None:
        """Goes on under a record."""
        self._call(lambda core: core.install_record(record))
        for worker, waiter in self._awaiting.items():
            if record.member_of(worker) is None and not waiter.done():
                waiter.set_exception(
                    Refusal(
                        ErrorReason.WORKER_INCARNATION_STALE,
                        f"{worker} is no member of generation {record.generation}",
                    )
                )

    def abort_fence(self, fence_number: int) -> None:
        """Goes on as before a fence."""
        self._call(lambda core: core.abort_fence(fence_number))

    def decide_cut(self, fence_number: int, snapshot_id: int, clock: int) -> None:
        """Copies the state at a clock."""
        self._call(lambda core: core.decide_cut(fence_number, snapshot_id, clock))

    def release_image(self, snapshot_id: int) -> None:
        """Frees an image, also one that is still being made or not begun."""
        if self._images.pop(snapshot_id, None) is None:
            self._unwanted_max = max(self._unwanted_max, snapshot_id)
            if self._model is not None:
                self._call(lambda core: core.withdraw_cut(snapshot_id))

    def release_images_up_to(self, snapshot_id: int) -> None:
        """Frees images that the coordinator, a new process of it, knows nothing of."""
        self._unwanted_max = max(self._unwanted_max, snapshot_id)
        for known in [known for known in self._images if known <= snapshot_id]:
            del self._images[known]

    def fail(self, reason: str) -> None:
        """The job is over."""
        self.end_reason = reason
        self.end_sessions(
            Refusal(ErrorReason.SHARD_LOST, f"the job has failed: {reason}")
        )

    # From workers

    def attach(self, push: PushId, session: PushSession) -> None:
        """Makes a call the one that is answered for a push.

        What the push has already brought about is queued at once; a call that was
        there before is ended.
        """
        core = self.model.core
        older = self._sessions.pop(push, None)
        if older is not None:
            older.fail(
                Refusal(ErrorReason.DRAINING, "a newer call carries the same push")
            )
        self._sessions[push] = session
        for chunk_index in sorted(core.applied_chunks(push), reverse=True):
            session.put(Outgoing(chunk_index, None, None))
        reply = core.reply_to(push)
        if reply is not None:
            session.finish(reply)

    def detach(self, push: PushId, session: PushSession) -> None:
        """The call has ended; what it staged stays."""
        if self._sessions.get(push) is session:
            del self._sessions[push]

    def pump(self) -> None:
        """Carries out what the core wants done; safe to call at any time."""
        if self._is_pumping or self._model is None:
            return
        self._is_pumping = True
        try:
            while effects := self._model.core.take_effects():
                for effect in effects:
                    self._carry_out(self._model, effect)
        finally:
            self._is_pumping = False
        self.changes.notify()

    async def await_contribution(
        self, worker: WorkerKey, clock: int
    ) -> ContributionAwaited:
        """Returns once the clock waits only for workers without data.

        Raises:
            Refusal: See `ShardCore.await_contribution`.
        """
        core = self.model.core
        waiter: asyncio.Future[ContributionAwaited] = self._loop.create_future()
        older = self._awaiting.get(worker)
        if older is not None and not older.done():
            older.set_exception(
                Refusal(ErrorReason.DRAINING, "a newer call asks for the same worker")
            )
        self._awaiting[worker] = waiter
        try:
            core.await_contribution(worker, clock, self.now_ms())
            self.pump()
            return await waiter
        finally:
            if self._awaiting.get(worker) is waiter:
                del self._awaiting[worker]
                core.withdraw_awaiting(worker)

    def values_message(
        self, chunk_index: int, presence: tuple[bool, ...] | None, outer_field: int
    ) -> bytes:
        """Encodes the current values of a chunk."""
        return _values_message(self.model, chunk_index, presence, outer_field)

    def image(self, snapshot_id: int) -> ShardVectors:
        """The image of a snapshot.

        Raises:
            Refusal: `SNAPSHOT_GONE`.
        """
        image = self._images.get(snapshot_id)
        if image is None:
            raise Refusal(
                ErrorReason.SNAPSHOT_GONE,
                f"snapshot {snapshot_id} is not kept any more",
            )
        return image

    # Inside

    def _call(self, act: Callable[[ShardCore], None]) -> None:
        assert self._model is not None, "the coordinator tells the schema first"
        act(self._model.core)
        self.pump()

    def _carry_out(self, model: ShardModel, effect: ShardEffect) -> None:
        match effect:
            case ApplyChunk():
                self._apply(model, effect)
            case Finish():
                self._finish(effect.push, effect.reply)
            case RefusePush():
                session = self._sessions.get(effect.push)
                if session is not None:
                    session.fail(effect.refusal)
            case ContributionAwaited():
                waiter = self._awaiting.get(effect.worker)
                if waiter is not None and not waiter.done():
                    waiter.set_result(effect)
            case FenceReport():
                self.outbox.put_nowait(effect)
            case CommitSeed():
                model.engine.commit_seed()
            case DiscardSeed():
                model.engine.begin_seed()
            case CopyImage():
                self._copy_image(model, effect)
            case HyperparametersDiffer():
                log.warning(
                    "hyperparameters of %s and %s differ at clock %d, group %d: "
                    "%s counts, not %s",
                    effect.used,
                    effect.other,
                    effect.clock,
                    effect.group,
                    *effect.values,
                )
            case ChunkTorn():
                log.warning(
                    "chunk %d of clock %d was applied without %s, whose bytes are "
                    "not finite although the push said so",
                    effect.chunk_index,
                    effect.clock,
                    ", ".join(effect.worker_ids),
                )

    def _finish(self, push: PushId, reply: Reply) -> None:
        session = self._sessions.get(push)
        if session is not None:
            session.finish(reply)

    def _apply(self, model: ShardModel, effect: ApplyChunk) -> None:
        contributions = [
            Contribution(
                worker_id=part.worker_id,
                weight=part.weight,
                presence=part.presence,
                data=_payload(part.payload),
                loss_scale=part.loss_scale,
            )
            for part in effect.contributions
        ]

        def work() -> tuple[AppliedChunk, bytes | None]:
            applied = model.engine.apply(
                effect.chunk_index,
                optimizer=effect.optimizer,
                contributions=contributions,
                total_weight=effect.total_weight,
                hyperparameters=effect.hyperparameters,
            )
            if not any(applied.presence):
                return applied, None
            message = _values_message(
                model, effect.chunk_index, applied.presence, RESPONSE_CHUNK_FIELD
            )
            return applied, message

        size = sum(len(part.data) for part in contributions)
        if size <= INLINE_BYTES_MAX:
            self._applied(model, effect, *work())
            return
        future = self._loop.run_in_executor(self._threads, work)
        future.add_done_callback(
            lambda done: self._applied_in_thread(model, effect, done)
        )

    def _applied_in_thread(
        self,
        model: ShardModel,
        effect: ApplyChunk,
        done: "asyncio.Future[tuple[AppliedChunk, bytes | None]]",
    ) -> None:
        error = done.exception()
        if error is not None:
            # Values and optimizer state may be half changed: nothing that follows
            # could be trusted, so the job ends here and says so.
            log.error("applying chunk %d failed", effect.chunk_index, exc_info=error)
            self.fail(f"shard {self.shard_index} could not apply an update")
            return
        self._applied(model, effect, *done.result())
        self.pump()

    def _applied(
        self,
        model: ShardModel,
        effect: ApplyChunk,
        applied: AppliedChunk,
        message: bytes | None,
    ) -> None:
        model.core.chunk_applied(effect.chunk_index, applied.torn_worker_ids)
        if message is None:
            return
        for push in model.core.pushes_of(effect.clock):
            session = self._sessions.get(push)
            if session is not None:
                session.put(Outgoing(effect.chunk_index, applied.presence, message))

    def _copy_image(self, model: ShardModel, effect: CopyImage) -> None:
        def copied(image: ShardVectors) -> None:
            if effect.snapshot_id > self._unwanted_max:
                self._images[effect.snapshot_id] = image
            self.outbox.put_nowait(CutReport(effect.snapshot_id))
            model.core.image_copied(effect.snapshot_id)

        if model.engine.byte_count <= INLINE_BYTES_MAX:
            copied(model.engine.image())
            return

        def copied_in_thread(done: "asyncio.Future[ShardVectors]") -> None:
            error = done.exception()
            if error is None:
                copied(done.result())
            else:
                log.error("snapshot %d failed", effect.snapshot_id, exc_info=error)
                failure = CutReport(effect.snapshot_id, type(error).__name__)
                self.outbox.put_nowait(failure)
                model.core.image_copied(effect.snapshot_id)
            self.pump()

        future = self._loop.run_in_executor(self._threads, model.engine.image)
        future.add_done_callback(copied_in_thread)


def _payload(payload: object) -> memoryview:
    assert isinstance(payload, memoryview)
    return payload


def _values_message(
    model: ShardModel,
    chunk_index: int,
    presence: tuple[bool, ...] | None,
    outer_field: int,
) -> bytes:
    slices = model.placement.chunks[chunk_index].slices
    bits = (True,) * len(slices) if presence is None else presence
    return encode_chunk(
        outer_field,
        index=chunk_index,
        presence=bits_to_bytes(bits),
        data=model.engine.read(chunk_index, presence),
    )
