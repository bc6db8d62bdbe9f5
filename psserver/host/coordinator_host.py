"""The coordinator at work: its core, its file, and the streams that follow it."""

import asyncio
import logging
import time
from dataclasses import dataclass

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
from psserver.core.job_settings import JobSettings
from psserver.core.ledger import EpochLedger, EpochShape
from psserver.core.push import DataRange
from psserver.core.record import WorkerKey
from psserver.core.roster import GONE, WorkerEntry
from psserver.core.shard_map import ShardSlot
from psserver.core.snapshots import SnapshotEntry
from psserver.host.changes import Changes
from psserver.host.restored_job import restored_core
from psserver.storage.job_codec import StoredShard
from psserver.storage.job_store import JobStore
from pswire.reasons import ErrorReason, Refusal

TICK_S = 0.05
"""How often time is looked at: the coarsest error of any time-out."""

PAUSE_MS = 2_000
"""Between two looks at the time: the machine or this process stood still. Peers then
close connections that were not answered for 2.5 s, and are back within a second or
two, which is longer than the grace for a worker whose own connection broke."""

NEWER_POLL_S = 0.05
"""How soon a reader that wants a newer version tries again."""

FAREWELL_S = 3.0
"""How long a coordinator stays after its job has failed, so that also those who come
or come back at that moment hear why."""

log = logging.getLogger("psserver.coordinator")

Event = CoordinatorEffect
"""What travels on a watch: the effects themselves, translated by the servicer."""


@dataclass(frozen=True, slots=True)
class PinnedSnapshot:
    """A snapshot and a reader's pin on it."""

    entry: SnapshotEntry
    pin_id: int


