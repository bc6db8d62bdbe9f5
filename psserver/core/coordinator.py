"""The coordinator of one job: membership, fences, cuts, the data ledger.

Pure; see the package. Never in the path of a step: what it decides reaches shards
and workers as records.
"""

from psserver.core.coordinator_effects import (
    Abort,
    Announce,
    CoordinatorEffect,
    DecideCut,
    EndJob,
    OrderSeed,
    Persist,
    Prepare,
    ReleaseImage,
    SchemaFixed,
)
from psserver.core.effects import FenceReport
from psserver.core.fence import (
    ActiveFence,
    cut_clock,
    first_record,
    membership_record,
)
from psserver.core.fence_series import NUMBERS_PER_START, FenceSeries
from psserver.core.job_model import JobModel
from psserver.core.job_settings import JobPhase, JobSettings
from psserver.core.ledger import DataLedger, EpochLedger
from psserver.core.push import DataRange
from psserver.core.record import FenceKind, Mode, Record, WorkerKey
from psserver.core.roster import GONE, Roster, WorkerEntry, WorkerState
from psserver.core.shard_map import ShardMap, ShardSlot
from psserver.core.snapshots import SnapshotList
from pswire.reasons import ErrorReason, Refusal
from pswire.schema import ModelSchema, OptimizerSpec


