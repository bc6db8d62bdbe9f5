"""A shard at work: its core, its values, and the calls that wait for either.

Everything but the arithmetic happens in one event loop; see `Arithmetic`.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import TYPE_CHECKING

from psserver.edge.answer_slots import AnswerSlots
from psserver.edge.changes import Changes
from psserver.edge.cut_report import CutReport, PartReport
from psserver.edge.fence_report import FenceReport, WorkerHolding
from psserver.edge.limits import DEFAULT_LIMITS, Limits
from psserver.edge.monotonic import now_ms
from psserver.edge.staging_calls import StagingCalls
from psserver.shard.core.core_image import CoreImage
from psserver.shard.core.effects import (
    ApplyChunk,
    ChunkTorn,
    ClockClosed,
    CommitSeed,
    ContributionAwaited,
    CopyImage,
    DeclarationsDiffer,
    DiscardSeed,
    Finish,
    HyperparametersDiffer,
    LoadState,
    MeasureClock,
    PushDone,
    RefusePush,
    ShardEffect,
    Staged,
    WakeAt,
)
from psserver.shard.core.push import PushId
from psserver.shard.core.shard import ShardCore
from psserver.shard.core.shard_fence import Cut
from psserver.shard.host.checkpoint_loading import CheckpointLoading
from psserver.shard.host.checkpoint_parts import CheckpointParts
from psserver.shard.host.chunk_updates import Arithmetic, ChunkUpdates, ClockMeasures
from psserver.shard.host.history import ShardHistory
from psserver.shard.host.hosted_members import HostedMembers, RestingCalls
from psserver.shard.host.image_copying import CutImages, ImageCopying
from psserver.shard.host.push_session import Outgoing, PushSession
from psserver.shard.host.shard_model import ShardModel, shard_model
from psserver.shard.host.shared_segments import SharedSegments
from psserver.shard.tensors.chunk_image import ChunkImage, PendingImage
from psserver.shard.tensors.shard_image import ShardImage
from psserver.shard.tensors.shard_vectors import private_memory, shared_memory
from psserver.shard.tensors.values_encoder import Messages
from pswire import failpoints
from pswire.checkpoint.manifest import part_name
from pswire.checkpoint.place import CheckpointPlace
from pswire.frames import RESPONSE_CHUNK_FIELD
from pswire.job_settings import JobSettings
from pswire.job_terms import JobTerms
from pswire.membership import FenceKind, Outcome, Record, WorkerKey
from pswire.optimizer_states import encode_state
from pswire.reasons import ErrorReason, Refusal
from pswire.span_log import SpanLog

if TYPE_CHECKING:
    from psserver.shard.host.recorder import Recorder

log = logging.getLogger("psserver.shard")

Report = FenceReport | CutReport | PartReport
"""What is reported to the coordinator, until it has answered."""


class ShardHost:
    """One shard of a job.

    Attributes:
        shard_index: Its place.
        incarnation: Count of starts.
        settings: Of the job.
        changes: Notified whenever anything may have changed.
        outbox: Reports for the coordinator, in order.
        members: What is kept for each worker.
        limits: What callers may make it hold.
        resting: Calls that wait for their worker's next push.
        staging: Calls that bring first values or optimizer state.
        pull_answers: Answers with values or state to members that have asked for them.
        push_answers: Answers to pushes. By themselves: who pulls in a worker's name and
            does not read holds up none of its steps.
        snapshot_answers: Answers with snapshots to machines.
        images: Parts of snapshots.
        checkpoints: Parts of checkpoints.
        shared: Memory shared with workers on the same machine.
        history: What it does, for an offline check.
        recorder: Keeps what changes its values, for a replay; None for nothing.
        silent_since_ms: When the coordinator was last heard, once that is a lease ago.
        end_reason: Why the job is over, empty while it is not.
        outcomes: Pushes that are done, by what became of them.
        received_bytes: Of the messages of its data plane that it was sent.
        sent_bytes: Of those that it has sent.
        duplicate_count: Pushes that came again and were done already.
        spans: Its part in traces.
    """

    def __init__(
        self,
        *,
        shard_index: int,
        incarnation: int,
        settings: JobSettings,
        thread_count: int,
        shares_memory: bool = False,
        limits: Limits = DEFAULT_LIMITS,
    ) -> None:
        self.shard_index = shard_index
        self.incarnation = incarnation
        self.settings = settings
        self.changes = Changes()
        self.outbox: asyncio.Queue[Report] = asyncio.Queue()
        self.members = HostedMembers()
        self.limits = limits
        self.resting = RestingCalls(self.members, limits.step_s)
        self.staging = StagingCalls()
        self.pull_answers = AnswerSlots(each_max=limits.worker_answers)
        self.push_answers = AnswerSlots(each_max=limits.worker_answers)
        self.snapshot_answers = AnswerSlots(
            each_max=limits.machine_snapshot_answers, all_max=limits.snapshot_answers
        )
        self._copying = ImageCopying()
        self.images = CutImages()
        self.shared = SharedSegments(self.members, is_wanted=shares_memory)
        self.history = ShardHistory()
        self.recorder: Recorder | None = None
        self.silent_since_ms: int | None = None
        self._coordinator_wait = ""
        self.end_reason = ""
        self.received_bytes = 0
        self.sent_bytes = 0
        self.duplicate_count = 0
        self._last_complete_s = 0.0
        self._model: ShardModel | None = None
        self._seeder: WorkerKey | None = None
        self._arithmetic = Arithmetic(thread_count)
        self.checkpoints = CheckpointParts(
            part_name(shard_index, settings.shard_count),
            self.outbox.put_nowait,
        )
        self._loading = CheckpointLoading(self.pump)
        self._updates = ChunkUpdates(self._arithmetic, self.members, self.pump)
        self._measures = ClockMeasures(self._arithmetic, self.pump)
        self._is_pumping = False
        self.outcomes = Counter[Outcome]()
        self.spans = SpanLog()

    def close(self) -> None:
        """Ends every call and the threads."""
        self.end_sessions(Refusal(ErrorReason.DRAINING, "the shard is shutting down"))
        self.resting.end_all()
        self._copying.close()
        self.checkpoints.close()
        self._loading.close()
        self._arithmetic.close()
        self.history.close()
        if self.recorder is not None:
            self.recorder.close()
        # `grpc.aio` keeps what a cancelled call has awaited (grpc/grpc#43360), and with
        # it all of this: the values and what is mapped go even so.
        self._model = None
        self.members = HostedMembers()

    def end_sessions(self, refusal: Refusal) -> None:
        """Ends every waiting call with an error."""
        self.members.end_calls(refusal)
        self.changes.notify()

    @property
    def job_id(self) -> str:
        """The job."""
        return self.settings.job_id

    @property
    def model(self) -> ShardModel:
        """What the shard holds.

        Raises:
            Refusal: `RECOVERING` before the coordinator has sent it, `SHARD_LOST`
                after the job's end.
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

    def slowest_clock(self) -> int | None:
        """The smallest clock over the members, None before there is a model."""
        return self._model.core.clocks.frontier if self._model is not None else None

    def check_open(self) -> None:
        """Refuses calls after the job's end.

        Raises:
            Refusal: `SHARD_LOST`, with the reason.
        """
        if self.end_reason:
            raise Refusal(
                ErrorReason.SHARD_LOST, f"the job has failed: {self.end_reason}"
            )

    @property
    def unready_reason(self) -> str:
        """Why it serves nobody now, in words; empty while it does.

        One that waits for its first values serves: a worker sends them.
        """
        if self.end_reason:
            return f"the job has failed: {self.end_reason}"
        if self.silent_since_ms is not None:
            return f"it waits for {self.waiting_reason}"
        return "it reads a checkpoint" if self._loading.is_under_way else ""

    @property
    def apply_s(self) -> float:
        """Time that all of its threads have applied updates for."""
        return self._updates.apply_s

    @property
    def waiting_reason(self) -> str:
        """What calls wait for, in words."""
        if self.silent_since_ms is not None:
            # Whoever says so adds how long it has waited: about as long as that.
            return "the coordinator, which has been silent for longer than a lease"
        return self.model.core.waiting_reason

    @property
    def reason_for_workers(self) -> str:
        """What calls wait for, with what the coordinator waits for: for workers.

        The coordinator gets `waiting_reason`: its own words would come back to it.
        """
        if self.silent_since_ms is not None:
            return self.waiting_reason  # what it has said before may be over
        return "; ".join(filter(None, (self._coordinator_wait, self.waiting_reason)))

    # From the coordinator

    def adopt(self, terms: JobTerms) -> None:
        """Learns what the job trains, which may change until the job starts.

        After that only declarations of its optimizers are added.
        """
        known = self._model
        if known is not None and known.core.clocks.record is not None:
            known.declare(terms)
            if self.recorder is not None:
                self.recorder.declared(terms)
            self.changes.notify()
            return
        if known is not None and known.terms == terms:
            return
        self._model = shard_model(
            terms,
            settings=self.settings,
            shard_index=self.shard_index,
            memory=(
                shared_memory
                if self.shared.is_wanted and terms.compression.is_none
                else private_memory
            ),
        )
        self.changes.notify()

    def prepare_fence(
        self,
        fence_number: int,
        kind: FenceKind,
        seeder: WorkerKey | None = None,
        evicting: Collection[WorkerKey] = (),
        checkpoint: CheckpointPlace | None = None,
    ) -> None:
        """Opens a fence, for a start also with the values of a checkpoint."""
        if kind is FenceKind.START:
            self._seeder = seeder
        loads = checkpoint is not None
        self._call(
            lambda core: core.prepare_fence(
                fence_number, kind, seeder, evicting, loads=loads
            )
        )
        if checkpoint is not None:
            self._loading.begin(self.model, fence_number, checkpoint)

    def take_measure_key(self, key: bytes) -> None:
        """Learns by which key shards prove what they have measured."""
        self.model.core.take_measure_key(key)

    def install_record(self, record: Record) -> None:
        """Goes on under a record."""
        model = self._model
        assert model is not None, "the coordinator sends the schema first"
        known = model.core.clocks.record
        model.core.install_record(record)
        newest = model.core.clocks.record
        assert newest is not None, "one is installed"
        if newest is record:
            if self.recorder is not None:
                if known is None:
                    self.recorder.begin(model)
                self.recorder.installed(model.core, record)
            self.history.installed(record, model.core.state.torn_step_count)
            if known is not None and record.mode_clock != known.mode_clock:
                self._send_anew()
        self.members.follow(newest, model.core.closed_sequence)
        self.pump()
        seeder, self._seeder = self._seeder, None
        if newest.kind is FenceKind.START and seeder is not None:
            sent = self.members.sent_to(seeder)
            if sent is not None:
                model.engine.note_seeder(sent)

    def abort_fence(
        self, fence_number: int, batch_floors: Mapping[WorkerKey, int] | None = None
    ) -> None:
        """Goes on as before a fence; see `ShardCore.abort_fence` for the floors."""
        self._call(lambda core: core.abort_fence(fence_number, batch_floors))

    def coordinator_lost(self) -> None:
        """The connection to the coordinator broke."""
        if self._model is not None:
            self._call(lambda core: core.coordinator_lost())

    def decide_cut(self, fence_number: int, cut: Cut) -> None:
        """Has the state at a cut copied, once it is reached."""
        self._call(lambda core: core.decide_cut(fence_number, cut))

    def release_image(self, snapshot_id: int) -> None:
        """Frees an image, also one that is still being made or not begun."""
        is_here = (
            self._copying.release(snapshot_id)
            or self.checkpoints.release(snapshot_id)
            or self.images.release(snapshot_id)
        )
        if not is_here and self._model is not None:
            self._call(lambda core: core.withdraw_cut(snapshot_id))

    def release_images_up_to(self, snapshot_id: int) -> None:
        """Frees all images up to one."""
        self._copying.release_up_to(snapshot_id)
        self.images.release_up_to(snapshot_id)
        self.checkpoints.release_up_to(snapshot_id)

    def set_silent(self, since_ms: int | None) -> None:
        """Holds all calls since the coordinator is silent for a lease, or goes on.

        Args:
            since_ms: When the coordinator was last heard; None when it is heard again.
        """
        self.silent_since_ms = since_ms
        if self._model is not None:
            self._call(lambda core: core.set_orphaned(since_ms is not None))
        self.changes.notify()

    def note_lost(
        self, lost_ms: Mapping[WorkerKey, int], *, coordinator_wait: str = ""
    ) -> None:
        """The coordinator says of which members it has no sign of life.

        Args:
            lost_ms: Time since the last one of each.
            coordinator_wait: What the coordinator itself waits for, in words; empty if
                for nothing.
        """
        self._coordinator_wait = coordinator_wait
        if self._model is not None:
            self._model.core.note_lost(lost_ms, now_ms())

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
        model = self.model
        self.members.of(push.worker).attach(push.sequence, session)
        _put_chunks(model, session, model.core.applied_chunks(push))
        reply = model.core.reply_to(push)
        if reply is not None:
            self.duplicate_count += 1
            session.finish(reply)
            self.history.answered(push, reply)

    def note_complete(self, push: PushId) -> None:
        """All of a push is there that is not done yet."""
        now_s = self._last_complete_s = time.perf_counter()
        self.members.of(push.worker).peers.note_complete(now_s)

    def pump(self) -> None:
        """Carries out what the core wants done; safe to call at any time."""
        if self._is_pumping or self._model is None:
            return
        self._is_pumping = True
        try:
            while effects := self._model.core.take_effects():
                for effect in effects:
                    self._carry_out(self._model, effect)
        except Exception as error:
            # Effects that follow are lost, and whoever waits for them would wait for
            # ever: the job ends here and says so.
            log.error("a step of the protocol failed", exc_info=error)
            self.fail(f"shard {self.shard_index} could not carry out a step")
        finally:
            self._is_pumping = False
        self.changes.notify()

    async def await_contribution(
        self, worker: WorkerKey, sequence: int
    ) -> ContributionAwaited:
        """Returns once a clock waits only for workers without data.

        Raises:
            Refusal: See `ShardCore.await_contribution`.
        """
        core = self.model.core
        core.await_contribution(worker, sequence, now_ms())
        member = self.members.of(worker)
        call = member.begin_idle()
        try:
            self.pump()
            return await call
        finally:
            if member.idle is call:
                member.idle = None
                core.withdraw_awaiting(worker)

    async def values_messages(
        self,
        chunk_index: int,
        presence: tuple[bool, ...] | None,
        reader: WorkerKey,
        *,
        sequence: int | None,
        held_digest: int | None = None,
        is_inline: bool = False,
    ) -> Messages:
        """Encodes the values that a chunk has now for a worker, or where they are.

        Args:
            chunk_index: The chunk.
            presence: Which slices; None for all.
            reader: The worker.
            sequence: As for `ApplyEngine.encode`.
            held_digest: As for `ApplyEngine.encode`.
            is_inline: Whether the values themselves are wanted in any case.
        """
        model = self.model
        is_shared = not is_inline and self.members.reads_values(reader)
        sent = self.members.sent_to(reader)

        def work() -> Messages:
            engine = model.engine
            found = engine.reference(chunk_index, presence) if is_shared else None
            if found is not None:
                return (found,)
            return engine.encode(
                chunk_index,
                RESPONSE_CHUNK_FIELD,
                presence=presence,
                reader=sent,
                sequence=sequence,
                held_digest=held_digest,
            )

        chunk = model.placement.chunks[chunk_index]
        return await self._arithmetic.result(work, chunk.byte_count)

    async def state_messages(
        self, optimizer: str, chunk_index: int, spec_digest: str
    ) -> list[bytes]:
        """Encodes the state that an optimizer has of a chunk, in pieces.

        Raises:
            Refusal: `OPTIMIZER_MISMATCH`.
        """
        engine = self.model.engine

        def work() -> list[bytes]:
            state = engine.export_state(optimizer, chunk_index, spec_digest=spec_digest)
            return list(encode_state(state))

        size = self.model.placement.chunks[chunk_index].byte_count
        return await self._arithmetic.result(work, size)

    # Inside

    def _call(self, act: Callable[[ShardCore], None]) -> None:
        assert self._model is not None, "the coordinator sends the schema first"
        act(self._model.core)
        self.pump()

    def _send_anew(self) -> None:
        """Another mode begins: answers go with values that are as new as it demands."""
        for member in self.members:
            for session in member.sessions.values():
                session.send_anew()

    def _carry_out(self, model: ShardModel, effect: ShardEffect) -> None:
        match effect:
            case ApplyChunk():
                self._updates.begin(
                    model,
                    effect,
                    self._fail_update,
                    self.history,
                    self.spans.recording,
                    self.recorder,
                )
            case MeasureClock():
                self._measures.begin(model, effect, self._fail_update)
            case LoadState():
                self._load_state(model, effect)
            case PushDone():
                member = self.members.of(effect.push.worker)
                member.drop_state(effect.push.sequence)
                is_clocked = model.core.clocks.is_clocked
                last_s = self._last_complete_s if is_clocked else None
                member.peers.note_done(time.perf_counter(), last_s)
                model.core.note_done(effect.push.worker, now_ms())
                self.outcomes[effect.outcome] += 1
                self.history.done(effect.push, effect.outcome)
                if self.recorder is not None:
                    self.recorder.done(model.core, effect.push, effect.outcome)
            case Finish():
                self._finish(model, effect)
            case RefusePush():
                if session := self.members.session_of(effect.push):
                    session.fail(effect.refusal)
            case WakeAt():
                self._wake_at(effect.at_ms)
            case ClockClosed():
                self.history.closed(effect.merge)
            case Staged():
                if session := self.members.session_of(effect.push):
                    session.put_staged(effect.choice)
            case ContributionAwaited():
                self.members.of(effect.worker).answer_idle(effect)
            case FenceReport():
                self.history.fence(effect)
                self.outbox.put_nowait(effect)
            case CommitSeed():
                model.engine.commit_seed()
                self._record_first_values(model)
            case DiscardSeed():
                model.engine.begin_seed()
            case CopyImage():
                self._copy_image(model, effect)
            case HyperparametersDiffer():
                warn_hyperparameters(effect)
                self.members.of(effect.other).difference = effect
            case DeclarationsDiffer():
                warn_declarations(effect)
            case ChunkTorn():
                self._note_torn(model, effect)

    def _wake_at(self, at_ms: int) -> None:
        def wake() -> None:
            if self._model is not None:
                self._call(lambda core: core.wake(now_ms()))

        # A timer may be a moment early by another clock: then one more is ordered.
        delay_s = max(1, at_ms - now_ms()) / 1000
        asyncio.get_running_loop().call_later(delay_s, wake)

    def _finish(self, model: ShardModel, effect: Finish) -> None:
        if member := self.members.find(effect.push.worker):
            member.peers.note_answered(time.perf_counter())
        session = self.members.session_of(effect.push)
        if session is None:
            return
        if effect.needs_all:
            _put_chunks(model, session, [chunk.index for chunk in model.chunks])
        session.end_span("hold", effect.push.worker.worker_id)
        session.finish(effect.reply)
        self.history.answered(effect.push, effect.reply)

    def _load_state(self, model: ShardModel, effect: LoadState) -> None:
        member = self.members.of(effect.push.worker)
        staged = member.state_of(effect.push.sequence, effect.optimizer)
        assert staged is not None, "a push that loads nothing is refused"
        if self.recorder is not None:
            self.recorder.load_state(model.engine, effect, staged.chunks)
            return
        model.engine.load_state(
            effect.optimizer, staged.chunks, spec_digest=effect.spec_digest
        )

    def _record_first_values(self, model: ShardModel) -> None:
        """Records them beside training: each chunk before its first update."""
        if self.recorder is None:
            return
        for chunk in model.chunks:
            self._arithmetic.run(
                partial(self.recorder.record_first_values, model.engine, chunk.index),
                chunk.byte_count,
                then=lambda _: None,
                failed=partial(self._fail_update, chunk.index),
            )

    def _note_torn(self, model: ShardModel, effect: ChunkTorn) -> None:
        record = model.core.clocks.record
        assert record is not None, "nothing is applied before the start"
        for member in record.members:
            if member.worker.worker_id in effect.worker_ids:
                self.members.of(member.worker).has_contradicted = True
        warn_torn(effect)

    def _fail_update(self, chunk_index: int, error: BaseException) -> None:
        # Values and optimizer state may be half changed: nothing that follows could be
        # trusted, so the job ends here and says so.
        log.error("the update of chunk %d failed", chunk_index, exc_info=error)
        self.fail(f"shard {self.shard_index} could not apply an update")

    def _copy_image(self, model: ShardModel, effect: CopyImage) -> None:
        self.history.copying(effect.cut, effect.clock)
        if self.recorder is not None:
            self.recorder.copying(model.core, effect.cut)
        snapshot_id, core = effect.cut.snapshot_id, effect.core
        into = {} if core is None else self.checkpoints.make_room()
        if into is None:
            failure = "it still writes the checkpoint before"
            self.outbox.put_nowait(CutReport(snapshot_id, failure))
            return
        self._copying.begin(
            model.engine,
            snapshot_id,
            values_only=core is None,
            into=into,
            then=partial(self._keep_image, snapshot_id, core),
        )

    def _keep_image(
        self, snapshot_id: int, core: CoreImage | None, image: PendingImage[ChunkImage]
    ) -> None:
        holdings: tuple[WorkerHolding, ...] = ()
        if core is None and not image.failure:
            self.images.add(snapshot_id, image.chunks)
        elif core is not None and not image.failure:
            self.checkpoints.keep(snapshot_id, ShardImage(core, image.chunks))
            holdings = core.holdings
            if failpoints.armed:
                failpoints.hit("shard.checkpoint_copied")
        self.outbox.put_nowait(CutReport(snapshot_id, image.failure, holdings))


