"""A job between its fences: what is opened next, and what follows from it.

`CoordinatorCore` feeds it with what shards, workers and readers say.
"""

from collections.abc import Callable, Collection, Iterable
from dataclasses import replace

from psserver.coordinator.core.checkpoints import Checkpoints, PendingCheckpoint
from psserver.coordinator.core.coordinator_effects import (
    Abort,
    Announce,
    CheckpointFailed,
    CommitCheckpoint,
    CoordinatorEffect,
    DecideCut,
    EndJob,
    OrderSeed,
    Persist,
    Prepare,
    ReleaseImage,
    ReplaceStartPoint,
    ReturnToCheckpoint,
)
from psserver.coordinator.core.cut import (
    Cut,
    WorkerSequence,
    batch_floors,
    cut_after,
    cut_between_batches,
    is_premature,
    open_pushes,
    within_batches,
)
from psserver.coordinator.core.data.epoch_ledger import EpochLedger
from psserver.coordinator.core.data.ledger import DataLedger, carried_over
from psserver.coordinator.core.events import EventKind, Events
from psserver.coordinator.core.fence import (
    NUMBERS_PER_START,
    ActiveFence,
    FenceSeries,
    MembershipChange,
    first_record,
)
from psserver.coordinator.core.job_model import JobModel
from psserver.coordinator.core.membership_change import (
    floor_of,
    has_resumed,
    heir_of,
    is_deserted,
    membership_record,
    wanted_change,
)
from psserver.coordinator.core.mode_change import is_settled, mode_record
from psserver.coordinator.core.orphaned_clock import orphaned_clock
from psserver.coordinator.core.roster import Roster, WorkerEntry
from psserver.coordinator.core.shard_map import ShardMap, ShardSlot
from psserver.coordinator.core.snapshots import SnapshotEntry, SnapshotList
from psserver.coordinator.core.start_point import SavedJob, StartPoint
from psserver.coordinator.core.state_writes import StateWrites
from psserver.edge.coordinator_settings import CoordinatorSettings, ShardLossPolicy
from psserver.edge.fence_report import FenceReport
from pswire.aggregation import UpdateRules
from pswire.membership import (
    CutPurpose,
    FenceKind,
    ModeTerms,
    Record,
    StepAtomicity,
    WorkerKey,
    WorkerState,
)
from pswire.reasons import ErrorReason, Refusal

COPIED_BYTES_PER_MS = 20_000
"""Shards have time to copy a cut: 20 MB of its values each second, since the state of
an optimizer may be three times as much, and the copy has what training leaves."""

MODE_RETRY_MS = 50
"""Pause before a mode fence is tried again that found something of the mode before
still to be applied: it comes with the workers' next pushes, not with more asking."""

ORPHAN_RETRY_MS = 50
"""Pause before a clipped clock that nobody is left to commit is asked for again."""

LOAD_RETRY_MS = 10_000
"""Pause before shards load a checkpoint again that one of them could not."""