class CoordinatorCore:
    """State of one job.

    Args:
        settings: The job's settings.
        start_count: Starts of the job's coordinator before this one.

    Attributes:
        settings: The job's settings.
        shards: The shard map.
        roster: All workers.
        model: What the job trains.
        ledger: Data of all epochs.
        snapshots: Cuts and their images.
        record: Newest record, None before the start.
        failure: Why the job can't go on, empty while it can.
    """

    def __init__(self, settings: JobSettings, start_count: int = 0) -> None:
        self.settings = settings
        self.shards = ShardMap(settings.shard_count)
        self.roster = Roster()
        self.model = JobModel()
        self.ledger = DataLedger(settings.job_seed)
        self.snapshots = SnapshotList(
            shard_count=settings.shard_count,
            pin_ttl_ms=settings.pin_ttl_ms,
            first_id=start_count * NUMBERS_PER_START + 1,
        )
        self.record: Record | None = None
        self.failure = ""
        self._fences = FenceSeries(start_count)
        self._effects: list[CoordinatorEffect] = []

    def take_effects(self) -> list[CoordinatorEffect]:
        """Effects since the last call, in order."""
        taken, self._effects = self._effects, []
        return taken

    @property
    def phase(self) -> JobPhase:
        """Where the job stands."""
        if self.failure:
            return JobPhase.FAILED
        if self.record is None:
            return JobPhase.SEEDING if self.fence else JobPhase.WAITING
        joining = self.roster.in_state(WorkerState.JOINING)
        return JobPhase.RUNNING if self.record.members or joining else JobPhase.FINISHED

    @property
    def fence(self) -> ActiveFence | None:
        """The fence that is open."""
        return self._fences.open

    @property
    def fence_closed_number(self) -> int:
        """Newest fence that is over, as all of an earlier process are."""
        return self._fences.closed_number

    def restore(
        self,
        *,
        schema: ModelSchema | None,
        optimizers: tuple[OptimizerSpec, ...],
        record: Record | None,
        incarnations: dict[str, int],
        processes: dict[str, str],
        now_ms: int,
    ) -> None:
        """Goes on from durable state after a restart.

        No member is lost before a lease has passed, so that all may come back. A
        worker that was not yet a member connects again: it has nothing to lose.
        """
        if schema is not None:
            self.model.agree(schema, optimizers)
        self.record = record
        self.roster = Roster(incarnations)
        if record is None:
            return
        for end in record.departures:
            if not end.evicted:
                self.roster.restore_left(end.member.worker)
        for member in record.members:
            self.roster.restore(
                member.worker,
                processes.get(member.worker.worker_id, ""),
                now_ms + self.settings.lease_ttl_ms,
            )

    def restore_ledger(self, epochs: tuple[EpochLedger, ...]) -> None:
        """Goes on with the data of all epochs, after `restore`."""
        members = self.record.members if self.record is not None else ()
        self.ledger.restore(epochs, frozenset(member.worker for member in members))

    # Shards

    def register_shard(
        self, *, process_id: str, address: str, now_ms: int
    ) -> ShardSlot:
        """Gives a shard its place.

        Raises:
            Refusal: `SHARD_UNKNOWN` or `SHARD_LOST`; no state changed.
        """
        self._check_alive()
        return self.shards.register(
            process_id=process_id,
            address=address,
            can_replace=self.record is None,
            now_ms=now_ms,
        )

    def shard_watching(self, slot: ShardSlot, now_ms: int) -> None:
        """A shard's stream is open; its owner has sent it the whole state."""
        slot.is_watching = True
        slot.broken_ms = None
        slot.heard_ms = now_ms
        self._pump(now_ms)

    def shard_broken(self, slot: ShardSlot, now_ms: int) -> None:
        """A shard's stream broke."""
        slot.is_watching = False
        slot.broken_ms = now_ms
        slot.heard_ms = now_ms
        pending = self.snapshots.pending
        if self.record is None and self.fence is not None:
            self._abort(f"shard {slot.index} was lost before the start", now_ms)
        elif pending is not None and slot.index not in pending.ready:
            # The decision may be lost with the connection.
            self._fail_cut(f"the connection to shard {slot.index} broke")
            self._pump(now_ms)

    def report_fence(self, slot: ShardSlot, report: FenceReport, now_ms: int) -> None:
        """Takes a shard's report; decides when it is the last one."""
        slot.heard_ms = now_ms
        fence = self.fence
        if fence is None or fence.number != report.fence_number:
            return
        fence.reports[slot.index] = report
        if not fence.silent_shards(self.settings.shard_count):
            self._decide(self._fences.end(), now_ms)
            self._pump(now_ms)

    def report_cut(
        self, slot: ShardSlot, snapshot_id: int, failure: str, now_ms: int
    ) -> None:
        """A shard has its image, or says why not."""
        slot.heard_ms = now_ms
        pending = self.snapshots.pending
        if failure:
            if pending is not None and pending.snapshot_id == snapshot_id:
                self._fail_cut(f"shard {slot.index}: {failure}")
        elif not self.snapshots.copied(snapshot_id, slot.index):
            self._effects.append(ReleaseImage(snapshot_id=snapshot_id))
        self._pump(now_ms)

    # Workers

    def register_worker(
        self, *, process_id: str, worker_id: str, address: str, now_ms: int
    ) -> WorkerEntry:
        """Gives a worker its identity.

        Raises:
            Refusal: `WORKER_ID_TAKEN`, `MALFORMED_MESSAGE` or `SHARD_LOST`; no state
                changed.
        """
        self._check_alive()
        return self.roster.register(
            process_id=process_id, worker_id=worker_id, address=address, now_ms=now_ms
        )

    def worker_watching(self, entry: WorkerEntry, now_ms: int) -> None:
        """A worker's stream is open; its owner has sent it the whole state.

        Raises:
            Refusal: `WORKER_INCARNATION_STALE` when it was lost before it joined, or
                has left; no state changed.
        """
        self.check_present(entry)
        entry.is_watching = True
        entry.broken_ms = None
        entry.heard_ms = now_ms
        if entry.state is WorkerState.SUSPECT:
            entry.state = WorkerState.MEMBER
        fence = self.fence
        if fence is not None and fence.seeder == entry.worker:
            self._effects.append(
                OrderSeed(worker=entry.worker, fence_number=fence.number)
            )

    def worker_broken(self, entry: WorkerEntry, now_ms: int) -> None:
        """A worker's stream broke: it is suspect until the grace is over."""
        entry.is_watching = False
        entry.broken_ms = now_ms
        entry.heard_ms = now_ms
        if entry.state is WorkerState.MEMBER:
            entry.state = WorkerState.SUSPECT

    @staticmethod
    def check_present(entry: WorkerEntry) -> None:
        """Refuses a start of a worker that is over.

        Raises:
            Refusal: `WORKER_INCARNATION_STALE`; no state changed.
        """
        if entry.state in GONE:
            raise Refusal(
                ErrorReason.WORKER_INCARNATION_STALE,
                f"{entry.worker} has left, or was lost",
                worker_id=entry.worker.worker_id,
            )

    def join(
        self,
        entry: WorkerEntry,
        *,
        schema: ModelSchema,
        optimizers: tuple[OptimizerSpec, ...],
        loaders: tuple[str, ...],
        now_ms: int,
    ) -> None:
        """A worker has completed `prepare` and asks to become a member.

        Raises:
            Refusal: `SCHEMA_MISMATCH`, `OPTIMIZER_MISMATCH`, `SHARD_LOST` or
                `WORKER_INCARNATION_STALE`; no state changed.
        """
        self._check_alive()
        self.check_present(entry)
        if entry.state is not WorkerState.REGISTERED:
            return
        if self.model.agree(schema, optimizers):
            self._effects.append(SchemaFixed())
        entry.loaders = loaders
        entry.state = WorkerState.JOINING
        self._pump(now_ms)

    def leave(
        self,
        entry: WorkerEntry,
        *,
        sequence: int,
        consumed: tuple[DataRange, ...],
        now_ms: int,
    ) -> None:
        """A worker ends its membership after push `sequence`."""
        self.ledger.consume(entry.worker, consumed)
        if entry.state in (WorkerState.MEMBER, WorkerState.SUSPECT):
            entry.state = WorkerState.LEAVING
            entry.last_sequence = sequence
        elif entry.state in (WorkerState.REGISTERED, WorkerState.JOINING):
            self._withdraw(entry, now_ms)
        self._pump(now_ms)

    # Snapshots and data

    def want_cut(self, now_ms: int) -> int:
        """A reader wants a cut that begins after this call.

        Returns:
            The value of `snapshots.finished_cut_count` from which on the newest
            snapshot is what the reader wants.

        Raises:
            Refusal: `NOT_STARTED` or `SHARD_LOST`; no state changed.
        """
        self._check_alive()
        if self.record is None:
            raise Refusal(
                ErrorReason.NOT_STARTED,
                f"there are no values yet: the job waits for {self.waiting_for()}",
            )
        fence = self.fence
        wanted = self.snapshots.want(
            is_cutting=fence is not None and fence.kind is FenceKind.CUT
        )
        self._pump(now_ms)
        return wanted

    def release_snapshot(self, snapshot_id: int, pin_id: int, now_ms: int) -> None:
        """A reader is done with a snapshot; the next cut need not wait for it."""
        self.snapshots.unpin(snapshot_id, pin_id)
        self._free_images(now_ms)
        self._pump(now_ms)

    def participants(self, loader: str) -> tuple[WorkerKey, ...]:
        """Members that lease data for a loader, in the order of ranks.

        Empty outside BSP, where data is dealt on demand.
        """
        if self.record is None or self.record.mode is not Mode.BSP:
            return ()
        enrolled = self.ledger.participants(loader)
        return tuple(m.worker for m in self.record.members if m.worker in enrolled)

    # Time

    def tick(self, now_ms: int) -> None:
        """Does what has become due."""
        self._end_overdue(now_ms)
        for entry in self.roster.lost(
            now_ms,
            grace_ms=self.settings.reconnect_grace_ms,
            lease_ttl_ms=self.settings.lease_ttl_ms,
        ):
            if entry.state is WorkerState.SUSPECT:
                entry.state = WorkerState.EVICTED
            else:
                self._withdraw(entry, now_ms)
        if self.record is not None:
            # Losing a shard ends the job, so it gets half a lease to come back.
            for slot in self.shards.lost(now_ms, self.settings.lease_ttl_ms // 2):
                self._fail(f"shard {slot.index} at {slot.address} was lost")
        self._free_images(now_ms)
        self._pump(now_ms)

    def waiting_for(self) -> str:
        """Whom the job waits for, in words; empty when for nobody."""
        parts = [f"shard {slot.index}" for slot in self.shards.missing]
        if self.record is None:
            joining = len(self.roster.in_state(WorkerState.JOINING))
            if joining < self.settings.workers_min:
                parts.append(
                    f"workers ({joining} of {self.settings.workers_min} prepared)"
                )
            elif self.fence is not None and self.fence.seeder is not None:
                parts.append(f"the first values from {self.fence.seeder.worker_id}")
        return ", ".join(parts)

    # Inside

    def _check_alive(self) -> None:
        if self.failure:
            raise Refusal(ErrorReason.SHARD_LOST, f"the job has failed: {self.failure}")

    def _end_overdue(self, now_ms: int) -> None:
        """Ends a fence or a cut that has taken too long."""
        fence = self.fence
        if (
            fence is not None
            and fence.kind is not FenceKind.START
            and now_ms - fence.opened_ms >= self.settings.fence_timeout_ms
        ):
            silent = fence.silent_shards(self.settings.shard_count)
            names = ", ".join(f"shard {index}" for index in silent)
            self._abort(f"no report from {names}", now_ms)
        pending = self.snapshots.pending
        if (
            pending is not None
            and now_ms - pending.decided_ms >= self.settings.cut_timeout_ms
        ):
            self._fail_cut("the clock of the cut was not complete in time")

    def _withdraw(self, entry: WorkerEntry, now_ms: int) -> None:
        """Takes out a worker that is no member."""
        entry.state = WorkerState.LEFT
        entry.broken_ms = None
        self.ledger.retire(entry.worker)
        fence = self.fence
        if fence is not None and fence.brings_in(entry.worker):
            self._abort(f"{entry.worker} was lost before it was a member", now_ms)

    def _pump(self, now_ms: int) -> None:
        """Opens the next fence when there is need and none is open."""
        if self.fence is not None or self.failure:
            return
        if self.record is None:
            self._start_if_complete(now_ms)
            return
        change = self.roster.pending_change(self.record)
        if change:
            if self.snapshots.pending is not None:
                self._fail_cut("it gave way to a change of membership")
                self.snapshots.is_wanted = True
            fence = self._fences.begin(FenceKind.MEMBERSHIP, now_ms, change=change)
            self._prepare(fence)
        elif self.snapshots.is_wanted and self.snapshots.has_room():
            self.snapshots.begin()
            self._prepare(self._fences.begin(FenceKind.CUT, now_ms))

    def _start_if_complete(self, now_ms: int) -> None:
        joining = self.roster.in_state(WorkerState.JOINING)
        if self.shards.missing or len(joining) < self.settings.workers_min:
            return
        # By id and not by arrival: data is dealt by rank, and a run shall repeat.
        starters = tuple(entry.worker for entry in joining)
        fence = self._fences.begin(FenceKind.START, now_ms, starters=starters)
        self._prepare(fence)
        self._effects.append(OrderSeed(worker=starters[0], fence_number=fence.number))

    def _prepare(self, fence: ActiveFence) -> None:
        self._effects.append(
            Prepare(fence_number=fence.number, kind=fence.kind, seeder=fence.seeder)
        )

    def _decide(self, fence: ActiveFence, now_ms: int) -> None:
        if fence.kind is FenceKind.CUT:
            self._decide_cut(fence, now_ms)
            return
        if self.record is None:
            template = Record(
                fence_number=0,
                generation=0,
                kind=FenceKind.START,
                members=(),
                mode=self.settings.mode,
                staleness_bound=self.settings.staleness_bound,
            )
            record = first_record(fence, template)
        else:
            record = membership_record(fence, self.record)
        self.record = record
        self._effects.append(Persist(record=record))
        self._effects.append(Announce(record=record))
        self._follow(record)

    def _follow(self, record: Record) -> None:
        """Brings the roster and the ledger in line with a record."""
        for end in record.departures:
            entry = self.roster.find(end.member.worker)
            if entry is not None and entry.state is not WorkerState.EVICTED:
                entry.state = WorkerState.LEFT
            self.ledger.retire(end.member.worker)
        for member in record.members:
            entry = self.roster.find(member.worker)
            if entry is not None and entry.state is WorkerState.JOINING:
                entry.state = WorkerState.MEMBER
                self.ledger.enroll(member.worker, entry.loaders)

    def _decide_cut(self, fence: ActiveFence, now_ms: int) -> None:
        assert self.record is not None
        clock = cut_clock(fence.reports.values())
        version = self.record.version_at(clock)
        generation = self.record.generation
        if self.snapshots.is_newest(version=version, clock=clock):
            self.snapshots.still_newest(generation)
            self._effects.append(
                Abort(fence_number=fence.number, reason="nothing changed")
            )
            return
        entry = self.snapshots.decide(
            version=version, clock=clock, generation=generation, now_ms=now_ms
        )
        self._effects.append(
            DecideCut(
                fence_number=fence.number, snapshot_id=entry.snapshot_id, clock=clock
            )
        )

    def _free_images(self, now_ms: int) -> None:
        for snapshot_id in self.snapshots.take_released(now_ms):
            self._effects.append(ReleaseImage(snapshot_id=snapshot_id))

    def _fail_cut(self, reason: str) -> None:
        snapshot_id = self.snapshots.fail(reason)
        if snapshot_id is not None:
            self._effects.append(ReleaseImage(snapshot_id=snapshot_id))

    def _abort(self, reason: str, now_ms: int) -> None:
        fence = self._fences.end()
        self._effects.append(Abort(fence_number=fence.number, reason=reason))
        if fence.kind is FenceKind.CUT:
            self._fail_cut(reason)
        self._pump(now_ms)

    def _fail(self, reason: str) -> None:
        if not self.failure:
            self.failure = reason
            self._effects.append(EndJob(reason=reason))
