"""The coordinator at work: its core, its file, and the streams that follow it."""

import asyncio
import logging
import time
from collections.abc import Callable

from psserver.coordinator.core.coordinator_effects import (
    Abort,
    Announce,
    CheckpointFailed,
    CommitCheckpoint,
    CoordinatorEffect,
    DecideCut,
    EndJob,
    NameCheckpoint,
    OrderSeed,
    Persist,
    Prepare,
    ReleaseImage,
    ReplaceStartPoint,
    ReturnToCheckpoint,
    SchemaFixed,
    WantState,
    WorkerCutOff,
    WriteCheckpoint,
)
from psserver.coordinator.core.data.split_book import SplitBook
from psserver.coordinator.core.events import EventKind
from psserver.coordinator.core.roster import GONE, PRESENT, WorkerEntry
from psserver.coordinator.core.shard_map import ShardSlot, ShardStanding
from psserver.coordinator.core.start_point import SavedJob
from psserver.coordinator.host.checkpoint_saver import CheckpointSaver
from psserver.coordinator.host.data_leases import DataLeases
from psserver.coordinator.host.history import CoordinatorHistory
from psserver.coordinator.host.job_waits import JobWaits
from psserver.coordinator.host.restored_job import restored_core
from psserver.coordinator.host.snapshot_requests import SnapshotRequests
from psserver.coordinator.storage.job_store import JobStore, NotWrittenError
from psserver.edge.changes import Changes
from psserver.edge.coordinator_settings import CoordinatorSettings
from psserver.edge.fence_report import FenceReport
from psserver.edge.limits import DEFAULT_LIMITS, Limits
from psserver.edge.memory_grant import NO_GRANT, MemoryGrant
from psserver.edge.monotonic import now_ms
from pswire import failpoints
from pswire.keepalive import coordinator_keepalive
from pswire.leased_data import DataReport
from pswire.membership import (
    CutPurpose,
    ModeTerms,
    Record,
    StepAtomicity,
    WorkerKey,
)
from pswire.reasons import ErrorReason, Refusal

TICK_S = 0.05
"""How often time is looked at: the coarsest error of any time-out."""

FAREWELL_S = 3.0
"""How long a coordinator stays after its job has failed, so that also those who come
or come back at that moment hear why."""

Queue = asyncio.Queue[CoordinatorEffect]
"""What one watch is still to send: effects, which the servicer translates."""

log = logging.getLogger("psserver.coordinator")