def _put_chunks(
    model: ShardModel, session: PushSession, chunk_indexes: Collection[int]
) -> None:
    """Queues chunks that the call has not had, but for what never changes."""
    for chunk_index in sorted(chunk_indexes, reverse=True):
        presence = model.engine.updatable(chunk_index)
        if any(presence):
            session.put(Outgoing(chunk_index, presence))


def warn_hyperparameters(effect: HyperparametersDiffer) -> None:
    """Workers carry different hyperparameters."""
    log.warning(
        "hyperparameters of %s and %s differ at clock %d, group %d: %s counts, not %s",
        effect.used,
        effect.other,
        effect.clock,
        effect.group,
        *effect.values,
    )


def warn_declarations(effect: DeclarationsDiffer) -> None:
    """Workers step different declarations of an optimizer."""
    log.warning(
        "%s and %s step %r with different parameter groups at clock %d: those of %s "
        "count, and gradients of parameters that they lack are left out",
        effect.used,
        effect.other,
        effect.optimizer[:64],
        effect.clock,
        effect.used,
    )


def warn_torn(effect: ChunkTorn) -> None:
    """Workers were left out of a chunk."""
    log.warning(
        "chunk %d of clock %d was applied without %s, whose bytes are not finite "
        "or too large although the push said otherwise; the coordinator is asked to "
        "evict",
        effect.chunk_index,
        effect.clock,
        ", ".join(effect.worker_ids),
    )