class JobProgress:
    """Where a job stands.

    Attributes:
        settings: The job's settings.
        shards: The shard map.
        roster: All workers.
        ledger: Data of all epochs.
        snapshots: Cuts for readers, and their images.
        checkpoints: When one is made, and the one in the making.
        fences: The open fence, and the numbers of all.
        model: What the job trains.
        writes: The change that is being written, and whether the disk takes any.
        record: Newest record, None before the start.
        wanted_mode: Mode that somebody has asked for, None when it is there.
        evicted_count: Workers that were evicted since this process began.
        failure: Why the job can't go on, empty while it can.
        is_resumed: Whether shards have reported, since the newest record, that workers
            that joined a finished job have pushed.
        first: Whose values the job has started with, if this process has seen that.
        start_point: Checkpoint that the job starts from, or has started from.
        load_failure: Which shard could not load it, and why, empty when none has tried.
        events: What has happened, for people.
        started_ms: When the job was seen to start, or to go on; None before.
        effects: What the owner is to do, in order.
    """

    def __init__(self, settings: CoordinatorSettings, start_count: int) -> None:
        self.settings = settings
        self.shards = ShardMap(settings.shard_count)
        self.roster = Roster()
        self.ledger = DataLedger(settings.job_seed)
        self.snapshots = SnapshotList(
            shard_count=settings.shard_count,
            pin_ttl_ms=settings.pin_ttl_ms,
            first_id=start_count * NUMBERS_PER_START + 1,
        )
        self.checkpoints = Checkpoints(settings.checkpoints, settings.shard_count)
        self.fences = FenceSeries(start_count)
        self.model = JobModel()
        self.writes = StateWrites()
        self.record: Record | None = None
        self.wanted_mode: ModeTerms | None = None
        self.evicted_count = 0
        self.failure = ""
        self.first: WorkerEntry | None = None
        self.start_point: StartPoint | None = None
        self.load_failure = ""
        self.events = Events(start_count)
        self.started_ms: int | None = None
        self.effects: list[CoordinatorEffect] = []
        self._mode_due_ms: int | None = None
        self.is_resumed = False
        self._orphan_clock = 0
        self._orphan_due_ms = 0
        self._stuck_pushes: frozenset[WorkerSequence] = frozenset()
        self._is_cut_stuck = False
        # Workers that live and join again, and until when the start waits for them.
        self._rejoining: frozenset[str] = frozenset()
        self._rejoining_until_ms = 0
        self._load_due_ms = 0

    @property
    def workers_floor(self) -> int:
        """Members below which no lost one is evicted."""
        if self.record is None:
            return self.settings.workers_min
        return floor_of(self.record, self.settings, is_resumed=self.is_resumed)

    @property
    def update(self) -> UpdateRules:
        """How the pushes of a clock become an update."""
        return self.settings.update_rules(self.model.clip_grad_norm)

    def take_effects(self) -> list[CoordinatorEffect]:
        """Effects since the last call, in order."""
        taken, self.effects = self.effects, []
        return taken

    def restore(
        self, record: Record | None, start_point: StartPoint | None = None
    ) -> None:
        """Goes on under the record that an earlier process left."""
        self.record = record
        self.start_point = start_point
        if record is not None and self.update.is_measured:
            self._orphan_clock = orphaned_clock(record)

    def keep(
        self,
        what: Persist,
        now_ms: int,
        *,
        undo: Callable[[], None] = lambda: None,
        then: Callable[[], None] = lambda: None,
    ) -> None:
        """Hands a change to the disk: then follows `then`, or `undo` if that fails."""
        self.writes.begin(undo, then, now_ms)
        self.effects.append(what)

    def written(self) -> None:
        """The change of the last `Persist` is on the disk."""
        was_failing = bool(self.writes.failure)
        now_ms = self.writes.written()
        if was_failing and self._is_start_decidable:
            self.decide(now_ms)
        self.pump(now_ms)

    def unwritten(self, reason: str) -> None:
        """The change of the last `Persist` is not on the disk, and is undone."""
        self.pump(self.writes.unwritten(reason))

    def pump(self, now_ms: int) -> None:
        """Opens the next fence when there is need and none is open.

        While the disk takes nothing only a cut can be decided.
        """
        if self.fences.open is not None or self.failure or self.writes.is_open:
            return
        if self.writes.failure:
            if self.record is not None:
                self._cut_if_wanted(now_ms)
            return
        if self.record is None:
            self._start_if_complete(now_ms)
            return
        change = self._wanted_change(self.record)
        is_orphan_due = bool(self._orphan_clock) and now_ms >= self._orphan_due_ms
        if change or is_orphan_due:
            self._have_cut_give_way("a change of membership", now_ms)
            fence = self.fences.begin(FenceKind.MEMBERSHIP, now_ms, change=change)
            self._prepare(fence)
        elif self._is_mode_due(self.record, now_ms):
            self._have_cut_give_way("a change of mode", now_ms)
            target = self.wanted_mode
            self._prepare(self.fences.begin(FenceKind.MODE, now_ms, target=target))
        else:
            self._cut_if_wanted(now_ms)

    def decide(self, now_ms: int) -> None:
        """All shards have reported: ends the fence by a record or a cut."""
        fence = self.fences.open
        assert fence is not None
        if self.record is not None:
            self.is_resumed |= has_resumed(self.record, fence.reports.values())
        reason = self._undecidable(fence, now_ms)
        if reason:
            self.abort(reason, now_ms)
            return
        fence.update = self.update
        absent = self.roster.in_state(WorkerState.SUSPECT, WorkerState.LOST)
        fence.absent = frozenset(entry.worker for entry in absent)
        if fence.kind is FenceKind.CUT:
            self.fences.end()
            self._decide_cut(fence, now_ms)
            self.pump(now_ms)
            return
        if self.record is None:
            record = first_record(fence, self.settings)
        elif fence.kind is FenceKind.MODE:
            record = mode_record(fence, self.record)
        else:
            record = membership_record(fence, self.record, self.settings)
        self._keep_record(fence, record, now_ms)

    def abort(self, reason: str, now_ms: int) -> None:
        """Ends the open fence on every shard without a record."""
        fence = self.fences.end()
        self.effects.append(Abort(fence_number=fence.number, reason=reason))
        if fence.kind is FenceKind.CUT:
            self.fail_cut(reason, now_ms)
        self.pump(now_ms)

    def fail_load(self, shard_index: int, reason: str, now_ms: int) -> None:
        """A shard can't load the checkpoint of the start, which is tried again later.

        What is wrong may be mended meanwhile, such as a folder that a machine has not
        mounted, or there may be an older one that all can load.
        """
        assert self.start_point is not None
        self.load_failure = f"shard {shard_index} to load {self.start_point}: {reason}"
        self._load_due_ms = now_ms + LOAD_RETRY_MS
        self.abort(f"waiting for {self.load_failure}", now_ms)
        self.effects.append(
            ReplaceStartPoint(start_point=self.start_point, reason=self.load_failure)
        )

    def end_overdue(self, now_ms: int) -> None:
        fence = self.fences.open
        if (
            fence is not None
            and fence.kind is not FenceKind.START
            and now_ms - fence.opened_ms >= self.settings.fence_timeout_ms
        ):
            silent = fence.silent_shards(self.settings.shard_count)
            names = ", ".join(f"shard {index}" for index in silent)
            self.abort(f"no report from {names}", now_ms)
        pending = self.decided_cut
        if pending is not None and now_ms - pending.decided_ms >= self._cut_timeout_ms:
            self.fail_cut("it was not complete in time on every shard", now_ms)
        elif pending is not None and (lost := self._stuck_of(pending.open_pushes)):
            self._stuck_pushes = frozenset(lost)
            self._fail_stuck_cut(lost, now_ms)
        if late := self.checkpoints.late_state(now_ms):
            self.take_state(late, b"")
        if self.checkpoints.is_overdue(now_ms):
            self.fail_checkpoint("it was not written in time", now_ms)

    def withdraw(self, entry: WorkerEntry, now_ms: int) -> None:
        """Ends a worker that is no member."""
        entry.end(WorkerState.LEFT, now_ms)
        entry.broken_ms = None
        self.ledger.retire(entry.worker)
        fence = self.fences.open
        if fence is not None and fence.brings_in(entry.worker):
            self.abort(f"{entry.worker} was lost before it was a member", now_ms)

    def return_to(self, saved: SavedJob, reason: str, now_ms: int) -> None:
        """Ends the membership of all, and starts again from a checkpoint.

        For shards that have no values any more. Generations go on from here.
        """
        before = self.start_point
        newest = self.record or before
        assert newest is not None, "what has begun nowhere returns nowhere"
        epochs = saved.copied_epochs()
        participation_count = carried_over(self.ledger.participation_count, epochs)
        point = replace(
            saved.point,
            generation=newest.generation,
            incarnation_floor=before.incarnation_floor if before is not None else 0,
            participation_count_before=participation_count,
        )
        if self.fences.open is not None:
            self.fences.end()  # no shard goes on in it
        if self.checkpoints.is_unwritten:
            self.fail_checkpoint("its shards were lost", now_ms)

        def begin() -> None:
            self.record, self.start_point = None, point
            self.model = JobModel(saved.terms)
            self.ledger.return_to(epochs, participation_count)
            members = self.roster.in_state(WorkerState.MEMBER)
            self._rejoining = frozenset(e.worker.worker_id for e in members)
            self._rejoining_until_ms = now_ms + self.settings.lease_ttl_ms
            self.load_failure, self._load_due_ms = "", 0
            self.roster.end_members(f"the job has returned to {point}", now_ms)
            self.shards.vacate()
            self.snapshots.drop_all()
            self.first = self.wanted_mode = self._mode_due_ms = None
            self._orphan_clock = 0
            self._is_cut_stuck = self.is_resumed = False
            self.events.add(
                EventKind.JOB_REWOUND,
                f"The job returns to {point}: {reason}",
                now_ms,
                clock=point.clock,
            )
            self.effects.append(ReturnToCheckpoint(start_point=point, reason=reason))

        self.keep(
            Persist(
                start_point=point,
                terms=saved.terms,
                epochs=epochs,
                enrolments=(),
                shards=tuple(
                    ShardSlot(slot.index, incarnation=slot.incarnation)
                    for slot in self.shards.slots
                ),
            ),
            now_ms,
            then=begin,
        )

    @property
    def _cut_timeout_ms(self) -> int:
        """Longest time from the decision of a cut to the last copy of it."""
        terms = self.model.terms
        byte_count = 0 if terms is None else terms.byte_count
        return self.settings.cut_timeout_ms + byte_count // COPIED_BYTES_PER_MS

    @property
    def decided_cut(self) -> SnapshotEntry | PendingCheckpoint | None:
        """The cut that some shard has still to copy: of all purposes, one at most."""
        return self.snapshots.pending or self.checkpoints.copying

    def fail_cut(self, reason: str, now_ms: int) -> None:
        """Gives a cut up, and frees its images."""
        if self.checkpoints.is_in_cut:
            self.fail_checkpoint(reason, now_ms)
            return
        snapshot_id = self.snapshots.fail(reason)
        if snapshot_id is not None:
            self.effects.append(ReleaseImage(snapshot_id=snapshot_id))

    def fail_checkpoint(self, reason: str, now_ms: int) -> None:
        """Gives the checkpoint up that is being made."""
        self._release_copies(self.checkpoints.fail(reason, now_ms))
        self.events.add(
            EventKind.CHECKPOINT_FAILED, f"A checkpoint has failed: {reason}", now_ms
        )
        self.effects.append(CheckpointFailed(reason=reason))

    def take_state(self, checkpoint: PendingCheckpoint, state: bytes) -> None:
        """A checkpoint waits no longer for what scripts have registered."""
        if self.checkpoints.take_state(checkpoint, state):
            self.effects.append(CommitCheckpoint(checkpoint=checkpoint))

    def free_images(self, now_ms: int) -> None:
        """Frees images that nobody reads any more."""
        for snapshot_id in self.snapshots.take_released(now_ms):
            self.effects.append(ReleaseImage(snapshot_id=snapshot_id))

    def check_alive(self) -> None:
        """Refuses what a job that has failed can't do.

        Raises:
            Refusal: `SHARD_LOST`.
        """
        if self.failure:
            raise Refusal(ErrorReason.SHARD_LOST, f"the job has failed: {self.failure}")

    def fail(self, reason: str, now_ms: int) -> None:
        """Ends the job, for everybody."""
        if not self.failure:
            self.failure = reason
            self.events.add(
                EventKind.JOB_FAILED, f"The job has failed: {reason}", now_ms
            )
            self.effects.append(EndJob(reason=reason))

    # Inside

    @property
    def _is_start_decidable(self) -> bool:
        """Whether the first record waits for nothing but the disk."""
        fence = self.fences.open
        return (
            fence is not None
            and fence.kind is FenceKind.START
            and not fence.silent_shards(self.settings.shard_count)
        )

    def _cut_if_wanted(self, now_ms: int) -> None:
        if self.decided_cut is not None:
            return
        if self.checkpoints.is_due(self.shards.version, now_ms):
            # First: readers ask all the time, and checkpoints are few.
            self.checkpoints.begin()
        elif self.checkpoints.holds_batches:
            return  # another cut would let workers go on
        elif self.snapshots.is_wanted and self.snapshots.has_room():
            self.snapshots.begin()
        else:
            return
        self._prepare(self.fences.begin(FenceKind.CUT, now_ms))

    def _start_if_complete(self, now_ms: int) -> None:
        joining = [
            e for e in self.roster.in_state(WorkerState.JOINING) if not e.cut_off
        ]
        if self.shards.missing or len(joining) < self.settings.workers_min:
            return
        if now_ms < self._load_due_ms:
            return
        ids = {entry.worker.worker_id for entry in joining}
        if now_ms < self._rejoining_until_ms and not self._rejoining <= ids:
            return
        # By id and not by arrival: data is dealt by rank, and a run shall repeat.
        starters = tuple(entry.worker for entry in joining)
        fence = self.fences.begin(
            FenceKind.START, now_ms, starters=starters, start_point=self.start_point
        )
        self._prepare(fence)
        if fence.seeder is not None:
            self.first = joining[0]
            self.effects.append(
                OrderSeed(worker=fence.seeder, fence_number=fence.number)
            )

    def _wanted_change(self, record: Record) -> MembershipChange:
        return wanted_change(
            self.roster,
            record,
            self.settings,
            is_resumed=self.is_resumed,
            is_cut_stuck=self._is_cut_stuck,
        )

    def _fail_stuck_cut(self, pushes: Iterable[WorkerSequence], now_ms: int) -> None:
        """A cut waits for pushes that nobody will send, and is given up.

        If nobody lives who would, that of a reader is made again without them. One for
        a checkpoint, which nobody waits for, costs no worker its place.
        """
        assert self.record is not None
        is_of_reader = not self.checkpoints.is_in_cut
        self.fail_cut(_stuck_text(pushes), now_ms)
        if not is_of_reader:
            return
        self._is_cut_stuck = is_deserted(self.roster, self.record)
        self.snapshots.is_wanted |= self._is_cut_stuck

    def _prepare(self, fence: ActiveFence) -> None:
        self.effects.append(Prepare.of(fence))

    def _have_cut_give_way(self, to_what: str, now_ms: int) -> None:
        """A cut that is being made ends, and is wanted again."""
        if self.checkpoints.copying is not None:
            self._release_copies(self.checkpoints.give_way())
        elif self.snapshots.pending is not None:
            self.fail_cut(f"it gave way to {to_what}", now_ms)
            self.snapshots.is_wanted = True

    def _release_copies(self, snapshot_id: int | None) -> None:
        """Frees what shards have copied, or will, for a checkpoint given up."""
        if snapshot_id is not None:
            self.snapshots.released.append(snapshot_id)
            self.effects.append(ReleaseImage(snapshot_id=snapshot_id))

    def _is_mode_due(self, record: Record, now_ms: int) -> bool:
        """Whether a mode fence is to be opened now."""
        if self.wanted_mode == record.terms:
            self.wanted_mode = None
        if self.wanted_mode is None:
            self._mode_due_ms = None
            return False
        if self._mode_due_ms is None:
            return True
        # Tried before: a cut that has begun in between is left its time, or readers
        # would get none for as long as the shards are not settled.
        return now_ms >= self._mode_due_ms and self.decided_cut is None

    def _undecidable(self, fence: ActiveFence, now_ms: int) -> str:
        """Why a fence whose reports are all in can't be decided; empty if it can."""
        if fence.kind is FenceKind.MODE and not is_settled(fence):
            self._mode_due_ms = now_ms + MODE_RETRY_MS
            return "pushes of the mode before are still to be applied"
        if self.record is not None and fence.change.evictions:
            now = self._wanted_change(self.record)
            if not set(fence.change.evictions) <= set(now.evictions):
                return "a worker that was lost is back, or too few would be left"
        return ""

    def _keep_record(self, fence: ActiveFence, record: Record, now_ms: int) -> None:
        """Has a record written with the data that it settles, then announces it.

        One that can't be written is not: the fence comes to nothing, so that training
        goes on as before. The fence of the start stays open, since the first values are
        staged by it, and nothing waits that could go on.
        """
        before = self.ledger.memento(self._epochs_at_stake(record))
        waits_for_shards = self.settings.shard_loss_policy is ShardLossPolicy.WAIT
        self._settle_data(fence, record)

        def announce() -> None:
            self.fences.end()
            self._follow(record, now_ms)
            self._note_events(record, now_ms)
            self.record = record
            self.load_failure = ""
            self._is_cut_stuck = self.is_resumed = False
            if not record.members and not record.workers_floor:
                self.checkpoints.want()  # all have left: the last one of the job
            elif record.is_start and self.start_point is None and waits_for_shards:
                self.checkpoints.want()  # it can't wait for them without one
            self._note_orphan(fence, record, now_ms)
            self.effects.append(Announce(record=record))

        def give_up() -> None:
            before.put_back()
            if fence.kind is not FenceKind.START:
                self.abort("its record can't be written", now_ms)

        ended = {end.member.worker for end in record.departures}
        self.keep(
            Persist(
                record=record,
                epochs=before.changed(),
                enrolments=self.ledger.enrolments(),
                processes={
                    worker: process_id
                    for worker, process_id in self.roster.processes.items()
                    if worker not in ended
                },
            ),
            now_ms=now_ms,
            undo=give_up,
            then=announce,
        )

    def _epochs_at_stake(self, record: Record) -> list[EpochLedger]:
        ended = [end.member.worker for end in record.departures]
        return [
            each
            for each in self.ledger.epochs()
            if record.is_start
            or not each.is_closed
            or any(each.has_of(worker) for worker in ended)
        ]

    def _settle_data(self, fence: ActiveFence, record: Record) -> None:
        """Brings the ledger in line with a record."""
        for end in record.departures:
            worker = end.member.worker
            if self.record is not None and self.record.member_of(worker):
                heir = heir_of(end, record, self.settings)
                reports = fence.reports.values()
                self.ledger.settle(end, reports, record.commit, heir=heir)
        if fence.start_point is not None:
            self.ledger.pass_on(fence.starters)
        for member in record.members:
            entry = self.roster.find(member.worker)
            if entry is not None and entry.state is WorkerState.JOINING:
                self.ledger.enroll(member.worker, entry.loaders)
        if fence.kind is FenceKind.MODE and not record.mode.rules.deals_rounds:
            self.ledger.recall()

    def _follow(self, record: Record, now_ms: int) -> None:
        """Brings the roster in line with a record."""
        for end in record.departures:
            worker = end.member.worker
            entry = self.roster.find(worker)
            if entry is not None:
                state = WorkerState.EVICTED if end.evicted else WorkerState.LEFT
                entry.end(state, now_ms)
            if self.record is not None and self.record.member_of(worker):
                self.evicted_count += end.evicted
        for member in record.members:
            entry = self.roster.find(member.worker)
            if entry is not None and entry.state is WorkerState.JOINING:
                # Its stream may have broken while the fence was open.
                entry.state = (
                    WorkerState.MEMBER if entry.is_watching else WorkerState.SUSPECT
                )

    def _note_events(self, record: Record, now_ms: int) -> None:
        """Notes what a record changes, which is not the newest one yet."""
        before, add = self.record, self.events.add
        if before is None:
            self.started_ms = now_ms
            start = self.start_point
            add(
                EventKind.JOB_STARTED,
                "The job has started"
                if start is None
                else f"The job goes on from {start}",
                now_ms,
                clock=record.mode_clock,
            )
        elif record.terms != before.terms:
            add(
                EventKind.MODE_CHANGED,
                f"The mode is {record.terms} now",
                now_ms,
                clock=record.change_clock,
            )
        joining = {member.worker.worker_id for member in record.members}
        replaced = set()
        for end in record.departures:
            worker_id = end.member.worker.worker_id
            if before is None or before.member_of(end.member.worker) is None:
                continue  # an earlier record has ended it, and is in it again
            kind, what = EventKind.WORKER_LEFT, "has left"
            if end.evicted and worker_id in joining:
                kind, what = EventKind.WORKER_REPLACED, "is replaced by a new start"
                replaced.add(worker_id)
            elif end.evicted:
                kind, what = EventKind.WORKER_EVICTED, "is evicted"
                entry = self.roster.find(end.member.worker)
                if entry is not None and entry.cut_off:
                    what += f", since it {entry.cut_off}"
            add(
                kind,
                f"{worker_id} {what}",
                now_ms,
                worker_id=worker_id,
                clock=end.last_clock,
            )
        for member in record.members:
            worker_id = member.worker.worker_id
            is_new = before is None or before.member_of(member.worker) is None
            if is_new and worker_id not in replaced:
                add(
                    EventKind.WORKER_JOINED,
                    f"{worker_id} has joined",
                    now_ms,
                    worker_id=worker_id,
                    clock=member.base_clock,
                )
        if not record.members and not record.workers_floor:
            clocks = [end.last_clock for end in record.departures]
            add(
                EventKind.JOB_FINISHED,
                "The job is finished: all of its workers have left",
                now_ms,
                clock=max(clocks, default=None),
            )

    def _note_orphan(self, fence: ActiveFence, record: Record, now_ms: int) -> None:
        """Finds a clock that only another record can commit, with its scale.

        Shards measure it under this record. One that is not there yet has an earlier
        clock to apply first, and is asked again after a pause.
        """
        if not fence.update.is_measured:
            return
        clock = orphaned_clock(record)
        applied = min((r.applied_clock for r in fence.reports.values()), default=0)
        if clock <= applied:
            clock = 0
        is_repeated = clock == self._orphan_clock
        self._orphan_clock = clock
        self._orphan_due_ms = now_ms + ORPHAN_RETRY_MS if is_repeated else now_ms

    def _decide_cut(self, fence: ActiveFence, now_ms: int) -> None:
        assert self.record is not None
        if self.checkpoints.is_cutting:
            self._decide_checkpoint(fence, now_ms)
            return
        cut = cut_after(self.record, fence.reports.values())
        generation = self.record.generation
        if self.snapshots.is_newest(cut):
            self.snapshots.still_newest(generation)
            self.effects.append(
                Abort(fence_number=fence.number, reason="nothing changed")
            )
            return
        lacking, stuck = self._open_pushes(cut, fence)
        if stuck:
            reason = _stuck_text(stuck)
            self.effects.append(Abort(fence_number=fence.number, reason=reason))
            self._fail_stuck_cut(stuck, now_ms)
            return
        if not self.snapshots.has_room():
            # Somebody has begun to read the one that was to make room.
            self.snapshots.is_wanted = True
            self.effects.append(
                Abort(fence_number=fence.number, reason="both images are being read")
            )
            return
        spare = self.snapshots.make_room()
        if spare is not None:
            self.effects.append(ReleaseImage(snapshot_id=spare))
        entry = self.snapshots.decide(
            cut, generation=generation, now_ms=now_ms, open_pushes=lacking
        )
        self.effects.append(
            DecideCut(
                fence_number=fence.number,
                snapshot_id=entry.snapshot_id,
                clock=cut.clock,
                sequences=cut.sequences,
            )
        )

    def _decide_checkpoint(self, fence: ActiveFence, now_ms: int) -> None:
        """Decides a cut for a checkpoint, with all that the coordinator adds to it.

        Shards are frozen, and nothing beyond the cut is acknowledged: the
        ledger is what it is to be but for pushes that nobody has reported yet.
        """
        assert self.record is not None
        assert self.model.terms is not None, "a job that has started has a model"
        reports = fence.reports.values()
        cut = cut_after(self.record, reports)
        within: tuple[WorkerKey, ...] = ()
        if self._steps_again(reports):
            cut = cut_between_batches(self.record, reports)
            within = self._within_batches(cut, reports)
        lacking, stuck = self._open_pushes(cut, fence)
        reason = ""
        floors: tuple[WorkerSequence, ...] = ()
        if self.checkpoints.is_newest(cut):
            reason = "nothing changed"
            self.checkpoints.still_newest(now_ms)
        elif stuck:
            reason = _stuck_text(stuck)
            self._fail_stuck_cut(stuck, now_ms)
        elif is_premature(cut, self.record, reports):
            reason = "pushes that are not in the cut count already"
            if self.checkpoints.postpone(now_ms) >= self.settings.cut_timeout_ms:
                self.fail_checkpoint(reason, now_ms)
        elif within:
            reason = _within_text(within)
            floors = batch_floors(cut, self.record)
            tried_ms = self.checkpoints.postpone(now_ms, holds_batches=True)
            if tried_ms >= self.settings.cut_timeout_ms:
                floors = ()
                self.fail_checkpoint(reason, now_ms)
        if reason:
            self.effects.append(
                Abort(fence_number=fence.number, reason=reason, batch_floors=floors)
            )
            return
        pending = PendingCheckpoint(
            snapshot_id=self.snapshots.take_id(),
            cut=cut,
            record=self.record,
            terms=self.model.terms,
            ledger=self.ledger.copy(),
            incarnations=dict(self.roster.incarnations),
            open_pushes=lacking,
            decided_ms=now_ms,
        )
        self.checkpoints.decide(pending)
        self.effects.append(
            DecideCut(
                fence_number=fence.number,
                snapshot_id=pending.snapshot_id,
                clock=cut.clock,
                sequences=cut.sequences,
                purpose=CutPurpose.CHECKPOINT,
            )
        )

    def _steps_again(self, reports: Collection[FenceReport]) -> bool:
        """Whether scripts step more than once on a batch, or are about to."""
        assert self.model.terms is not None
        return len(self.model.terms.optimizers) > 1 or any(
            holding.steps_again for report in reports for holding in report.holdings
        )

    def _within_batches(
        self, cut: Cut, reports: Collection[FenceReport]
    ) -> tuple[WorkerKey, ...]:
        """Workers in the middle of a batch that they may go on with."""
        lost = {entry.worker for entry in self.roster.in_state(WorkerState.LOST)}
        return tuple(w for w in within_batches(cut, reports) if w not in lost)

    def _open_pushes(
        self, cut: Cut, fence: ActiveFence
    ) -> tuple[tuple[WorkerSequence, ...], list[WorkerSequence]]:
        """Pushes of a cut that only their senders can complete.

        Shards apply nothing beyond a cut, so that in SSP and ASP one which waits for a
        lost worker would stop all others, whom nothing else stops.

        Returns:
            All of them, and those of lost workers.
        """
        assert self.record is not None
        reports = tuple(fence.reports.values())
        if self.record.mode.rules.is_clocked:
            found = open_pushes(cut, reports, is_two_phase=False)
            return found, self._stuck_of(found)
        is_two_phase = self.settings.step_atomicity is StepAtomicity.CLOCK
        certain = open_pushes(cut, reports, is_two_phase=False)
        found = open_pushes(cut, reports, is_two_phase=is_two_phase)
        known = (push for push in found if push in self._stuck_pushes)
        return found, self._lost_of({*certain, *known})

    def _stuck_of(self, pushes: Iterable[WorkerSequence]) -> list[WorkerSequence]:
        """Pushes that a cut must not wait for: of lost workers.

        In BSP a lost worker holds its clock up whether there is a cut or not, and only
        when nobody lives does the cut have a way without it.
        """
        assert self.record is not None
        is_clocked = self.record.mode.rules.is_clocked
        if is_clocked and not is_deserted(self.roster, self.record):
            return []
        return self._lost_of(pushes)

    def _lost_of(self, pushes: Iterable[WorkerSequence]) -> list[WorkerSequence]:
        lost = {entry.worker for entry in self.roster.in_state(WorkerState.LOST)}
        return sorted(push for push in pushes if push[0] in lost)


def _within_text(workers: Iterable[WorkerKey]) -> str:
    names = ", ".join(map(str, workers))
    return f"{names} may step again on its batch: a checkpoint is cut between batches"


def _stuck_text(pushes: Iterable[WorkerSequence]) -> str:
    names = ", ".join(str(worker) for worker, _ in pushes)
    return (
        f"{names} was lost in the middle of a push: nothing can be cut before it is "
        "back, replaced or evicted"
    )