class CoordinatorHost:
    """One job.

    Attributes:
        core: The job's state.
        changes: Notified whenever anything may have changed.
        waits: For whom the job waits.
        data: Leases of data, and splits that were recorded.
        snapshots: Readers that want one.
        checkpoints: Has checkpoints written.
        history: What it decided, for an offline check.
        limits: What callers may make it hold.
        unix_offset_s: The time, in seconds since 1970, at which `now_ms` was 0.
        admin_url: Where its admin port is reached, empty without one.
    """

    def __init__(
        self,
        settings: CoordinatorSettings,
        store: JobStore,
        saved: SavedJob | None = None,
        limits: Limits = DEFAULT_LIMITS,
    ) -> None:
        """Goes on where the state folder, or else the newest checkpoint, says.

        Args:
            settings: What the command line says.
            store: The state folder.
            saved: The job as its newest good checkpoint has it.
            limits: What callers may make it hold.
        """
        self.limits = limits
        self.admin_url = ""
        self.is_ending = False  # told to, by a signal
        self._store = store
        self.history = CoordinatorHistory()
        # Of the newest watch of each shard and worker.
        self._queues: dict[int | WorkerKey, Queue] = {}
        self.core = restored_core(settings, store, now_ms(), saved)
        self._logged = self.core.record
        self.unix_offset_s = time.time() - now_ms() / 1000
        is_first = self.core.record is None and self.core.progress.start_point is None
        self.core.events.add(
            EventKind.COORDINATOR_STARTED,
            f"The coordinator has started{'' if is_first else ' again'}",
            now_ms(),
        )
        self.changes = Changes()
        self._new_events = Changes()
        self._told_event = 0
        self._wished_mode: ModeTerms | None = None
        self.data = DataLeases(
            self.core, self.changes, self.keep, SplitBook(store.load_splits())
        )
        self.waits = JobWaits(self.core, self.data.waiting)
        self.snapshots = SnapshotRequests(
            self.core, self.changes, self.waits, self.pump
        )
        self.checkpoints = CheckpointSaver(
            self.core, self.changes, self.waits, self.data.splits, self.pump
        )

    async def run_clock(self) -> None:
        """Has the core look at the time until cancelled."""
        # After a pause of a ping's time-out between two looks at the time both ends may
        # have given up streams that nobody had answered; peers are soon back.
        pause_ms = coordinator_keepalive(self.core.settings.lease_ttl_ms).timeout_ms
        told_ms = now_ms()
        while True:
            await asyncio.sleep(TICK_S)
            at_ms = now_ms()
            if at_ms - told_ms >= pause_ms:
                log.warning(
                    "this process was stopped or did not run for %d ms",
                    at_ms - told_ms,
                )
                self.core.have_patience(at_ms)
            told_ms = at_ms
            self.core.tick(at_ms)
            self.pump()
            self.waits.look(at_ms)

    def slowest_clock(self) -> int | None:
        """The smallest clock over the members, None where there is none."""
        members = self.core.record.members if self.core.record else ()
        return min(map(self.core.shards.clock_of, members), default=None)

    async def until_failed(self) -> str:
        """Returns why the job can't go on, a farewell after it can't."""
        await self.changes.wait_until(lambda: bool(self.core.progress.failure))
        await asyncio.sleep(FAREWELL_S)
        return self.core.progress.failure

    @property
    def unready_reason(self) -> str:
        """Why it serves nobody now, in words; empty while it does."""
        if self.core.progress.failure:
            return f"the job has failed: {self.core.progress.failure}"
        if self.core.writes.failure:
            return f"its state can't be written: {self.core.writes.failure}"
        return ""

    def pump(self) -> Refusal | None:
        """Carries out what the core wants done; safe to call at any time.

        Returns:
            For whoever has asked for a change: why it was not made, None if it was.
        """
        unwritten: Refusal | None = None
        while effects := self.core.progress.take_effects():
            for effect in effects:
                if isinstance(effect, Persist):
                    unwritten = self._write(effect) or unwritten
                else:
                    self._carry_out(effect)
        self.changes.notify()
        if self._told_event != self.core.events.newest_number:
            self._told_event = self.core.events.newest_number
            self._new_events.notify()
        return unwritten

    def pump_for_caller(self) -> None:
        """Carries out what a call has led to.

        Raises:
            Refusal: `STATE_NOT_WRITTEN`; no state changed.
        """
        unwritten = self.pump()
        if unwritten is not None:
            raise unwritten

    def keep(self, what: Persist, undo: Callable[[], None]) -> None:
        """Writes a change that a call has made.

        Raises:
            Refusal: `STATE_NOT_WRITTEN`; the change is undone.
        """
        self.core.progress.keep(what, now_ms(), undo=undo)
        self.pump_for_caller()

    async def wait_event(self, after: int) -> None:
        """Returns once something has happened after an event."""
        events = self.core.events
        await self._new_events.wait_until(lambda: events.newest_number > after)

    async def next_event(
        self, entry: WorkerEntry, queue: Queue, timeout_s: float
    ) -> bool:
        """Waits for an event of a worker's watch, or for the worker's end.

        Returns:
            Whether there is an event.
        """
        await self.changes.wait_until(
            lambda: not queue.empty() or entry.state in GONE, timeout_s
        )
        return not queue.empty()

    async def set_mode(self, terms: ModeTerms, timeout_s: float) -> Record:
        """Changes the mode; the record that says so, or said so before.

        Raises:
            Refusal: `NOT_STARTED`, `MALFORMED_MESSAGE`, `SHARD_LOST`, or `WAIT_TIMEOUT`
                with whom the change waits for.
        """
        core = self.core
        core.set_mode(terms, now_ms())
        self._wished_mode = terms
        self.waits.note_mode(terms, now_ms())
        self.pump()
        is_over = await self.changes.wait_until(
            lambda: (
                core.mode_is(terms)
                or bool(core.progress.failure)
                or self._wished_mode != terms
            ),
            timeout_s,
        )
        core.progress.check_alive()
        newest = self._wished_mode
        if newest != terms and not core.mode_is(terms):
            raise Refusal(
                ErrorReason.WAIT_TIMEOUT,
                f"the mode does not change to {terms}, or not for long: somebody "
                f"has asked for {newest} since",
            )
        if not is_over:
            raise Refusal(
                ErrorReason.WAIT_TIMEOUT,
                f"the mode did not change within {timeout_s:.1f} s, and will as soon "
                f"as it can: waiting for {self.waits.text(now_ms(), at_once=True)}",
            )
        assert core.record is not None
        return core.record

    # Shards

    def register_shard(
        self,
        *,
        process_id: str,
        address: str,
        memory: MemoryGrant = NO_GRANT,
        wanted_index: int | None = None,
    ) -> ShardSlot:
        """Gives a shard its place and keeps it.

        Raises:
            Refusal: As the core does, or `STATE_NOT_WRITTEN`; no state changed.
        """
        slot = self.core.register_shard(
            process_id=process_id,
            address=address,
            now_ms=now_ms(),
            memory=memory,
            wanted_index=wanted_index,
        )
        self.pump_for_caller()
        return slot

    def open_shard_watch(self, slot: ShardSlot) -> Queue:
        """Begins a shard's watch; an older one of the same shard ends silently."""
        queue = self._queues[slot.index] = Queue()
        fence = self.core.fence
        if fence is not None and slot.index not in fence.reports:
            queue.put_nowait(Prepare.of(fence))
        for snapshot_id in self.core.snapshots.released:
            queue.put_nowait(ReleaseImage(snapshot_id=snapshot_id))
        write = self.core.checkpoint_write(slot)
        if write is not None:
            queue.put_nowait(write)
        self._tell_if_failed(queue)
        if not slot.is_watching:
            log.info("shard %d registered at %s", slot.index, slot.address)
        self.core.shard_watching(slot, now_ms())
        self.pump()
        return queue

    def close_shard_watch(self, slot: ShardSlot, queue: Queue) -> None:
        if self._queues.get(slot.index) is queue:
            del self._queues[slot.index]
            log.warning("the connection to shard %d broke", slot.index)
            self.core.shard_broken(slot, now_ms())
            self.pump()

    def take_report(self, slot: ShardSlot, report: FenceReport) -> None:
        fence = self.core.fence
        if fence is not None and fence.number == report.fence_number:
            self.waits.note_report(slot.index)
        self.core.report_fence(slot, report, now_ms())
        self.pump()

    def take_standing(
        self,
        slot: ShardSlot,
        standing: ShardStanding,
        contradicting: tuple[WorkerKey, ...],
    ) -> None:
        """Takes word where a shard stands.

        Args:
            slot: The shard.
            standing: Where it stands.
            contradicting: Members whose bytes contradicted their finite verdict.
        """
        self.core.take_standing(slot, standing, now_ms())
        for member in self.core.record.members if self.core.record else ():
            entry = self.core.roster.find(member.worker)
            if entry is not None:
                entry.note_clock(self.core.shards.clock_of(member), now_ms())
        for worker in contradicting:
            entry = self.core.roster.find(worker)
            if entry is not None and entry.state in PRESENT and not entry.is_condemned:
                log.error(
                    "%s at %s is to be evicted: shard %d found a value that is not "
                    "finite in a gradient that it had reported as finite; check its "
                    "memory, and what changes gradients after step() has begun",
                    *(worker, entry.address, slot.index),
                )
                self.core.evict(entry, now_ms())
        self.pump()

    # Workers

    def register_worker(
        self, *, process_id: str, worker_id: str, address: str
    ) -> WorkerEntry:
        """Gives a worker its identity and keeps it.

        Raises:
            Refusal: As the core does, or `STATE_NOT_WRITTEN`; no state changed.
        """
        entry = self.core.register_worker(
            process_id=process_id,
            worker_id=worker_id,
            address=address,
            now_ms=now_ms(),
            registered_max=self.limits.registrations,
        )
        self.pump_for_caller()
        return entry

    def open_worker_watch(self, entry: WorkerEntry) -> Queue:
        """Begins a worker's watch; an older one of the same worker ends silently."""
        self.core.worker_watching(entry, now_ms())
        queue = self._queues[entry.worker] = Queue()
        wanted = self.core.state_wanted(entry)
        if wanted is not None:
            queue.put_nowait(wanted)
        self._tell_if_failed(queue)
        self.pump()
        return queue

    def close_worker_watch(self, entry: WorkerEntry, queue: Queue) -> None:
        if self._queues.get(entry.worker) is queue:
            del self._queues[entry.worker]
            if entry.state not in GONE:
                log.warning("the connection to %s broke", entry.worker)
            self.core.worker_broken(entry, now_ms())
            self.pump()

    async def leave(
        self,
        entry: WorkerEntry,
        sequence: int,
        report: DataReport,
        *,
        signal_name: str = "",
    ) -> None:
        """Ends a membership; returns when the record is written.

        Raises:
            Refusal: `STATE_NOT_WRITTEN`: it is a member as before.
        """
        if signal_name:
            log.warning("%s leaves, ended by %s", entry.worker, signal_name)
        self.core.leave(entry, sequence=sequence, report=report, now_ms=now_ms())
        self.pump_for_caller()
        self.data.tell_ends()
        await self.changes.wait_until(
            lambda: entry.state in GONE or bool(self.core.progress.failure)
        )

    # Inside

    def _write(self, change: Persist) -> Refusal | None:
        """Writes a change and says to the core whether it is on the disk."""
        try:
            self._store.write(change)
        except NotWrittenError as error:
            if not self.core.writes.failure:
                log.error(
                    "the state can't be written: %s; what would change it is refused "
                    "until it can, and training goes on",
                    error,
                )
            self.core.progress.unwritten(str(error))
            return Refusal(
                ErrorReason.STATE_NOT_WRITTEN,
                f"the coordinator can't write its state: {error}",
            )
        if self.core.writes.failure:
            log.info("the state can be written again")
        if change.record is not None:
            self.history.persisted(change.record)
            if failpoints.armed:
                failpoints.hit("coordinator.record_persisted")
        self.core.progress.written()
        return None

    def _carry_out(self, effect: CoordinatorEffect) -> None:
        match effect:
            case SchemaFixed():
                terms = self.core.model.terms
                if terms is not None and not terms.declared:
                    self._log_clipping()
                self._send(effect, workers=False)
            case Abort():
                log.debug("fence %d: %s", effect.fence_number, effect.reason)
                self.history.sent(effect)
                self._send(effect, workers=False)
            case Prepare():
                self.history.sent(effect)
                if failpoints.armed:
                    failpoints.hit("coordinator.fence_prepared")
                self._send(effect, workers=False)
            case DecideCut():
                self.history.sent(effect)
                if failpoints.armed:
                    failpoints.hit("coordinator.cut_decided")
                    if effect.purpose is CutPurpose.CHECKPOINT:
                        failpoints.hit("coordinator.checkpoint_decided")
                self._send(effect, workers=False)
            case ReleaseImage() | WriteCheckpoint():
                self._send(effect, workers=False)
            case (
                NameCheckpoint()
                | CommitCheckpoint()
                | CheckpointFailed()
                | ReplaceStartPoint()
            ):
                self.checkpoints.carry_out(effect)
            case WantState():
                if effect.worker in self._queues:
                    self._queues[effect.worker].put_nowait(effect)
            case OrderSeed():
                # Those who do not seed are to say whether they reach the shards.
                self._send(effect, shards=False)
            case Announce():
                self._log_record(effect.record)
                self._send(effect)
                if failpoints.armed:
                    failpoints.hit("coordinator.record_announced")
            case WorkerCutOff():
                log.warning(
                    "%s %s (no answer for %.0f s): %s",
                    *(effect.worker, effect.reason, effect.silent_ms / 1000),
                    "the job goes on without it, and it joins once it can"
                    if effect.is_joining
                    else "it is evicted as soon as enough workers are left, and may "
                    "join again",
                )
            case ReturnToCheckpoint():
                self._return(effect)
            case EndJob():
                log.error("the job has failed: %s", effect.reason)
                self._send(effect)

    def _return(self, effect: ReturnToCheckpoint) -> None:
        """Ends all watches of shards, which register again if they live.

        Those of members end by themselves. Who waits to become one learns that there is
        no shard to be asked before.
        """
        log.warning(
            "the job returns to %s; steps after it, if there were any, are trained "
            "again: %s",
            *(effect.start_point, effect.reason),
        )
        self._send(effect)
        self._queues = {
            watcher: queue
            for watcher, queue in self._queues.items()
            if not isinstance(watcher, int)
        }
        self._logged = None
        self.data.begin_again()

    def _send(
        self, effect: CoordinatorEffect, *, shards: bool = True, workers: bool = True
    ) -> None:
        """Sends an effect to all that watch; the others get the whole state later."""
        for watcher, queue in self._queues.items():
            if shards if isinstance(watcher, int) else workers:
                queue.put_nowait(effect)

    def _tell_if_failed(self, queue: Queue) -> None:
        if self.core.progress.failure:
            queue.put_nowait(EndJob(reason=self.core.progress.failure))

    def _log_clipping(self) -> None:
        """Says that clipping has switched two-phase steps on, which cost a trip."""
        clip_grad_norm = self.core.model.clip_grad_norm
        if clip_grad_norm and self.core.settings.step_atomicity is StepAtomicity.CHUNK:
            log.info(
                "clip_grad_norm=%g switched two-phase steps on in BSP: the norm of a "
                "gradient is known only when every shard has all of it",
                clip_grad_norm,
            )

    def _log_record(self, record: Record) -> None:
        before, self._logged = self._logged, record
        for end in record.departures:
            worker = end.member.worker
            if before is not None and before.member_of(worker) is None:
                continue  # an earlier record has ended it, and is in it again
            if end.evicted:
                entry = self.core.roster.find(worker)
                why = f": it {entry.cut_off}" if entry and entry.cut_off else ""
                log.warning(
                    "%s is evicted after clock %d%s", worker, end.last_clock, why
                )
            else:
                log.info("%s has left after clock %d", worker, end.last_clock)
        log.info(
            "generation %d in %s: %s",
            record.generation,
            record.terms,
            ", ".join(str(m.worker) for m in record.members) or "nobody",
        )
