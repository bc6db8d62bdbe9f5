"""The coordinator of the simulated world: the real core, its disk, its streams.

A restart makes a new core from what is on the disk, and loses every message from the
old one. Whatever anybody is told must be on the disk at that moment.
"""

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from psserver.coordinator.core.checkpoints import PendingCheckpoint
from psserver.coordinator.core.coordinator import CoordinatorCore
from psserver.coordinator.core.coordinator_effects import (
    Abort,
    Announce,
    CommitCheckpoint,
    CoordinatorEffect,
    DecideCut,
    EndJob,
    NameCheckpoint,
    OrderSeed,
    Persist,
    Prepare,
    ReleaseImage,
    ReturnToCheckpoint,
    SchemaFixed,
    WriteCheckpoint,
)
from psserver.coordinator.core.data.epoch_ledger import EpochLedger
from psserver.coordinator.core.data.ledger import Enrolments
from psserver.coordinator.core.roster import GONE, WorkerEntry
from psserver.coordinator.core.snapshots import SnapshotEntry
from psserver.coordinator.core.start_point import SavedJob, StartPoint
from psserver.coordinator.storage.saved_job import manifest_of, saved_job_of
from psserver.edge.coordinator_settings import CoordinatorSettings
from psserver.edge.cut_report import CutReport, PartReport
from psserver.edge.fence_report import FenceReport
from psserver.shard.core.shard_fence import Cut
from pswire.checkpoint.manifest import CheckpointName
from pswire.checkpoint.place import CheckpointPlace
from pswire.job_terms import JobTerms
from pswire.leased_data import DataRange, DataReport, EpochShape
from pswire.membership import Departure, ModeTerms, Record, WorkerKey, WorkerState
from pswire.reasons import ErrorReason, Refusal
from pswire.schema import OptimizerSpec
from psworker.member.core import Join
from psworker.transport.values import SeedOrder
from tests.doubles.declared_specs import FIRST, SCHEMA
from tests.doubles.driven_worker import DrivenWorker, Stage
from tests.doubles.left_over import LeftOver
from tests.doubles.links import Links
from tests.doubles.simulated_shard import Image, SimulatedShard

if TYPE_CHECKING:
    from tests.doubles.world_folder import WorldFolder

COORDINATOR = "coordinator"

TAKEN = (ErrorReason.WORKER_ID_TAKEN,)

NO_PLACE = (ErrorReason.RECOVERING, ErrorReason.SHARD_UNKNOWN)

LOADER = "loader"
SHAPE = EpochShape(position_count=10_000, batch_size=1, drop_last=False)
"""More data than any schedule pushes."""


@dataclass(slots=True)
class Disk:
    """What a coordinator's disk holds, as the last write left it.

    Attributes:
        is_full: Whether it takes nothing now.
        incarnations: Last incarnation of each worker id.
        processes: Which process is which start of a worker.
        terms: Of the job.
        epoch: Its data, if it leases any.
        enrolments: Who leases it.
        start_point: Checkpoint that the job begins from, or has begun from.
    """

    is_full: bool = False
    incarnations: dict[str, int] = field(default_factory=dict)
    processes: dict[WorkerKey, str] = field(default_factory=dict)
    terms: JobTerms | None = None
    epoch: EpochLedger | None = None
    enrolments: Enrolments = ()
    start_point: StartPoint | None = None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a reader got: one image of each shard, of the cut that was decided."""

    version: int
    cut: DecideCut
    record: Record
    images: tuple[Image, ...]


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint that is complete.

    Attributes:
        snapshot: Its values and its cut.
        epochs: Its data.
        lost: Members that were lost as it was cut.
        terms: What the job trained then.
    """

    snapshot: Snapshot
    epochs: tuple[EpochLedger, ...]
    lost: frozenset[WorkerKey]
    terms: JobTerms


def used_of(epochs: Iterable[EpochLedger]) -> frozenset[DataRange]:
    """Data that nobody would train again from here on."""
    found: set[DataRange] = set()
    for epoch in epochs:
        dealt = (*epoch.held.values(), *epoch.queues.values(), epoch.returned)
        left = {piece for pieces in dealt for piece in pieces}
        starts = range(epoch.cursor)
        begun = {DataRange(epoch.loader, epoch.epoch, s, s + 1) for s in starts}
        found |= begun - left
    return frozenset(found)


