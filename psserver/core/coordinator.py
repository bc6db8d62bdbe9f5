"""The coordinator of one job: membership, fences, cuts, the data ledger.

Pure; see the package. Never in the path of a step: what it decides reaches shards
and workers as records.
"""

from dataclasses import dataclass
from enum import Enum

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
    MembershipChange,
    cut_clock,
    first_record,
    membership_record,
)
from psserver.core.job_model import JobModel
from psserver.core.ledger import DataLedger
from psserver.core.push import DataRange
from psserver.core.record import FenceKind, Mode, Record, WorkerKey
from psserver.core.roster import Roster, WorkerEntry, WorkerState
from psserver.core.shard_map import ShardMap, ShardSlot
from psserver.core.snapshots import SnapshotList
from pswire.reasons import ErrorReason, Refusal
from pswire.schema import ModelSchema, OptimizerSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSettings:
    """Settings of a job, fixed when its coordinator starts.

    Attributes:
        job_id: Unique name of the job.
        shard_count: Shards it has.
        mode: How workers keep together.
        staleness_bound: Largest staleness in SSP, in clocks.
        workers_min: Workers that must be there before the first clock.
        lease_ttl_ms: Bound on the detection of a lost process.
        reconnect_grace_ms: Time in which a broken stream may come back.
        fence_timeout_ms: Time in which every shard must report to a fence.
        cut_timeout_ms: Time in which a decided cut must be copied.
        pin_ttl_ms: Time for which a reader may read a snapshot.
        job_seed: From which the seeds of all epochs follow.
    """

    job_id: str
    shard_count: int
    mode: Mode = Mode.BSP
    staleness_bound: int = 0
    workers_min: int = 1
    lease_ttl_ms: int = 10_000
    reconnect_grace_ms: int = 500
    fence_timeout_ms: int = 2_000
    cut_timeout_ms: int = 30_000
    pin_ttl_ms: int = 30_000
    job_seed: int = 0


class JobPhase(Enum):
    """Stage of a job; mirrors `pswire.v1.JobPhase`."""

    WAITING = 1
    SEEDING = 2
    RUNNING = 3
    FINISHED = 4
    FAILED = 5