class CoordinatorHost:
    """One job.

    Attributes:
        core: The job's state.
        changes: Notified whenever anything may have changed.
    """

    def __init__(self, settings: JobSettings, store: JobStore) -> None:
        self._store = store
        self.core = restored_core(settings, store, self.now_ms())
        self.changes = Changes()
        self._shard_watches: dict[int, asyncio.Queue[Event]] = {}
        self._worker_watches: dict[WorkerKey, asyncio.Queue[Event]] = {}

    @staticmethod
    def now_ms() -> int:
        """Monotonic time."""
        return time.monotonic_ns() // 1_000_000

    async def run_clock(self) -> None:
        """Tells the core the time until cancelled."""
        told_ms = self.now_ms()
        while True:
            await asyncio.sleep(TICK_S)
            now_ms = self.now_ms()
            if now_ms - told_ms >= PAUSE_MS:
                log.warning("this process stood still for %d ms", now_ms - told_ms)
                self.core.have_patience(now_ms)
            told_ms = now_ms
            self.core.tick(now_ms)
            self.pump()

    async def until_failed(self) -> str:
        """Returns why the job can't go on, a farewell after it can't."""
        await self.changes.wait_until(lambda: bool(self.core.failure))
        await asyncio.sleep(FAREWELL_S)
        return self.core.failure

    def pump(self) -> None:
        """Carries out what the core wants done; safe to call at any time."""
        for effect in self.core.take_effects():
            match effect:
                case Persist():
                    self._store.save_record(effect.record)
                case SchemaFixed():
                    assert self.core.model.schema is not None
                    self._store.save_model(
                        self.core.model.schema, self.core.model.optimizers
                    )
                    self._tell_shards(effect)
                case Prepare() | Abort() | DecideCut() | ReleaseImage():
                    self._tell_shards(effect)
                case OrderSeed():
                    self._tell_worker(effect.worker, effect)
                case Announce():
                    log.info(
                        "generation %d: %s",
                        effect.record.generation,
                        ", ".join(str(m.worker) for m in effect.record.members)
                        or "nobody",
                    )
                    self._tell_everybody(effect)
                case EndJob():
                    log.error("the job has failed: %s", effect.reason)
                    self._tell_everybody(effect)
        self.changes.notify()

    # Shards

    def register_shard(self, *, process_id: str, address: str) -> ShardSlot:
        """Gives a shard its place and keeps it."""
        slot = self.core.register_shard(
            process_id=process_id, address=address, now_ms=self.now_ms()
        )
        self._store.save_shards(
            tuple(
                StoredShard(
                    index=s.index,
                    process_id=s.process_id,
                    address=s.address,
                    incarnation=s.incarnation,
                )
                for s in self.core.shards.slots
                if s.process_id
            )
        )
        self.pump()
        return slot

    def open_shard_watch(self, slot: ShardSlot) -> asyncio.Queue[Event]:
        """Begins a shard's watch; an older one of the same shard ends silently."""
        queue: asyncio.Queue[Event] = asyncio.Queue()
        self._shard_watches[slot.index] = queue
        fence = self.core.fence
        if fence is not None and slot.index not in fence.reports:
            queue.put_nowait(
                Prepare(fence_number=fence.number, kind=fence.kind, seeder=fence.seeder)
            )
        for snapshot_id in self.core.snapshots.released:
            queue.put_nowait(ReleaseImage(snapshot_id=snapshot_id))
        self._tell_if_failed(queue)
        if not slot.is_watching:
            log.info("shard %d at %s is here", slot.index, slot.address)
        self.core.shard_watching(slot, self.now_ms())
        self.pump()
        return queue

    def close_shard_watch(self, slot: ShardSlot, queue: asyncio.Queue[Event]) -> None:
        """A shard's watch has ended."""
        if self._shard_watches.get(slot.index) is queue:
            del self._shard_watches[slot.index]
            log.warning("the connection to shard %d broke", slot.index)
            self.core.shard_broken(slot, self.now_ms())
            self.pump()

    # Workers

    def register_worker(
        self, *, process_id: str, worker_id: str, address: str
    ) -> WorkerEntry:
        """Gives a worker its identity and keeps it."""
        entry = self.core.register_worker(
            process_id=process_id,
            worker_id=worker_id,
            address=address,
            now_ms=self.now_ms(),
        )
        self._store.save_workers(
            self.core.roster.incarnations, self.core.roster.processes
        )
        return entry

    def open_worker_watch(self, entry: WorkerEntry) -> asyncio.Queue[Event]:
        """Begins a worker's watch; an older one of the same worker ends silently."""
        self.core.worker_watching(entry, self.now_ms())
        queue: asyncio.Queue[Event] = asyncio.Queue()
        self._worker_watches[entry.worker] = queue
        self._tell_if_failed(queue)
        self.pump()
        return queue

    def close_worker_watch(
        self, entry: WorkerEntry, queue: asyncio.Queue[Event]
    ) -> None:
        """A worker's watch has ended."""
        if self._worker_watches.get(entry.worker) is queue:
            del self._worker_watches[entry.worker]
            if entry.state not in GONE:
                log.warning("the connection to %s broke", entry.worker)
            self.core.worker_broken(entry, self.now_ms())
            self.pump()

    async def leave(
        self, entry: WorkerEntry, *, sequence: int, consumed: tuple[DataRange, ...]
    ) -> None:
        """Ends a membership; returns when the record is written."""
        self.core.leave(
            entry, sequence=sequence, consumed=consumed, now_ms=self.now_ms()
        )
        self._keep_epochs({(piece.loader, piece.epoch) for piece in consumed})
        self.pump()
        await self.changes.wait_until(
            lambda: entry.state in GONE or bool(self.core.failure)
        )

    async def next_event(self, queue: asyncio.Queue[Event], timeout_s: float) -> bool:
        """Waits for an event; returns whether there is one."""
        return await self.changes.wait_until(lambda: not queue.empty(), timeout_s)

    # Data

    def open_epoch(
        self,
        entry: WorkerEntry,
        loader: str,
        epoch: int,
        shape: EpochShape,
        consumed: tuple[DataRange, ...],
    ) -> int:
        """Opens an epoch for a worker and returns its seed."""
        # Only what changes is written: each write is a wait for the disk.
        changed = {
            (loader, epoch),
            *((piece.loader, piece.epoch) for piece in consumed),
        }
        changed.update(
            (ledger.loader, ledger.epoch)
            for ledger in self.core.ledger.epochs()
            if ledger.loader == loader and ledger.has_of(entry.worker)
        )
        seed = self.core.ledger.open_epoch(entry.worker, loader, epoch, shape, consumed)
        self._keep_epochs(changed)
        self.changes.notify()
        return seed

    def consume(self, entry: WorkerEntry, ranges: tuple[DataRange, ...]) -> None:
        """Takes a worker's report of ranges it has consumed."""
        self.core.ledger.consume(entry.worker, ranges)
        self._keep_epochs({(piece.loader, piece.epoch) for piece in ranges})
        self.changes.notify()

    def keep_epoch(self, ledger: EpochLedger) -> None:
        """Makes an epoch's state durable."""
        self._store.save_epoch(ledger)

    async def lease(
        self,
        entry: WorkerEntry,
        ledger: EpochLedger,
        *,
        count_max: int,
        wait: bool,
    ) -> list[DataRange]:
        """Leases batches, waiting until there are some or the epoch is closed.

        Raises:
            Refusal: `WORKER_INCARNATION_STALE` when the worker is gone meanwhile:
                what it took then would never come back.
        """
        leased: list[DataRange] = []

        def served() -> bool:
            self.core.check_present(entry)
            if self.core.failure or ledger.is_closed:
                return True
            participants = self.core.participants(ledger.loader)
            leased.extend(ledger.lease(entry.worker, participants, count_max))
            return bool(leased)

        if wait:
            await self.changes.wait_until(served)
        else:
            served()
        self.keep_epoch(ledger)
        self.changes.notify()
        return leased

    # Snapshots

    async def snapshot(self, *, newer_than: int, timeout_s: float) -> PinnedSnapshot:
        """A snapshot that was cut after this call and is newer than a version.

        Raises:
            Refusal: `NOT_STARTED`, `CUT_FAILED`, `WAIT_TIMEOUT` or `SHARD_LOST`.
        """
        snapshots = self.core.snapshots
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        finished = False
        while True:
            wanted = self.core.want_cut(self.now_ms())
            self.pump()
            done = await self.changes.wait_until(
                lambda wanted=wanted: (  # type: ignore[misc]
                    snapshots.finished_cut_count >= wanted or bool(self.core.failure)
                ),
                deadline - loop.time(),
            )
            if self.core.failure:
                raise Refusal(
                    ErrorReason.SHARD_LOST, f"the job has failed: {self.core.failure}"
                )
            finished = finished or done
            newest = snapshots.newest
            is_ready = done and not snapshots.failure and newest is not None
            if newest is not None and is_ready and newest.version > newer_than:
                return PinnedSnapshot(newest, snapshots.pin(newest, self.now_ms()))
            if loop.time() >= deadline:
                raise self._no_snapshot(newer_than, timeout_s, finished=finished)
            await asyncio.sleep(min(NEWER_POLL_S, max(0.0, deadline - loop.time())))

    def release_snapshot(self, snapshot_id: int, pin_id: int) -> None:
        """Ends a reader's pin."""
        self.core.release_snapshot(snapshot_id, pin_id, self.now_ms())
        self.pump()

    def _no_snapshot(
        self, newer_than: int, timeout_s: float, *, finished: bool
    ) -> Refusal:
        snapshots = self.core.snapshots
        held_by = snapshots.held_by(self.now_ms())
        if (
            finished
            and not held_by
            and snapshots.newest is not None
            and not snapshots.failure
        ):
            return Refusal(
                ErrorReason.WAIT_TIMEOUT,
                f"no version above {newer_than} within {timeout_s:.1f} s: the newest "
                f"is {snapshots.newest.version}; training stands still or has ended",
            )
        why = (
            snapshots.failure or held_by or self.core.waiting_for() or "a shard is slow"
        )
        return Refusal(
            ErrorReason.CUT_FAILED, f"no snapshot within {timeout_s:.1f} s: {why}"
        )

    # Inside

    def _tell_if_failed(self, queue: asyncio.Queue[Event]) -> None:
        if self.core.failure:
            queue.put_nowait(EndJob(reason=self.core.failure))

    def _tell_shards(self, event: Event) -> None:
        for queue in self._shard_watches.values():
            queue.put_nowait(event)

    def _tell_worker(self, worker: WorkerKey, event: Event) -> None:
        queue = self._worker_watches.get(worker)
        if queue is not None:
            queue.put_nowait(event)

    def _tell_everybody(self, event: Event) -> None:
        self._tell_shards(event)
        for queue in self._worker_watches.values():
            queue.put_nowait(event)

    def _keep_epochs(self, keys: set[tuple[str, int]]) -> None:
        for ledger in self.core.ledger.epochs():
            if (ledger.loader, ledger.epoch) in keys:
                self.keep_epoch(ledger)