class SimulatedCoordinator:
    """One job's coordinator, over all its starts.

    Attributes:
        core: The core of the present start.
        now_ms: The time.
        records: All records that were made durable.
        disk: The rest of what is on the disk.
        snapshots: What readers got.
        saved: Checkpoints, oldest first.
        wanted_count: What the reader waits for, None when nobody does.
        slow_read_share: How often a reader is not ready yet: others cut meanwhile.
        clip_grad_norm: Norm that all workers say.
        start_count: Starts of the job's coordinator before this one.
        loses_shards: Whether shards may be lost, so that the job returns.
        returns: Checkpoints that the job has returned to.
        folder: Where checkpoints are written, if that is a real one.
    """

    def __init__(
        self,
        settings: CoordinatorSettings,
        links: Links,
        shards: Sequence[SimulatedShard],
        rng: random.Random,
        clip_grad_norm: float = 0.0,
        *,
        before: LeftOver | None = None,
        optimizers: tuple[OptimizerSpec, ...] = (FIRST,),
    ) -> None:
        self.start_count = before.start_count if before is not None else 0
        self.core = CoordinatorCore(settings, self.start_count)
        self._before = before
        self._optimizers = optimizers
        self.clip_grad_norm = clip_grad_norm
        self.now_ms = 0
        self.records: list[Record] = []
        self.snapshots: list[Snapshot] = []
        self.saved: list[Saved] = []
        self.wanted_count: int | None = None
        self.slow_read_share = 0.95
        self._links = links
        self._rng = rng
        self._shards = shards
        self._workers: dict[WorkerKey, DrivenWorker] = {}
        self._cuts: dict[int, tuple[DecideCut, Record]] = {}
        self.loses_shards = False
        self.folder: WorldFolder | None = None
        self.returns: list[StartPoint] = []
        self.end_life: Callable[[], None] = lambda: None
        self.begin_again: Callable[[Saved, StartPoint], None] = lambda *_: None
        self._folder: dict[str, Saved] = {}
        self._way_back: SavedJob | None = None
        self._processes: dict[str, SimulatedShard] = {}
        self._seekers: list[str] = []
        self._seeker_count = 0
        self._lost_at: dict[int, frozenset[WorkerKey]] = {}
        self.disk = Disk()
        if before is not None:
            self.disk.terms = before.terms
            self.disk.start_point = before.point
            self.disk.epoch = before.epoch.copy() if before.epoch is not None else None
            self.disk.incarnations = dict(before.incarnations)
            self._restore(self.core)
        for shard in shards:
            self.connect_shard(shard)

    def tick(self, duration_ms: int) -> None:
        self.now_ms += duration_ms
        self._seek_places()
        self.core.tick(self.now_ms)
        self.pump()

    def restart(self) -> list[DrivenWorker]:
        """A new process goes on; returns the workers that must connect anew.

        With a full disk it does not start, and its supervisor tries until it does.
        """
        self.disk.is_full = False
        old = self.core
        self.start_count += 1
        core = CoordinatorCore(old.settings, self.start_count)
        self._restore(core)
        self.core = core
        core.way_back = self._way_back
        self.wanted_count = None
        for shard in self._shards:
            self._links.cut(COORDINATOR, shard.name)
            slot, known = (c.shards.slots[shard.index] for c in (core, old))
            slot.process_id, slot.address = known.process_id, known.address
            slot.incarnation = known.incarnation
            if not slot.process_id:
                continue
            slot.broken_ms = self.now_ms + core.settings.return_ms
            self.reconnect_shard(shard)
        strangers = []
        for worker in self._workers.values():
            self._links.cut(COORDINATOR, worker.name)
            if worker.is_gone:
                continue
            if core.roster.find(worker.key) is None:
                worker.stage = Stage.GONE
                strangers.append(worker)
            else:
                self._reconnect_worker(worker)
        return strangers

    def departures_until(self, generation: int) -> Iterator[Departure]:
        """Members that have ended by the records up to a generation."""
        for record in self.records:
            if record.generation <= generation:
                yield from record.departures

    @property
    def has_members(self) -> bool:
        """Whether the newest record names anybody."""
        return not self.records or bool(self.records[-1].members)

    # Shards

    def reconnect_shard(self, shard: SimulatedShard) -> None:
        def again() -> bool:
            if not (shard.is_stopped or self._links.is_lost(shard.name)):
                self.connect_shard(shard)
            return not shard.is_stopped

        self._links.send(f"{shard.name} again", COORDINATOR, again)

    def break_shard(self, shard: SimulatedShard) -> None:
        """Its stream breaks, with events under way, and comes back."""
        slot = self.core.shards.slots[shard.index]
        if slot.is_watching:
            self._links.cut(COORDINATOR, shard.name)
            self.core.shard_broken(slot, self.now_ms)
            self.pump()
            self.reconnect_shard(shard)

    def lose_shard(self, shard: SimulatedShard) -> None:
        """Its stream breaks, and it is dead, or does not open another one for long."""
        slot = self.core.shards.slots[shard.index]
        self._links.cut(COORDINATOR, shard.name)
        if slot.is_watching and slot.process_id == self._process_of(shard):
            self.core.shard_broken(slot, self.now_ms)
            self.pump()

    def has_place(self, shard: SimulatedShard) -> bool:
        """Whether a process that lives serves in this place."""
        slot = self.core.shards.slots[shard.index]
        return slot.is_watching and slot.process_id == self._process_of(shard)

    def seek_place(self) -> None:
        """A new process of a shard asks for a place, until it has one."""
        self._seeker_count += 1
        self._seekers.append(f"seeker {self._seeker_count}")

    def _seek_places(self) -> None:
        for process_id in list(self._seekers):
            try:
                slot = self.core.register_shard(
                    process_id=process_id, address=process_id, now_ms=self.now_ms
                )
            except Refusal as refusal:
                if refusal.reason not in NO_PLACE:
                    raise
                continue
            if not self.pump():
                continue
            self._seekers.remove(process_id)
            self._processes[process_id] = self._shards[slot.index]
            self.reconnect_shard(self._shards[slot.index])

    def _process_of(self, shard: SimulatedShard) -> str:
        """Under which id a shard has registered."""
        found = (p for p, each in self._processes.items() if each is shard)
        return next(found, shard.name if shard.start == 1 else "")

    def connect_shard(self, shard: SimulatedShard) -> None:
        """A shard's watch begins, with the whole current state."""
        process_id = self._process_of(shard)
        if shard.start > 1 and self.core.shards.place_of(process_id) is None:
            return  # its place was taken back
        slot = self.core.register_shard(
            process_id=process_id, address=process_id, now_ms=self.now_ms
        )
        if slot.is_watching:
            return
        fence = self.core.fence
        is_asked = fence is not None and slot.index not in fence.reports
        self.core.shard_watching(slot, self.now_ms)
        newest = self._told_record()
        closed = self.core.progress.fences.closed_number
        self._tell(shard, self._adoption(shard))
        self._tell(shard, lambda: shard.view(newest, closed))
        if fence is not None and is_asked:
            self._tell_effect(shard, Prepare.of(fence))
        for snapshot_id in self.core.snapshots.released:
            self._tell_effect(shard, ReleaseImage(snapshot_id=snapshot_id))
        self.pump()

    def report(self, shard_index: int, report: FenceReport) -> None:
        """A shard's report has arrived."""
        slot = self.core.shards.slots[shard_index]
        self.core.report_fence(slot, report, self.now_ms)
        self.pump()

    def report_image(self, shard_index: int, report: CutReport) -> None:
        """Word of a shard's image has arrived."""
        slot = self.core.shards.slots[shard_index]
        self.core.report_cut(slot, report, self.now_ms)
        self.pump()

    def report_part(self, shard_index: int, report: PartReport) -> None:
        """Word of a shard's part of a checkpoint has arrived."""
        slot = self.core.shards.slots[shard_index]
        self.core.report_checkpoint(slot, report, self.now_ms)
        self.pump()

    # Workers

    def register(self, worker_id: str, number: int) -> WorkerKey | None:
        """A worker's new identity; None when somebody else has its id."""
        try:
            entry = self.core.register_worker(
                process_id=f"process {number}",
                worker_id=worker_id,
                address="",
                now_ms=self.now_ms,
            )
        except Refusal as refusal:
            if refusal.reason not in TAKEN:
                raise
            return None
        if not self.pump():
            return None
        self._check_known(entry.worker)
        return entry.worker

    def admit(self, worker: DrivenWorker) -> None:
        """A worker opens its watch."""
        self._workers[worker.key] = worker
        self._reconnect_worker(worker)

    def ask_to_join(self, worker: DrivenWorker, question: Join) -> None:
        """A worker asks for a place, again where the disk takes nothing."""

        def asked() -> None:
            entry = self._present(worker)
            if entry is None:
                return
            if self._join(entry):
                self._links.send(
                    COORDINATOR, worker.name, lambda: worker.asked_to_join(question)
                )
            else:
                self.ask_to_join(worker, question)

        self._links.send(worker.name, COORDINATOR, asked)

    def declare(self, worker: DrivenWorker, spec: OptimizerSpec) -> None:
        """A worker tells what its optimizer is from now on."""

        def told() -> None:
            entry = self._present(worker)
            if entry is not None:
                self.core.declare_optimizer(entry, spec, self.now_ms)
                if not self.pump():
                    self.declare(worker, spec)
                    return
                self._links.send(
                    COORDINATOR, worker.name, lambda: worker.declared(spec)
                )

        self._links.send(worker.name, COORDINATOR, told)

    def leave(self, worker: DrivenWorker) -> None:
        """A worker asks to leave; it is gone when the record is written."""

        def left() -> None:
            entry = self._present(worker)
            if entry is not None:
                self.core.leave(entry, sequence=worker.sequence, now_ms=self.now_ms)
                self.pump()

        self._links.send(worker.name, COORDINATOR, left)

    def lose(self, worker: DrivenWorker) -> None:
        """A worker's stream broke, and it is gone."""
        entry = self._present(worker)
        if entry is not None:
            self.core.worker_broken(entry, self.now_ms)
        self.tick(self.core.settings.reconnect_grace_ms)

    def flap(self, worker: DrivenWorker) -> None:
        """A worker's stream breaks and is opened again."""
        entry = self._present(worker)
        if entry is not None and entry.is_watching:
            self._links.cut(COORDINATOR, worker.name)
            self.core.worker_broken(entry, self.now_ms)
            self.pump()
            self._reconnect_worker(worker)

    def report_silence(self, worker: DrivenWorker, silent_ms: dict[int, int]) -> None:
        """A worker tells for how long shards that it waits for have been silent."""
        entry = self._present(worker)
        if entry is not None and entry.is_watching:
            self.core.report_silence(entry, silent_ms, self.now_ms)
            self.pump()

    def find_again(self, worker: DrivenWorker) -> None:
        """A worker that was stopped goes on: its stream is opened again if broken."""
        entry = self._present(worker)
        if entry is None or not entry.is_watching:
            self._reconnect_worker(worker)

    def lost_ids(self) -> list[str]:
        """Workers that are dead and keep their place."""
        return [e.worker.worker_id for e in self.core.roster.in_state(WorkerState.LOST)]

    def is_member(self, worker: WorkerKey) -> bool:
        """Whether the newest record names a worker."""
        return bool(self.records) and self.records[-1].member_of(worker) is not None

    def set_mode(self, terms: ModeTerms) -> None:
        """Somebody wants another mode."""
        self.core.set_mode(terms, self.now_ms)
        self.pump()

    # Data

    def lease(self, worker: DrivenWorker) -> tuple[DataRange, ...]:
        """A worker reports what became of its data, mostly, and draws a batch."""
        ledger = self.core.ledger
        if not self.is_member(worker.key):
            return ()
        consumed: list[DataRange] = []
        dropped: list[DataRange] = []
        for own in worker.acknowledged:
            known = dropped if own.outcome == "dropped" else consumed
            known += own.trailer.ranges
        report = DataReport(consumed=tuple(consumed), dropped=tuple(dropped))
        ledger.open_epoch(worker.key, LOADER, 0, SHAPE)
        if self._rng.random() < 0.7:
            ledger.take_report(worker.key, report)
        (epoch,) = ledger.epochs()
        drawn = {p for own in worker.pushes.values() for p in own.trailer.ranges}
        dealt = epoch.lease(worker.key, self.core.participants(LOADER), 1)
        self.disk.epoch = epoch.copy()
        return tuple(piece for piece in dealt if piece not in drawn)

    # Readers

    def want_checkpoint(self) -> None:
        self.core.want_checkpoint(self.now_ms)
        self.pump()

    def want_cut(self) -> None:
        if self.records and self.wanted_count is None:
            self.wanted_count = self.core.want_cut(self.now_ms)
            self.pump()

    # Inside

    def _restore(self, core: CoordinatorCore) -> None:
        """What is on the disk, and what the job goes on from."""
        core.restore(
            terms=self.disk.terms,
            record=self.records[-1] if self.records else None,
            incarnations=self.disk.incarnations,
            processes=self.disk.processes,
            now_ms=self.now_ms,
            start_point=self.disk.start_point,
        )
        if self.disk.epoch is not None:
            core.restore_ledger((self.disk.epoch.copy(),), self.disk.enrolments)

    def _told_record(self) -> Record | None:
        """The record that somebody is told as the newest."""
        kept = self.records[-1] if self.records else None
        assert self.core.record is kept, "told what is not on the disk"
        return kept

    def _check_known(self, worker: WorkerKey) -> None:
        """Whoever is told its identity is found again after a restart."""
        kept = self.disk.incarnations.get(worker.worker_id, 0)
        assert kept >= worker.incarnation, "told what is not on the disk"

    def _join(self, entry: WorkerEntry) -> bool:
        self.core.join(
            entry,
            terms=JobTerms(
                schema=SCHEMA,
                optimizers=self._optimizers,
                clip_grad_norm=self.clip_grad_norm,
            ),
            loaders=(),
            now_ms=self.now_ms,
        )
        return self.pump()

    def _present(self, worker: DrivenWorker) -> WorkerEntry | None:
        entry = self.core.roster.find(worker.key)
        return None if entry is None or entry.state in GONE else entry

    def _reconnect_worker(self, worker: DrivenWorker) -> None:
        def watching() -> None:
            entry = self._present(worker)
            if entry is None:
                self._tell_evicted(worker)
                return
            self.core.worker_watching(entry, self.now_ms)
            newest = self._told_record()
            self._links.send(COORDINATOR, worker.name, lambda: worker.heard(newest))
            if worker.stage is Stage.LEAVING:
                self.leave(worker)
            elif worker.stage is Stage.DECLARING:
                worker.declare_next()
            self.pump()

        self._links.send(worker.name, COORDINATOR, watching)

    def _tell_evicted(self, worker: DrivenWorker) -> None:
        """A worker's watch is refused: it has left, or was taken out."""

        def told() -> None:
            if worker.stage is Stage.LEAVING:
                worker.stage = Stage.GONE
            elif not worker.is_gone:
                worker.network.evicted(worker)

        self._links.send(COORDINATOR, worker.name, told)

    def pump(self) -> bool:
        """Carries out what the core wants; whether the disk took all that is new."""
        was_written = True
        while effects := self.core.progress.take_effects():
            for effect in effects:
                if isinstance(effect, Persist):
                    was_written = self._write(effect) and was_written
                else:
                    self._carry_out(effect)
        self._read_if_ready()
        return was_written

    def _write(self, change: Persist) -> bool:
        if self.disk.is_full:
            self.core.progress.unwritten("it is full")
            return False
        if change.incarnations is not None:
            self.disk.incarnations = dict(change.incarnations)
        if change.processes is not None:
            self.disk.processes = dict(change.processes)
        if change.terms is not None:
            self.disk.terms = change.terms
        if change.enrolments is not None:
            self.disk.enrolments = change.enrolments
        if change.start_point is not None:
            self.disk.epoch = None  # what has begun since is not begun any more
        for epoch in change.epochs:
            self.disk.epoch = epoch.copy()
        if change.start_point is not None:
            self.end_life()
            newest = self.records[-1].generation if self.records else 0
            assert change.start_point.generation >= newest, "a generation comes twice"
            self.disk.start_point = change.start_point
            for history in (self.records, self.snapshots, self.saved):
                history.clear()
        if change.record is not None:
            self.records.append(change.record)
        self.core.progress.written()
        return True

    def _carry_out(self, effect: CoordinatorEffect) -> None:
        match effect:
            case Announce():
                self._announce(effect.record)
            case SchemaFixed():
                for shard in self._shards:
                    self._tell(shard, self._adoption(shard))
            case NameCheckpoint():
                self._name(self.core, effect.checkpoint)
            case CommitCheckpoint():
                self._commit(self.core, effect.checkpoint)
            case Prepare() | Abort() | DecideCut() | ReleaseImage() | WriteCheckpoint():
                if isinstance(effect, DecideCut):
                    self._cuts[effect.snapshot_id] = effect, self.records[-1]
                    lost = self.core.roster.in_state(WorkerState.LOST)
                    self._lost_at[effect.snapshot_id] = frozenset(
                        entry.worker for entry in lost
                    )
                for shard in self._shards:
                    self._tell_effect(shard, effect)
            case OrderSeed():
                order = SeedOrder(effect.fence_number, ())
                for worker in self._workers.values():
                    own = order if worker.key == effect.worker else None
                    self._links.send(
                        COORDINATOR, worker.name, partial(worker.ordered, own)
                    )
            case ReturnToCheckpoint():
                self._return(effect.start_point)
            case EndJob():
                raise AssertionError(effect.reason)

    def _return(self, point: StartPoint) -> None:
        """All begin again: shards that live ask for places, and members join anew."""
        self.returns.append(point)
        self.wanted_count = None
        for shard in self._shards:
            if not (self._links.is_lost(shard.name) or shard.is_stopped):
                self.seek_place()
        self.begin_again(self._folder[point.place.name], point)
        for worker in self._workers.values():
            entry = self.core.roster.find(worker.key)
            if not worker.is_gone and (entry is None or entry.state in GONE):
                self._links.cut(COORDINATOR, worker.name)
                self._tell_evicted(worker)

    def go_on_from(self, before: LeftOver) -> None:
        """First values are those of another checkpoint."""
        self._before = before

    def _announce(self, record: Record) -> None:
        assert record is self.records[-1]
        for shard in self._shards:
            self._tell(shard, lambda shard=shard: shard.view(record, 0))  # type: ignore[misc]
        for worker in self._workers.values():
            self._links.send(
                COORDINATOR,
                worker.name,
                lambda worker=worker: worker.heard(record),  # type: ignore[misc]
            )
        for end in record.departures:
            worker = self._workers[end.member.worker]
            if worker.stage is Stage.LEAVING:
                worker.stage = Stage.GONE

    def _tell(self, shard: SimulatedShard, what: Callable[[], None]) -> None:
        if self.core.shards.slots[shard.index].is_watching:
            self._links.send(COORDINATOR, shard.name, what)

    def _adoption(self, shard: SimulatedShard) -> Callable[[], None]:
        """What the job's optimizers are declared as now, on its way to a shard."""
        told = self.core.model.terms
        assert told == self.disk.terms, "told what is not on the disk"
        digests = [] if told is None else [spec.digest for spec in told.optimizers]
        return lambda: shard.adopt(digests)

    def _tell_effect(self, shard: SimulatedShard, effect: CoordinatorEffect) -> None:
        def told() -> None:
            match effect:
                case Prepare():
                    shard.core.prepare_fence(
                        effect.fence_number,
                        effect.kind,
                        effect.seeder,
                        effect.evicting,
                    )
                    if effect.start_point is not None:
                        assert self._before is not None
                        shard.load(effect.fence_number, self._before.values)
                case Abort():
                    floors = dict(effect.batch_floors)
                    shard.core.abort_fence(effect.fence_number, floors)
                case DecideCut():
                    shard.core.decide_cut(
                        effect.fence_number,
                        Cut(
                            effect.snapshot_id,
                            effect.clock,
                            dict(effect.sequences),
                            effect.purpose,
                        ),
                    )
                case WriteCheckpoint():
                    folder, name = self.folder, effect.place.name
                    save = (
                        None
                        if folder is None
                        else partial(folder.write, name, shard.index)
                    )
                    shard.write(effect.snapshot_id, self._rng, save)
                case ReleaseImage():
                    shard.release(effect.snapshot_id)
            shard.pump()

        self._tell(shard, told)

    def _name(self, core: CoordinatorCore, checkpoint: PendingCheckpoint) -> None:
        """The folder gives a name, a while later."""

        def named() -> None:
            if core is self.core:
                version, attempt = checkpoint.cut.version, 1
                while str(CheckpointName(version, attempt)) in self._folder:
                    attempt += 1
                name = str(CheckpointName(version, attempt))
                if self.folder is not None:
                    name = self.folder.begin(version)
                place = CheckpointPlace("", name)
                core.checkpoint_named(checkpoint.snapshot_id, place)
                self.pump()

        self._links.send("folder", COORDINATOR, named)

    def _commit(self, core: CoordinatorCore, checkpoint: PendingCheckpoint) -> None:
        """The manifest is written a while later, or can't be."""
        cut, record = self._cuts[checkpoint.snapshot_id]
        images = tuple(shard.copies[cut.snapshot_id] for shard in self._shards)
        snapshot = Snapshot(checkpoint.cut.version, cut, record, images)

        def committed() -> None:
            if core is not self.core:
                return
            if self._rng.random() < 0.1:
                core.fail_checkpoint(cut.snapshot_id, "it is full", self.now_ms)
            else:
                manifest = manifest_of(
                    checkpoint, core.settings, (), created_unix_s=0.0
                )
                if self.folder is not None:
                    self.folder.commit(manifest)
                job = saved_job_of(manifest, "")
                lost = self._lost_at[cut.snapshot_id]
                self.saved.append(Saved(snapshot, job.epochs, lost, job.terms))
                core.checkpoint_committed(cut.snapshot_id, job, self.now_ms)
                if self.loses_shards:
                    self._folder[job.point.place.name] = self.saved[-1]
                    self._way_back = core.way_back
                else:
                    core.way_back = None
            self.pump()

        self._links.send("folder", COORDINATOR, committed)

    def _read_if_ready(self) -> None:
        """A reader that waits takes its images a while later, and lets them go."""
        snapshots = self.core.snapshots
        if self.wanted_count is None:
            return
        if snapshots.finished_cut_count < self.wanted_count:
            return
        self.wanted_count = None
        newest = snapshots.newest
        if snapshots.failure or newest is None:
            return
        pin_id = snapshots.pin(newest, self.now_ms)
        core = self.core
        self._links.send(
            "reader", COORDINATOR, lambda: self._read(core, newest, pin_id)
        )

    def _read(self, core: CoordinatorCore, entry: SnapshotEntry, pin_id: int) -> bool:
        if core is not self.core or entry.pins.get(pin_id, 0) <= self.now_ms:
            return True  # the pin's time is over, or its process is
        if any(entry.snapshot_id not in shard.images for shard in self._shards):
            assert self.returns, "an image is gone that is being read"
            return True
        if self._rng.random() < self.slow_read_share:
            return False
        images = tuple(shard.images[entry.snapshot_id] for shard in self._shards)
        cut, record = self._cuts[entry.snapshot_id]
        self.snapshots.append(Snapshot(entry.version, cut, record, images))
        self.core.release_snapshot(entry.snapshot_id, pin_id, self.now_ms)
        self.pump()
        return True

    def draw_id(self) -> str:
        """A new worker id, or that of a worker that is gone."""
        present = {
            entry.worker.worker_id
            for entry in self.core.roster.in_state(*set(WorkerState).difference(GONE))
        }
        gone = sorted({key.worker_id for key in self._workers} - present)
        if gone and self._rng.random() < 0.5:
            return self._rng.choice(gone)
        return f"w{len(self._workers)}"