class CoordinatorCore:
    """State of one job.

    Attributes:
        settings: The job's settings.
        shards: The shard map.
        roster: All workers.
        model: What the job trains.
        ledger: Data of all epochs.
        snapshots: Cuts and their images.
        record: Newest record, None before the start.
        failure: Why the job can't go on, empty while it can.
        fence_closed_number: Newest fence that is over.
    """

    def __init__(self, settings: JobSettings) -> None:
        self.settings = settings
        self.shards = ShardMap(settings.shard_count)
        self.roster = Roster()
        self.model = JobModel()
        self.ledger = DataLedger(settings.job_seed)
        self.snapshots = SnapshotList(
            shard_count=settings.shard_count, pin_ttl_ms=settings.pin_ttl_ms
        )
        self.record: Record | None = None
        self.failure = ""
        self.fence_closed_number = 0
        self._fence: ActiveFence | None = None
        self._next_fence = 1
        self._cut_wanted = False
        self._cut_decided_ms = 0
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
            return JobPhase.SEEDING if self._fence else JobPhase.WAITING
        joining = self.roster.in_state(WorkerState.JOINING)
        return JobPhase.RUNNING if self.record.members or joining else JobPhase.FINISHED

    @property
    def fence(self) -> ActiveFence | None:
        """The fence that is open."""
        return self._fence

    def restore(
        self,
        *,
        schema: ModelSchema,
        optimizers: tuple[OptimizerSpec, ...],
        record: Record,
        incarnations: dict[str, int],
        processes: dict[str, str],
        now_ms: int,
    ) -> None:
        """Goes on from durable state after a restart.

        Nobody is lost before a lease has passed, so that all may come back.
        """
        self.model.agree(schema, optimizers)
        self.record = record
        self.fence_closed_number = record.fence_number
        self._next_fence = record.fence_number + 1
        self.roster = Roster(incarnations)
        for member in record.members:
            self.roster.restore(
                member.worker,
                processes.get(member.worker.worker_id, ""),
                now_ms + self.settings.lease_ttl_ms,
            )

    # Shards

    def register_shard(
        self, *, process_id: str, address: str, now_ms: int
    ) -> ShardSlot:
        """Gives a shard its place.

        Raises:
            Refusal: `SHARD_UNKNOWN` or `JOB_ENDED`; no state changed.
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
        if self.record is None and self._fence is not None:
            self._abort(f"shard {slot.index} was lost before the start", now_ms)

    def report_fence(self, slot: ShardSlot, report: FenceReport, now_ms: int) -> None:
        """Takes a shard's report; decides when it is the last one."""
        slot.heard_ms = now_ms
        fence = self._fence
        if fence is None or fence.number != report.fence_number:
            return
        fence.reports[slot.index] = report
        if not fence.silent_shards(self.settings.shard_count):
            self._decide(fence, now_ms)
            self._pump(now_ms)

    def report_cut(
        self, slot: ShardSlot, snapshot_id: int, failure: str, now_ms: int
    ) -> None:
        """A shard has its image, or says why not."""
        slot.heard_ms = now_ms
        if failure:
            pending = self.snapshots.pending
            if pending is not None and pending.snapshot_id == snapshot_id:
                self._fail_cut(f"shard {slot.index}: {failure}")
        else:
            self.snapshots.copied(snapshot_id, slot.index)
        self._pump(now_ms)

    # Workers

    def register_worker(
        self, *, process_id: str, worker_id: str, address: str, now_ms: int
    ) -> WorkerEntry:
        """Gives a worker its identity.

        Raises:
            Refusal: `WORKER_ID_TAKEN`, `MALFORMED_MESSAGE` or `JOB_ENDED`; no state
                changed.
        """
        self._check_alive()
        return self.roster.register(
            process_id=process_id, worker_id=worker_id, address=address, now_ms=now_ms
        )

    def worker_watching(self, entry: WorkerEntry, now_ms: int) -> None:
        """A worker's stream is open; its owner has sent it the whole state."""
        entry.is_watching = True
        entry.broken_ms = None
        entry.heard_ms = now_ms
        if entry.state is WorkerState.SUSPECT:
            entry.state = WorkerState.MEMBER
        fence = self._fence
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
            Refusal: `SCHEMA_MISMATCH`, `OPTIMIZER_MISMATCH` or `JOB_ENDED`; no state
                changed.
        """
        self._check_alive()
        if entry.state not in (WorkerState.REGISTERED, WorkerState.LEFT):
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
            self._withdraw(entry, WorkerState.LEFT, now_ms)
        self._pump(now_ms)

    # Snapshots and data

    def want_cut(self, now_ms: int) -> int:
        """A reader wants a cut that begins after this call.

        Returns:
            The value of `snapshots.finished_cut_count` from which on the newest
            snapshot is what the reader wants.

        Raises:
            Refusal: `NOT_STARTED` or `JOB_ENDED`; no state changed.
        """
        self._check_alive()
        if self.record is None:
            raise Refusal(
                ErrorReason.NOT_STARTED,
                f"there are no values yet: the job waits for {self.waiting_for()}",
            )
        under_way = self._fence is not None and self._fence.kind is FenceKind.CUT
        decided = self.snapshots.pending is not None
        self._cut_wanted = True
        wanted = self.snapshots.finished_cut_count + 1
        if under_way or decided:
            wanted += 1
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
        fence = self._fence
        if (
            fence is not None
            and fence.kind is not FenceKind.START
            and now_ms - fence.opened_ms >= self.settings.fence_timeout_ms
        ):
            silent = fence.silent_shards(self.settings.shard_count)
            names = ", ".join(f"shard {index}" for index in silent)
            self._abort(f"no report from {names}", now_ms)
        if (
            self.snapshots.pending is not None
            and now_ms - self._cut_decided_ms >= self.settings.cut_timeout_ms
        ):
            self._fail_cut("the clock of the cut was not complete in time")
        for entry in self.roster.in_state(
            WorkerState.REGISTERED, WorkerState.JOINING, WorkerState.SUSPECT
        ):
            grace_ms = self.settings.reconnect_grace_ms
            if entry.broken_ms is not None and now_ms - entry.broken_ms >= grace_ms:
                self._lose_worker(entry, now_ms)
        for slot in self.shards.slots:
            # Losing a shard ends the job, so it gets half a lease to come back.
            grace_ms = self.settings.lease_ttl_ms // 2
            broken_ms = slot.broken_ms if self.record is not None else None
            if broken_ms is not None and now_ms - broken_ms >= grace_ms:
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
            elif self._fence is not None and self._fence.seeder is not None:
                parts.append(f"the first values from {self._fence.seeder.worker_id}")
        return ", ".join(parts)

    # Inside

    def _check_alive(self) -> None:
        if self.failure:
            raise Refusal(ErrorReason.SHARD_LOST, f"the job has failed: {self.failure}")

    def _lose_worker(self, entry: WorkerEntry, now_ms: int) -> None:
        if entry.state is WorkerState.SUSPECT:
            entry.state = WorkerState.EVICTED
        else:
            self._withdraw(entry, WorkerState.LEFT, now_ms)

    def _withdraw(self, entry: WorkerEntry, state: WorkerState, now_ms: int) -> None:
        """Takes out a worker that is no member."""
        entry.state = state
        entry.broken_ms = None
        self.ledger.retire(entry.worker)
        fence = self._fence
        if fence is not None and entry.worker in fence.starters:
            self._abort(f"{entry.worker} was lost before the start", now_ms)

    def _pump(self, now_ms: int) -> None:
        """Opens the next fence when there is need and none is open."""
        if self._fence is not None or self.failure:
            return
        if self.record is None:
            self._start_if_complete(now_ms)
            return
        change = self._pending_change(self.record)
        if change:
            self._open_fence(FenceKind.MEMBERSHIP, now_ms, change=change)
        elif self._cut_wanted and self.snapshots.has_room():
            # From here on a wish is for the cut after this one.
            self._cut_wanted = False
            self._open_fence(FenceKind.CUT, now_ms)

    def _start_if_complete(self, now_ms: int) -> None:
        joining = self.roster.in_state(WorkerState.JOINING)
        if self.shards.missing or len(joining) < self.settings.workers_min:
            return
        # By id and not by arrival: data is dealt by rank, and a run shall repeat.
        starters = tuple(sorted(entry.worker for entry in joining))
        fence = self._open_fence(FenceKind.START, now_ms, starters=starters)
        self._effects.append(OrderSeed(worker=starters[0], fence_number=fence.number))

    def _pending_change(self, record: Record) -> MembershipChange:
        leaving = self.roster.in_state(WorkerState.LEAVING)
        evicted = self.roster.in_state(WorkerState.EVICTED)
        return MembershipChange(
            joins=tuple(e.worker for e in self.roster.in_state(WorkerState.JOINING)),
            leaves=tuple((e.worker, e.last_sequence) for e in leaving),
            evictions=tuple(e.worker for e in evicted if record.member_of(e.worker)),
        )

    def _open_fence(
        self,
        kind: FenceKind,
        now_ms: int,
        *,
        change: MembershipChange | None = None,
        starters: tuple[WorkerKey, ...] = (),
    ) -> ActiveFence:
        if kind is not FenceKind.CUT and self.snapshots.pending is not None:
            self._fail_cut("it gave way to a change of membership")
            self._cut_wanted = True
        fence = ActiveFence(
            number=self._next_fence,
            kind=kind,
            opened_ms=now_ms,
            change=change or MembershipChange(),
            seeder=starters[0] if starters else None,
            starters=starters,
        )
        self._next_fence += 1
        self._fence = fence
        self._effects.append(
            Prepare(fence_number=fence.number, kind=kind, seeder=fence.seeder)
        )
        return fence

    def _decide(self, fence: ActiveFence, now_ms: int) -> None:
        self._fence = None
        self.fence_closed_number = fence.number
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
        newest = self.snapshots.newest
        if newest is not None and (newest.version, newest.clock) == (version, clock):
            newest.generation = self.record.generation
            self.snapshots.still_newest()
            self._effects.append(
                Abort(fence_number=fence.number, reason="nothing changed")
            )
            return
        entry = self.snapshots.decide(
            version=version, clock=clock, generation=self.record.generation
        )
        self._cut_decided_ms = now_ms
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
        fence = self._fence
        assert fence is not None
        self._fence = None
        self.fence_closed_number = fence.number
        self._effects.append(Abort(fence_number=fence.number, reason=reason))
        if fence.kind is FenceKind.CUT:
            self._fail_cut(reason)
        self._pump(now_ms)

    def _fail(self, reason: str) -> None:
        if not self.failure:
            self.failure = reason
            self._effects.append(EndJob(reason=reason))
