"""The coordinator of one job: membership, fences, cuts, the data ledger.

Pure; see the package. Never in the path of a step: what it decides reaches shards
and workers as records.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from psserver.coordinator.core.checkpoints import (
    CommittedCheckpoint,
    PendingCheckpoint,
)
from psserver.coordinator.core.coordinator_effects import (
    CommitCheckpoint,
    NameCheckpoint,
    OrderSeed,
    Persist,
    ReleaseImage,
    SchemaFixed,
    WantState,
    WorkerCutOff,
    WriteCheckpoint,
)
from psserver.coordinator.core.data.epoch_ledger import EpochLedger
from psserver.coordinator.core.data.ledger import NOTHING_TO_REPORT, Enrolments
from psserver.coordinator.core.events import EventKind, Events, shortened
from psserver.coordinator.core.fence import ActiveFence
from psserver.coordinator.core.job_model import JobModel
from psserver.coordinator.core.job_progress import JobProgress
from psserver.coordinator.core.membership_change import waiting_text
from psserver.coordinator.core.mode_change import checked_terms
from psserver.coordinator.core.progress_history import ProgressHistory
from psserver.coordinator.core.reach import Reach
from psserver.coordinator.core.roster import (
    GONE,
    NOTHING_BROUGHT,
    PRESENT,
    Brought,
    Roster,
    WorkerEntry,
)
from psserver.coordinator.core.shard_map import ShardSlot, ShardStanding
from psserver.coordinator.core.shard_memory import APPLY_THREAD_COUNT, ModelMemory
from psserver.coordinator.core.start_point import SavedJob, StartPoint
from psserver.coordinator.core.tracing import Tracing
from psserver.coordinator.core.work import Work
from psserver.edge.coordinator_settings import (
    RETURN_MS_MIN,
    CoordinatorSettings,
    JobPhase,
    ShardLossPolicy,
)
from psserver.edge.cut_report import CutReport, PartReport
from psserver.edge.fence_report import FenceReport
from psserver.edge.limits import DEFAULT_LIMITS
from psserver.edge.memory_grant import NO_GRANT, MemoryGrant
from pswire.checkpoint.place import CheckpointPlace
from pswire.job_terms import JobTerms
from pswire.leased_data import DataReport
from pswire.limits import CHUNK_BYTES_MAX, JOB_METRIC_COUNT_MAX, PRODUCT_COUNT_MAX
from pswire.membership import FenceKind, ModeTerms, Record, WorkerKey, WorkerState
from pswire.reasons import ErrorReason, Refusal
from pswire.schema import OptimizerSpec

NEW_JOB_CURE = (
    "for a new run start a new coordinator and shards with other --state-dir folders"
)
"""What to do where a job has trained all that its script would."""


class CoordinatorCore:
    """State of one job.

    Args:
        settings: The job's settings.
        start_count: Starts of the job's coordinator before this one.

    Attributes:
        progress: What is opened next; its effects are the owner's to carry out, each
            `Persist` at once.
        settings: The job's settings.
        shards: The shard map.
        ledger: Data of all epochs.
        snapshots: Cuts for readers, and their images.
        checkpoints: When one is made, and the one in the making.
        writes: Whether the disk takes changes, and which one it is taking.
        reach: Which shards give which workers no answer.
        way_back: The newest checkpoint, None without any.
        last_state: Registered state of the worker that left last, as of its last push.
        history: How fast it has trained over time.
        tracing: The trace that is being recorded.
        sample_count: Samples that this process has heard of, as far as they are
            counted.
    """

    def __init__(self, settings: CoordinatorSettings, start_count: int = 0) -> None:
        self.progress = JobProgress(settings, start_count)
        self.settings = settings
        self.shards = self.progress.shards
        self.ledger = self.progress.ledger
        self.snapshots = self.progress.snapshots
        self.checkpoints = self.progress.checkpoints
        self.writes = self.progress.writes
        self.reach = Reach(settings.lease_ttl_ms)
        self.way_back: SavedJob | None = None
        self.last_state = b""
        self.history = ProgressHistory()
        self.tracing = Tracing(start_count)
        self.sample_count = 0
        self._patient_until_ms = 0
        self._shards_back_ms = 0
        self._now_ms = 0

    @property
    def model(self) -> JobModel:
        return self.progress.model

    @property
    def roster(self) -> Roster:
        return self.progress.roster

    @property
    def events(self) -> Events:
        """What has happened, for people."""
        return self.progress.events

    @property
    def record(self) -> Record | None:
        """Newest record, None before the start."""
        return self.progress.record

    @property
    def traced_names(self) -> frozenset[str]:
        """Members and shards that can record their next steps; none without members."""
        if self.record is None or not self.record.members:
            return frozenset()
        members = (f"worker {m.worker.worker_id}" for m in self.record.members)
        slots = (slot for slot in self.shards.slots if slot.is_watching)
        return frozenset({*members, *(f"shard {slot.index}" for slot in slots)})

    @property
    def metrics(self) -> dict[str, float]:
        """Of each name that scripts have logged, the mean of what each has last.

        Of many names those that most workers have.
        """
        found: dict[str, list[float]] = {}
        for entry in self.roster.in_state(*PRESENT, WorkerState.LEAVING):
            work = entry.work.newest
            for name, logged in work.metrics.items() if work is not None else ():
                found.setdefault(name, []).append(logged.value)
        most = sorted(found, key=lambda name: (-len(found[name]), name))
        return {
            name: sum(found[name]) / len(found[name])
            for name in sorted(most[:JOB_METRIC_COUNT_MAX])
        }

    @property
    def phase(self) -> JobPhase:
        if self.progress.failure:
            return JobPhase.FAILED
        if self.record is None:
            return JobPhase.SEEDING if self.fence else JobPhase.WAITING
        joining = self.roster.in_state(WorkerState.JOINING)
        # The last one that leaves takes the floor with it; who is lost does not.
        is_left = self.record.members or joining or self.record.workers_floor > 0
        return JobPhase.RUNNING if is_left else JobPhase.FINISHED

    @property
    def checkpoint_with_state(self) -> str:
        """Name of the newest checkpoint, if it has registered state; else empty."""
        saved = self.way_back
        return saved.point.place.name if saved is not None and saved.has_state else ""

    def brought_other(self, entry: WorkerEntry) -> tuple[str, ...]:
        """What a worker has brought to the start that differs from what counts."""
        first = self.progress.first
        differing = () if first is None else entry.brought.differing(first.brought)
        if not differing:  # as of nearly all: a member is looked for among all others
            return ()
        member = self.record.member_of(entry.worker) if self.record else None
        return () if member is None or member.base_clock else differing

    @property
    def fence(self) -> ActiveFence | None:
        return self.progress.fences.open

    def restore(
        self,
        *,
        terms: JobTerms | None,
        record: Record | None,
        incarnations: dict[str, int],
        processes: dict[WorkerKey, str],
        now_ms: int,
        start_point: StartPoint | None = None,
    ) -> None:
        """Goes on from durable state after a restart.

        No member is lost before all have had time to come back (`return_ms`). A
        worker that was not yet a member keeps its place in the queue, too.
        """
        if terms is not None:
            self.model.restore(terms)
        self.progress.restore(record, start_point)
        floor = start_point.incarnation_floor if start_point is not None else 0
        self.progress.roster = Roster(incarnations, floor=floor)
        for slot in self.shards.slots:
            slot.incarnation = max(slot.incarnation, floor)
        self._patient_until_ms = now_ms + self.settings.return_ms
        self._shards_back_ms = now_ms + RETURN_MS_MIN
        for worker, process_id in processes.items():
            if incarnations.get(worker.worker_id) == worker.incarnation:
                self.roster.restore_registered(worker, process_id, now_ms)
        if record is None:
            return
        self.progress.started_ms = now_ms
        for end in record.departures:
            if not end.evicted:
                self.roster.restore_left(end.member.worker, now_ms)
        for member in record.members:
            self.roster.restore(
                member.worker,
                processes.get(member.worker, ""),
                now_ms + self.settings.return_ms,
            )

    def restore_ledger(
        self, epochs: tuple[EpochLedger, ...], enrolments: Enrolments = ()
    ) -> None:
        """Goes on with the data of all epochs, after `restore`."""
        point = self.progress.start_point
        before = point.participation_count_before if point is not None else 0
        if self.record is None and point is not None:
            self.ledger.return_to(epochs, before)
            return
        members = self.record.members if self.record is not None else ()
        self.ledger.restore(
            epochs, frozenset(member.worker for member in members), enrolments, before
        )

    # Shards

    def register_shard(
        self,
        *,
        process_id: str,
        address: str,
        now_ms: int,
        memory: MemoryGrant = NO_GRANT,
        wanted_index: int | None = None,
    ) -> ShardSlot:
        """Gives a shard its place.

        Raises:
            Refusal: `SHARD_UNKNOWN`, `SHARD_LOST`, or `MEMORY_EXCEEDED` when the job's
                model does not fit it; `RECOVERING` while one whose place it would get
                may come back; no state changed.
        """
        self.progress.check_alive()
        self._check_vacant(process_id, now_ms)
        undo = self.shards.memento()
        known = self.shards.place_of(process_id)
        slot = self.shards.register(
            process_id=process_id,
            address=address,
            can_replace=self.record is None,
            now_ms=now_ms,
            memory=memory,
            wanted_index=wanted_index,
        )
        if slot is not known:
            try:
                self._check_fits(self.model)
            except Refusal:
                undo()
                raise
            self.progress.keep(
                Persist(shards=tuple(self.shards.slots)), now_ms, undo=undo
            )
            self.events.add(
                EventKind.SHARD_REGISTERED,
                f"Shard {slot.index} has registered at {slot.address}",
                now_ms,
                shard_index=slot.index,
            )
        return slot

    def shard_watching(self, slot: ShardSlot, now_ms: int) -> None:
        """A shard's stream is open; its owner has sent it the whole state."""
        if slot.broken_ms is not None:
            self.events.add(
                EventKind.SHARD_RETURNED,
                f"Shard {slot.index} is back",
                now_ms,
                shard_index=slot.index,
            )
        slot.is_watching = True
        slot.broken_ms = None
        slot.heard_ms = now_ms
        self.progress.pump(now_ms)

    def take_standing(
        self, slot: ShardSlot, standing: ShardStanding, now_ms: int
    ) -> None:
        """Takes a shard's report of its progress."""
        end = shortened(standing.recording_end)
        standing = replace(standing, recording_end=end)
        is_known = standing.is_recording_end_known or slot.standing.recording_end
        if standing.recording_end and not is_known:
            self.events.add(
                EventKind.RECORDING_ENDED,
                f"The recording of shard {slot.index} has ended, and training goes on: "
                f"{standing.recording_end}",
                now_ms,
                shard_index=slot.index,
                clock=standing.applied_clock,
            )
        slot.take(standing)

    def shard_broken(self, slot: ShardSlot, now_ms: int) -> None:
        slot.is_watching = False
        slot.broken_ms = now_ms
        slot.heard_ms = now_ms
        self.events.add(
            EventKind.SHARD_LOST,
            f"The connection to shard {slot.index} broke",
            now_ms,
            shard_index=slot.index,
            clock=slot.standing.applied_clock,
        )
        pending = self.progress.decided_cut
        if self.record is None and self.fence is not None:
            self.progress.abort(f"shard {slot.index} was lost before the start", now_ms)
        elif pending is not None and slot.index not in pending.ready:
            # The decision may be lost with the connection.
            self.progress.fail_cut(
                f"the connection to shard {slot.index} broke", now_ms
            )
            self.progress.pump(now_ms)

    def report_fence(self, slot: ShardSlot, report: FenceReport, now_ms: int) -> None:
        """Takes a shard's report; decides when it is the last one."""
        slot.heard_ms = now_ms
        fence = self.fence
        if fence is None or fence.number != report.fence_number:
            return
        if report.failure:
            # Its values are not those of the checkpoint.
            self.progress.fail_load(slot.index, report.failure, now_ms)
            return
        fence.reports[slot.index] = report
        if not fence.silent_shards(self.settings.shard_count):
            self.progress.decide(now_ms)

    def report_cut(self, slot: ShardSlot, report: CutReport, now_ms: int) -> None:
        """A shard has its image, or says why not."""
        slot.heard_ms = now_ms
        snapshot_id = report.snapshot_id
        pending = self.progress.decided_cut
        if report.failure:
            if pending is not None and pending.snapshot_id == snapshot_id:
                self.progress.fail_cut(f"shard {slot.index}: {report.failure}", now_ms)
        elif checkpoint := self.checkpoints.of(snapshot_id):
            if self.checkpoints.copied(slot.index, report.holdings):
                self.progress.effects.append(NameCheckpoint(checkpoint=checkpoint))
                self._ask_for_state(checkpoint)
        elif not self.snapshots.copied(snapshot_id, slot.index):
            self.progress.effects.append(ReleaseImage(snapshot_id=snapshot_id))
        self.progress.pump(now_ms)

    def report_checkpoint(
        self, slot: ShardSlot, report: PartReport, now_ms: int
    ) -> None:
        """A shard has written its part of a checkpoint, or says why not."""
        slot.heard_ms = now_ms
        checkpoint = self.checkpoints.of(report.snapshot_id)
        if checkpoint is None or checkpoint.is_committing:
            return
        if report.failure:
            self.fail_checkpoint(
                checkpoint.snapshot_id, f"shard {slot.index}: {report.failure}", now_ms
            )
        elif report.part is not None and self.checkpoints.written(
            slot.index, report.part, is_finite=report.is_finite
        ):
            self.progress.effects.append(CommitCheckpoint(checkpoint=checkpoint))

    # Workers

    def register_worker(
        self,
        *,
        process_id: str,
        worker_id: str,
        address: str,
        now_ms: int,
        registered_max: int = DEFAULT_LIMITS.registrations,
    ) -> WorkerEntry:
        """Gives a worker its identity.

        Raises:
            Refusal: `WORKER_ID_TAKEN`, `MALFORMED_MESSAGE`, `BUSY` or `SHARD_LOST`; no
                state changed.
        """
        self.progress.check_alive()
        undo = self.roster.memento()
        before = self.roster.processes
        entry = self.roster.register(
            process_id=process_id,
            worker_id=worker_id,
            address=address,
            now_ms=now_ms,
            registered_max=registered_max,
        )
        if entry.worker not in before:
            change = Persist(
                incarnations=self.roster.incarnations, processes=self.roster.processes
            )
            self.progress.keep(change, now_ms, undo=undo)
        return entry

    def worker_watching(self, entry: WorkerEntry, now_ms: int) -> None:
        """A worker's stream is open; its owner has sent it the whole state.

        Raises:
            Refusal: `WORKER_INCARNATION_STALE` when it was lost before it joined, has
                left, or was lost and replaced; no state changed.
        """
        self.check_present(entry)
        entry.is_watching = True
        entry.broken_ms = None
        entry.heard_ms = now_ms
        was_lost = entry.state is WorkerState.LOST
        if was_lost or entry.state is WorkerState.SUSPECT:
            self._note_worker(EventKind.WORKER_RETURNED, entry, "is back", now_ms)
        if entry.state in PRESENT:
            entry.state = WorkerState.MEMBER
        fence = self.fence
        if was_lost and fence is not None and entry.worker in fence.change.evictions:
            self.progress.abort(f"{entry.worker} is back", now_ms)
        if fence is not None and fence.seeder == entry.worker:
            self.progress.effects.append(
                OrderSeed(worker=entry.worker, fence_number=fence.number)
            )
        self.progress.pump(now_ms)

    def worker_broken(self, entry: WorkerEntry, now_ms: int) -> None:
        """A worker's stream broke: it is suspect until the grace is over."""
        entry.is_watching = False
        entry.broken_ms = now_ms
        entry.heard_ms = now_ms
        if entry.state is WorkerState.MEMBER:
            entry.state = WorkerState.SUSPECT
            what = "is suspect: its connection broke"
            self._note_worker(EventKind.WORKER_SUSPECT, entry, what, now_ms)
        grace_ms = self.settings.reconnect_grace_ms
        if self.roster.most_broke(now_ms, grace_ms=grace_ms):
            self.have_patience(now_ms)

    def report_work(self, entry: WorkerEntry, work: Work, now_ms: int) -> None:
        """A worker says what it has done; who is no member has done nothing."""
        if entry.state in (*PRESENT, WorkerState.LEAVING):
            self.sample_count += entry.work.take(work, now_ms)

    def evict(self, entry: WorkerEntry, now_ms: int) -> None:
        """Evicts a member that lives, as soon as enough would be left without it."""
        if entry.state in PRESENT:
            entry.is_condemned = True
            self.progress.pump(now_ms)

    def report_silence(
        self, entry: WorkerEntry, silent_ms: Mapping[int, int], now_ms: int
    ) -> None:
        """A worker reports for how long each shard that it waits for has been silent.

        Raises:
            Refusal: `MALFORMED_MESSAGE`; no state changed.
        """
        if any(not 0 <= i < len(self.shards.slots) for i in silent_ms):
            raise Refusal(
                ErrorReason.MALFORMED_MESSAGE,
                f"the job has {len(self.shards.slots)} shards, not all of "
                f"{sorted(silent_ms)[:9]}",
            )
        self.reach.note(entry.worker, silent_ms, self.shards.slots, now_ms)
        self._look_for_cut_off(now_ms)
        self.progress.pump(now_ms)

    def check_present(self, entry: WorkerEntry) -> None:
        """Refuses a start of a worker that is over.

        Raises:
            Refusal: `WORKER_INCARNATION_STALE`; no state changed.
        """
        if entry.state in GONE or self.roster.is_replaced(entry):
            raise Refusal(
                ErrorReason.WORKER_INCARNATION_STALE,
                f"{entry.worker} has left, or was lost",
                worker_id=entry.worker.worker_id,
            )

    def join(
        self,
        entry: WorkerEntry,
        *,
        terms: JobTerms,
        loaders: tuple[str, ...],
        now_ms: int,
        brought: Brought = NOTHING_BROUGHT,
    ) -> None:
        """A worker has completed `prepare` and asks to become a member.

        Raises:
            Refusal: `SCHEMA_MISMATCH`, `OPTIMIZER_MISMATCH`, `SHARD_LOST`,
                `WORKER_INCARNATION_STALE`, or `MEMORY_EXCEEDED` when the model does
                not fit the shards; no state changed.
        """
        self.progress.check_alive()
        self.check_present(entry)
        if entry.state is not WorkerState.REGISTERED:
            return
        model = self.model.copy()
        has_begun = self.record is not None or self.progress.start_point is not None
        if not has_begun and not self.roster.in_state(WorkerState.JOINING):
            # Nobody stands for an earlier one any more, and nothing was trained: a
            # script that is corrected and started again must not differ from itself.
            model = JobModel()
        finished = self._finished_text()
        others = self.roster.in_state(WorkerState.JOINING, *PRESENT)
        try:
            is_new = model.agree(terms, is_alone=not others)
        except Refusal as refusal:
            if not finished and self.progress.start_point is None:
                raise
            what = finished or f"this job goes on from {self.progress.start_point}"
            raise Refusal(
                refusal.reason, f"{what}; {refusal.message}", cure=self._new_job_cure
            ) from None
        if is_new:
            self._check_rules(terms)
            self._check_fits(model)
        self._check_products()

        def wait() -> None:
            self.reach.admit(entry.worker)
            entry.loaders = loaders
            entry.brought = brought
            entry.state = WorkerState.JOINING
            self.progress.pump(now_ms)

        if is_new:
            self._keep_model(model, now_ms, then=wait)
        else:
            wait()

    def declare_optimizer(
        self, entry: WorkerEntry, spec: OptimizerSpec, now_ms: int
    ) -> None:
        """A worker steps an optimizer with other groups, or another one, from now on.

        Raises:
            Refusal: `OPTIMIZER_MISMATCH`, `LIMIT_EXCEEDED`, `MEMORY_EXCEEDED`,
                `SHARD_LOST` or `WORKER_INCARNATION_STALE`, or what makes the
                optimizer useless; no state changed.
        """
        self.progress.check_alive()
        self.check_present(entry)
        model = self.model.copy()
        if model.declare(spec):
            self._check_fits(model)
            self._keep_model(model, now_ms)

    def leave(
        self,
        entry: WorkerEntry,
        *,
        sequence: int,
        report: DataReport = NOTHING_TO_REPORT,
        now_ms: int,
    ) -> None:
        """A worker ends its membership after push `sequence`."""
        before = self.ledger.memento(self.ledger.known(sorted(report.epochs)))
        self.ledger.take_report(entry.worker, report)

        def go() -> None:
            if entry.state in PRESENT:
                entry.state = WorkerState.LEAVING
                entry.last_sequence = sequence
            elif entry.state in (WorkerState.REGISTERED, WorkerState.JOINING):
                self.progress.withdraw(entry, now_ms)
            self.progress.pump(now_ms)

        changed = before.changed()
        if changed:
            self.progress.keep(
                Persist(epochs=changed), now_ms, undo=before.put_back, then=go
            )
        else:
            go()

    # Mode

    def set_mode(self, wanted: ModeTerms, now_ms: int) -> None:
        """Asks for another mode, by a fence; the newest wish counts.

        Backup workers are of no effect outside BSP, and are back when it is.

        Raises:
            Refusal: `MALFORMED_MESSAGE`, `UNSUPPORTED`, `NOT_STARTED` or `SHARD_LOST`;
                no state changed.
        """
        self.progress.check_alive()
        target, mode = checked_terms(wanted), wanted.mode
        rule = self.settings.aggregation
        if rule.is_robust and not mode.rules.is_clocked:
            raise Refusal(
                ErrorReason.UNSUPPORTED,
                f"this job has --aggregation {rule}, which takes the gradients of "
                f"several workers: in {mode.label} each is applied by itself",
                cure="start another job for that",
            )
        if mode.rules.has_quorum and target.quorum < rule.members_min:
            raise Refusal(
                ErrorReason.UNSUPPORTED,
                f"this job has --aggregation {rule}, which tolerates {rule.f} bad "
                f"workers among at least 2f + 3 = {rule.members_min}, and a clock "
                f"would close with {target.quorum}",
                cure=f"ask for a quorum of {rule.members_min} or more",
            )
        if self.record is None:
            raise Refusal(
                ErrorReason.NOT_STARTED,
                f"there is no mode to change yet: the job waits for "
                f"{self.waiting_for()}",
            )
        self.progress.wanted_mode = target
        self.progress.pump(now_ms)

    def mode_is(self, terms: ModeTerms) -> bool:
        """Whether the newest record names this mode, with the numbers that it takes."""
        return self.record is not None and self.record.terms == checked_terms(terms)

    # Snapshots and data

    def want_cut(self, now_ms: int) -> int:
        """A reader wants a cut that begins after this call.

        Returns:
            The value of `snapshots.finished_cut_count` from which on the newest
            snapshot is what the reader wants.

        Raises:
            Refusal: `NOT_STARTED` or `SHARD_LOST`; no state changed.
        """
        self.progress.check_alive()
        if self.record is None:
            raise Refusal(
                ErrorReason.NOT_STARTED,
                f"there are no values yet: the job waits for {self.waiting_for()}",
            )
        fence = self.fence
        is_cutting = fence is not None and fence.kind is FenceKind.CUT
        wanted = self.snapshots.want(
            is_cutting=is_cutting and not self.checkpoints.is_cutting
        )
        self.progress.pump(now_ms)
        return wanted

    def want_checkpoint(self, now_ms: int) -> int:
        """Somebody wants a checkpoint that is cut after this call.

        Returns:
            The value of `checkpoints.answered` from which on it is there, or has
            failed.

        Raises:
            Refusal: `UNSUPPORTED`, `NOT_STARTED` or `SHARD_LOST`; no state changed.
        """
        self.progress.check_alive()
        self._check_makes_checkpoints()
        if self.record is None:
            raise Refusal(
                ErrorReason.NOT_STARTED,
                f"there are no values yet: the job waits for {self.waiting_for()}",
            )
        wanted = self.checkpoints.want()
        self.progress.pump(now_ms)
        return wanted

    def state_wanted(self, entry: WorkerEntry) -> WantState | None:
        """What a worker that watches again is asked for, as it may not have heard."""
        pending = self.checkpoints.pending
        if pending is None or pending.state_of != entry.worker:
            return None
        ledger = pending.ledger
        return WantState(
            worker=entry.worker,
            snapshot_id=pending.snapshot_id,
            sequence=dict(pending.cut.sequences)[entry.worker],
            epochs={e.loader: ledger.first_open(e.loader) for e in ledger.epochs()},
        )

    def _ask_for_state(self, checkpoint: PendingCheckpoint) -> None:
        """Asks the worker that leads, whose hyperparameters count, too."""
        longest = checkpoint.record.longest
        if longest is None:
            checkpoint.state = self.last_state
            return
        entry = self.roster.find(longest.worker)
        if entry is not None and entry.has_state:
            checkpoint.state_of = longest.worker
            wanted = self.state_wanted(entry)
            assert wanted is not None, "it is this one's"
            self.progress.effects.append(wanted)

    def take_state(
        self, entry: WorkerEntry, snapshot_id: int, state: bytes, now_ms: int
    ) -> None:
        """A worker has registered state, and sends it as of a cut or its last push.

        Args:
            entry: The worker.
            snapshot_id: Name of the cut; 0 for the last push of one that leaves.
            state: What it has registered, empty for none.
            now_ms: Monotonic time.

        Raises:
            Refusal: `WORKER_INCARNATION_STALE`; no state changed.
        """
        self.check_present(entry)
        entry.has_state = True
        if not snapshot_id:
            self.last_state = state or self.last_state
            return
        checkpoint = self.checkpoints.of(snapshot_id)
        if checkpoint is not None and checkpoint.state_of == entry.worker:
            self.progress.take_state(checkpoint, state)
            self.progress.pump(now_ms)

    def checkpoint_named(self, snapshot_id: int, place: CheckpointPlace) -> None:
        """A checkpoint that all shards have copied has a name, and can be written."""
        checkpoint = self.checkpoints.of(snapshot_id)
        if checkpoint is not None:
            checkpoint.place = place
            self.progress.effects.append(
                WriteCheckpoint(snapshot_id=snapshot_id, place=place)
            )

    def checkpoint_write(self, slot: ShardSlot) -> WriteCheckpoint | None:
        """What a shard that watches again is to write, as it may not have heard."""
        checkpoint = self.checkpoints.pending
        if checkpoint is None or checkpoint.place is None:
            return None
        if slot.index in checkpoint.parts:
            return None
        return WriteCheckpoint(
            snapshot_id=checkpoint.snapshot_id, place=checkpoint.place
        )

    def checkpoint_committed(
        self, snapshot_id: int, saved: SavedJob, now_ms: int
    ) -> None:
        """The manifest of a checkpoint is durable, and has the job like this."""
        checkpoint = self.checkpoints.of(snapshot_id)
        assert checkpoint is not None, "one that is being committed is not given up"
        self.checkpoints.committed(checkpoint, now_ms)
        assert checkpoint.place is not None, "it was written there"
        self.events.add(
            EventKind.CHECKPOINT_COMPLETE,
            f"Checkpoint {checkpoint.place.name} is complete",
            now_ms,
            clock=checkpoint.cut.clock,
        )
        if checkpoint.is_finite:
            self.way_back = saved
        self.progress.pump(now_ms)

    def fail_checkpoint(self, snapshot_id: int, reason: str, now_ms: int) -> None:
        """A checkpoint can't be completed."""
        if self.checkpoints.of(snapshot_id) is not None:
            self.progress.fail_checkpoint(reason, now_ms)
            self.progress.pump(now_ms)

    def replace_start_point(self, saved: SavedJob, reason: str, now_ms: int) -> None:
        """Starts from another checkpoint than the one that a shard can't load.

        Not where it is the same, which is good as far as it can be read here.
        """
        point = self.progress.start_point
        assert point is not None
        if self.record is None and saved.point.place != point.place:
            self.way_back = saved
            self.progress.return_to(saved, reason, now_ms)

    def check_returnable(self) -> None:
        """Refuses a wish to return to a checkpoint that the job can't follow.

        Raises:
            Refusal: `UNSUPPORTED`, `NOT_STARTED` or `SHARD_LOST`; no state changed.
        """
        self.progress.check_alive()
        self._check_makes_checkpoints()
        if self.record is None and self.progress.start_point is None:
            raise Refusal(
                ErrorReason.NOT_STARTED,
                "there is nothing to return from yet: the job waits for "
                f"{self.waiting_for()}",
            )

    def returned(
        self, saved: SavedJob, newest: CommittedCheckpoint, now_ms: int
    ) -> None:
        """The job has gone back to a checkpoint as somebody has asked."""
        self.way_back = saved
        self.checkpoints.returned(newest, now_ms)

    def release_snapshot(self, snapshot_id: int, pin_id: int, now_ms: int) -> None:
        """A reader is done with a snapshot; the next cut need not wait for it."""
        self.snapshots.unpin(snapshot_id, pin_id)
        self.progress.free_images(now_ms)
        self.progress.pump(now_ms)

    def participants(self, loader: str) -> tuple[WorkerKey, ...]:
        """Members that lease data for a loader, in the order of ranks.

        Empty outside BSP and with backup workers, where data is dealt on demand: the
        slow ones get less.
        """
        if self.record is None or not self.record.mode.rules.deals_rounds:
            return ()
        if self.settings.backup_worker_count:
            return ()
        enrolled = self.ledger.participants(loader)
        return tuple(m.worker for m in self.record.members if m.worker in enrolled)

    # Time

    def tick(self, now_ms: int) -> None:
        self._now_ms = now_ms
        self.progress.end_overdue(now_ms)
        self._look_for_cut_off(now_ms)
        if self.writes.is_probe_due(now_ms):
            self.progress.keep(Persist(), now_ms)
        if now_ms >= self._patient_until_ms:
            self._take_out_lost(now_ms)
        if self.record is not None and not self.writes.is_open:
            self._look_for_lost_shards(now_ms)
        lease_ttl_ms = self.settings.lease_ttl_ms
        self.roster.forget_ended(now_ms, lease_ttl_ms=lease_ttl_ms)
        self.progress.free_images(now_ms)
        self.progress.pump(now_ms)
        is_counted = self.phase is JobPhase.RUNNING and self.shards.has_begun
        if is_counted and self.history.is_due(now_ms):
            self.history.add(
                now_ms,
                clock=min(slot.standing.frontier for slot in self.shards.slots),
                step_count=self.shards.version,
                sample_count=self.sample_count,
                metrics=self.metrics,
            )

    def have_patience(self, now_ms: int) -> None:
        """Loses no worker for a lease: that streams broke is this side's own doing."""
        self._patient_until_ms = now_ms + self.settings.lease_ttl_ms

    def waiting_for(self) -> str:
        """Whom the job waits for, in words; empty when for nobody."""
        parts = [slot.state_text(self._now_ms) for slot in self.shards.missing]
        if self.record is None:
            if lacking := self._lacking_workers():
                parts.append(lacking)
                parts += [
                    f"{entry.worker.worker_id}, which {entry.cut_off}, until it can"
                    for entry in self.roster.in_state(WorkerState.JOINING)
                    if entry.cut_off
                ]
            elif self.fence is not None and self.fence.seeder is not None:
                parts.append(f"the first values from {self.fence.seeder.worker_id}")
            elif self.progress.load_failure:
                parts.append(self.progress.load_failure)
            parts += self._unreached_shards()
        else:
            if parts:
                parts[-1] += self._loss_text()
            parts += waiting_text(
                self.roster,
                self.record,
                self.settings,
                self.shards,
                self._now_ms,
                is_resumed=self.progress.is_resumed,
            )
            parts += self._unreached_shards()
            if not self.record.members and self.phase is JobPhase.RUNNING:
                parts.append("a worker to go on: the last ones were lost")
        return ", ".join(parts)

    def _loss_text(self) -> str:
        """What becomes of the job without the shards that are away, in words."""
        away = self.shards.missing
        point = self._returns_to(away)
        ends = "fails" if point is None else f"returns to {point.point}"
        after_ms = self.settings.lease_ttl_ms // 2
        if all(slot.heard_ms is None for slot in away):  # since this start
            after_ms += self.settings.return_ms
        return f", without which the job {ends} after {after_ms / 1000:g} s"

    def joining_note(self) -> str:
        """What to say to a worker that asks to join a finished job; else empty.

        It may train epochs that nobody has trained yet, so that it is not refused.
        """
        finished = self._finished_text()
        if not finished:
            return ""
        trained = self.ledger.trained_text()
        return (
            f"{finished}{f'; {trained}' if trained else ''}. This worker goes on from "
            f"its values; {self._new_job_cure}"
        )

    # Inside

    def _check_makes_checkpoints(self) -> None:
        if self.checkpoints.settings is None:
            raise Refusal(
                ErrorReason.UNSUPPORTED,
                "this job makes no checkpoints",
                cure="start its coordinator with --checkpoint-dir",
            )

    @property
    def _new_job_cure(self) -> str:
        if self.way_back is None and self.progress.start_point is None:
            return NEW_JOB_CURE
        return NEW_JOB_CURE + ", and another --checkpoint-dir"

    def _check_vacant(self, process_id: str, now_ms: int) -> None:
        """Has a new shard wait while the job may return to a checkpoint for it.

        Raises:
            Refusal: `RECOVERING`.
        """
        is_known = self.shards.place_of(process_id) is not None
        away = self.shards.missing
        way_back = self._returns_to(away)
        if self.record is None or way_back is None or is_known or not away:
            return
        self.shards.note_seeker(process_id, now_ms)
        names = ", ".join(slot.state_text(now_ms) for slot in away)
        raise Refusal(
            ErrorReason.RECOVERING,
            f"all places are taken, by {names}; without a sign of life there the job "
            f"returns to {way_back.point} and has places for new shards",
            cure="wait, which takes a few seconds",
        )

    def _look_for_lost_shards(self, now_ms: int) -> None:
        """Ends the job when a shard is lost, or has it return to a checkpoint.

        It gets half a lease to come back, or less when new ones ask for the places of
        all that are away.
        """
        lost = self.shards.lost(now_ms, self.settings.lease_ttl_ms // 2)
        away = self.shards.missing
        way_back = self._returns_to(away)
        if way_back is None:
            for slot in lost:
                self.progress.fail(
                    f"shard {slot.index} at {slot.address} was lost", now_ms
                )
        elif lost or (
            now_ms >= self._shards_back_ms
            and self.shards.are_replaced(now_ms, self.settings.reconnect_grace_ms)
        ):
            reason = " and ".join(slot.loss_text(now_ms) for slot in away)
            self.progress.return_to(way_back, reason, now_ms)

    def _returns_to(self, away: Iterable[ShardSlot]) -> SavedJob | None:
        """Where the job goes on if these shards don't come back, None if it fails.

        A job that shall fail goes on when all is started again: none of the shards
        that are away has been there since.
        """
        was_here = any(slot.heard_ms is not None for slot in away)
        if was_here and self.settings.shard_loss_policy is ShardLossPolicy.FAIL:
            return None
        return self.way_back

    def _look_for_cut_off(self, now_ms: int) -> None:
        """Finds workers that can't reach a shard which others reach, or can again.

        Those that ask to join, too: before the start one of them is to write the first
        values to every shard.
        """
        self.reach.forget(now_ms)
        members = self.roster.in_state(
            WorkerState.MEMBER, WorkerState.SUSPECT, WorkerState.JOINING
        )
        keys = {entry.worker for entry in members}
        found = self.reach.cut_off(keys, self.shards.slots, now_ms)
        for entry in members:
            was_cut_off, entry.cut_off = entry.cut_off, ""
            cut = found.get(entry.worker)
            if cut is None:
                continue
            slot = self.shards.slots[cut.shard_index]
            entry.cut_off = (
                f"can't reach shard {slot.index} at {slot.address}, which "
                f"{cut.other.worker_id} reaches"
            )
            if not was_cut_off:
                self.progress.effects.append(
                    WorkerCutOff(
                        worker=entry.worker,
                        reason=entry.cut_off,
                        silent_ms=cut.silent_ms,
                        is_joining=entry.state is WorkerState.JOINING,
                    )
                )
        self._look_for_seeder(now_ms)

    def _look_for_seeder(self, now_ms: int) -> None:
        """Ends a start whose first values would not come, for one with another's."""
        fence = self.fence
        if fence is None or fence.seeder is None:
            return
        entry = self.roster.find(fence.seeder)
        if entry is not None and entry.cut_off:
            self.progress.abort(f"{entry.worker} {entry.cut_off}", now_ms)

    def _unreached_shards(self) -> list[str]:
        """Shards that give workers no answer who are not cut off for it, in words.

        Before the start those that ask to join, then members.
        """
        names: dict[int, list[str]] = {}
        members = self.roster.in_state(WorkerState.MEMBER, WorkerState.SUSPECT)
        joining = self.roster.in_state(WorkerState.JOINING)
        for entry in joining if self.record is None else members:
            for index in self.reach.unreached(entry.worker, self._now_ms):
                if not entry.cut_off and self.shards.slots[index].is_watching:
                    names.setdefault(index, []).append(entry.worker.worker_id)
        return [
            f"shard {index} at {self.shards.slots[index].address}, which gives "
            f"{' and '.join(who)} no answer"
            for index, who in sorted(names.items())
        ]

    def _finished_text(self) -> str:
        """That the job is finished, in words; empty while it is not.

        It is so when all of its workers have left and no epoch is trained in part; and
        it stays so for those who join it next, until a step of theirs.
        """
        record = self.record
        if record is None or record.workers_floor > 0:
            return ""
        if not all(epoch.is_closed for epoch in self.ledger.epochs()):
            return ""
        if any(self.shards.clock_of(m) > m.base_clock for m in record.members):
            return ""
        clocks = [end.last_clock for end in record.departures]
        clocks += [member.base_clock for member in record.members]
        return (
            "this job is finished: all of its workers have left, after clock "
            f"{max(clocks, default=0)}"
        )

    def _lacking_workers(self) -> str:
        """How many workers the start waits for, and who is on the way."""
        wanted = self.settings.workers_min
        ready = [e for e in self.roster.in_state(WorkerState.JOINING) if not e.cut_off]
        if len(ready) >= wanted:
            return ""
        count = wanted - len(ready)
        connected = [
            e.worker.worker_id
            for e in self.roster.in_state(WorkerState.REGISTERED)
            if e.is_watching
        ]
        are = "is" if len(connected) == 1 else "are"
        on_the_way = f"; {', '.join(connected[:8])} {are} connected"
        return (
            f"{count} more worker{'s' if count > 1 else ''} to call prepare() "
            f"({len(ready)} of {wanted} have{on_the_way if connected else ''})"
        )

    def _check_rules(self, terms: JobTerms) -> None:
        """Checks that what the workers want goes with how updates are made.

        Raises:
            Refusal: `UNSUPPORTED`.
        """
        problem = terms.problem(self.settings.update_rules(terms.clip_grad_norm))
        if problem:
            raise Refusal(ErrorReason.UNSUPPORTED, problem, cure="then start again")

    def _check_products(self) -> None:
        """Checks that what shards measure of one more worker goes in one message.

        Raises:
            Refusal: `LIMIT_EXCEEDED`.
        """
        states = set(WorkerState).difference(GONE, {WorkerState.REGISTERED})
        worker_count = len(self.roster.in_state(*states)) + 1
        most = PRODUCT_COUNT_MAX // self.settings.shard_count
        if self.progress.update.product_count(worker_count) > most:
            raise Refusal(
                ErrorReason.LIMIT_EXCEEDED,
                f"the distances between the gradients of {worker_count} workers on "
                f"{self.settings.shard_count} shards are more than a commit brings: "
                "use fewer workers, or another --aggregation",
            )

    def _check_fits(self, model: JobModel) -> None:
        """Checks that the shards may use the memory that a model takes.

        Raises:
            Refusal: `MEMORY_EXCEEDED`.
        """
        slots, terms = self.shards.slots, model.terms
        if terms is None or not any(slot.memory.byte_count for slot in slots):
            return
        settings = self.settings
        member_count = settings.workers_min
        # Those of one member are applied as they come.
        keeps_gradients = settings.mode.rules.is_clocked and member_count > 1
        keeps_values = bool(
            settings.delay_compensation or not terms.compression.is_none
        )
        ModelMemory.of(
            terms.schema,
            terms.optimizers,
            kept_count=member_count * (keeps_gradients + keeps_values),
            scratch_bytes=self._scratch_bytes(terms),
            makes_checkpoints=settings.checkpoints is not None,
        ).check_fits(slots)

    def _scratch_bytes(self, terms: JobTerms) -> int:
        """What the threads of all shards take to look at gradients one by one."""
        settings = self.settings
        update = settings.update_rules(terms.clip_grad_norm)
        if not (update.measures_each or update.aggregation.is_robust):
            return 0
        chunk_bytes = min(CHUNK_BYTES_MAX, terms.byte_count)
        threads = settings.shard_count * APPLY_THREAD_COUNT
        return threads * (settings.workers_min + 2) * chunk_bytes

    def _keep_model(
        self, model: JobModel, now_ms: int, then: Callable[[], None] = lambda: None
    ) -> None:
        """Writes what the job trains, then sends it to the shards."""

        def follow() -> None:
            self.progress.model = model
            self.progress.effects.append(SchemaFixed())
            then()

        self.progress.keep(Persist(terms=model.terms), now_ms, then=follow)

    def _note_worker(
        self, kind: EventKind, entry: WorkerEntry, what: str, now_ms: int
    ) -> None:
        worker_id = entry.worker.worker_id
        clock = None if entry.clock < 0 else entry.clock
        text = f"{worker_id} {what}"
        self.events.add(kind, text, now_ms, worker_id=worker_id, clock=clock)

    def _take_out_lost(self, now_ms: int) -> None:
        for entry in self.roster.lost(
            now_ms,
            grace_ms=self.settings.reconnect_grace_ms,
            lease_ttl_ms=self.settings.lease_ttl_ms,
        ):
            if entry.state is WorkerState.SUSPECT:
                entry.state = WorkerState.LOST
                what = "is lost: it did not come back in time"
                self._note_worker(EventKind.WORKER_LOST, entry, what, now_ms)
            else:
                self.progress.withdraw(entry, now_ms)
