"""For whom a job waits, and since when: for the log, the status and errors.

Six things may wait: changes of the state for the disk of the coordinator; its core for
processes that are missing or lost; an open fence for a shard that does not answer; a
change of the mode for pushes of the mode before; a clock for workers that do not push,
as the shards report; and workers without data for those that have the rest of an epoch.
"""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from psserver.coordinator.core.coordinator import CoordinatorCore
from psserver.coordinator.core.data.epoch_ledger import EpochLedger
from psserver.coordinator.host.data_leases import DataWait
from psserver.edge.coordinator_settings import JobPhase
from pswire.awaited import Awaited, next_due
from pswire.limits import WAITING_INTERVAL_MS
from pswire.membership import ModeTerms, WorkerKey, WorkerState

log = logging.getLogger("psserver.coordinator")


@dataclass(frozen=True, slots=True)
class _Wait:
    """One wait.

    Attributes:
        source: What waits; it may go on for others than at first.
        since_ms: When it began.
        text: Who is waited for, with its last sign of life and its clock.
        is_usual: Whether most of its kind are over in milliseconds, so that it is
            worth a word only when it takes long.
    """

    source: str
    since_ms: int
    text: str
    is_usual: bool = False


class JobWaits:
    """For whom a job waits."""

    def __init__(
        self,
        core: CoordinatorCore,
        data_waits: Mapping[WorkerKey, DataWait] = MappingProxyType({}),
    ) -> None:
        self._core = core
        self._data_waits = data_waits
        self._phase: JobPhase | None = None
        self._missing_since_ms: int | None = None
        self._owing_since_ms: dict[int, int] = {}
        self._wanted_mode: ModeTerms | None = None
        self._wanted_since_ms = 0
        self._said_ms: dict[str, int] = {}
        self._generation: int | None = None
        self._record_ms = -1

    def note_mode(self, terms: ModeTerms, now_ms: int) -> None:
        """Somebody has asked for a mode; the newest wish counts."""
        if self._wanted_mode != terms:
            self._wanted_mode = terms
            self._wanted_since_ms = now_ms

    def note_report(self, shard_index: int) -> None:
        """A shard has answered the fence that is open."""
        self._owing_since_ms.pop(shard_index, None)

    def look(self, now_ms: int) -> None:
        """Notes what is waited for now, and logs what takes long."""
        self._note_record(now_ms)
        self._note_missing(now_ms)
        self._note_fence()
        long = [
            wait
            for wait in self._waits(now_ms)
            if now_ms - wait.since_ms >= WAITING_INTERVAL_MS
        ]
        for wait in long:
            waited_ms = now_ms - wait.since_ms
            said_ms = self._said_ms.get(wait.source, wait.since_ms)
            said_after_ms = max(0, said_ms - wait.since_ms)
            if waited_ms >= next_due(said_after_ms, WAITING_INTERVAL_MS):
                self._said_ms[wait.source] = now_ms
                log.warning("waiting for %s, for %.0f s", wait.text, waited_ms / 1000)
        if self._said_ms and not long:
            log.info("the job waits for nobody any more")
        sources = {wait.source for wait in long}
        self._said_ms = {k: v for k, v in self._said_ms.items() if k in sources}

    def text(self, now_ms: int, *, at_once: bool = False) -> str:
        """Whom the job waits for and for how long, in words; empty when for nobody.

        Args:
            now_ms: Monotonic time.
            at_once: Whether also what has not taken long yet is worth a word.
        """
        return "; ".join(
            wait.text + (f", for {waited_s:.0f} s" if waited_s >= 1 else "")
            for wait in self._told(now_ms, at_once=at_once)
            for waited_s in [(now_ms - wait.since_ms) / 1000]
        )

    @property
    def disk_text(self) -> str:
        """What the coordinator waits for that takes no change; empty if it takes any.

        It is sent to shards too: who waits at one would not learn of it otherwise.
        """
        unwritten = self._core.writes.failure
        if not unwritten:
            return ""
        return f"room on the coordinator's disk, or its repair ({unwritten})"

    def for_worker(self, now_ms: int) -> tuple[str, int]:
        """Whom the job waits for, and its longest wait in ms; empty when for nobody.

        A worker has a wait of its own, and keeps both times apart.
        """
        told = list(self._told(now_ms))
        waited_ms = max((now_ms - wait.since_ms for wait in told), default=0)
        return "; ".join(wait.text for wait in told), waited_ms

    def holders(self, ledger: EpochLedger, reader: WorkerKey, now_ms: int) -> str:
        """Which other workers have what is left of an epoch, in words."""
        roster = self._core.roster
        lost_ms = roster.lost_ms(now_ms)
        return ", ".join(
            str(
                Awaited(
                    worker.worker_id,
                    max(0, entry.clock),
                    entry.step_ms(now_ms),
                    lost_ms.get(worker, 0),
                )
            )
            for worker in sorted(ledger.holders - {reader})
            if (entry := roster.find(worker)) is not None
        )

    # Inside

    def _told(self, now_ms: int, *, at_once: bool = False) -> Iterator[_Wait]:
        for wait in self._waits(now_ms):
            is_long = now_ms - wait.since_ms >= WAITING_INTERVAL_MS
            if at_once or is_long or not wait.is_usual:
                yield wait

    def _waits(self, now_ms: int) -> Iterator[_Wait]:
        if self._core.phase in (JobPhase.FINISHED, JobPhase.FAILED):
            return  # what ended, or failed, waits for nobody
        if self.disk_text:
            yield _Wait("disk", self._core.writes.failed_ms, self.disk_text)
        missing = self._core.waiting_for()
        if missing:
            since_ms = self._missing_since_ms
            yield _Wait("core", now_ms if since_ms is None else since_ms, missing)
        if self._owing_since_ms:
            slots = self._core.shards.slots
            owing = [slots[index] for index in sorted(self._owing_since_ms)]
            names = ", ".join(slot.state_text(now_ms) for slot in owing)
            since_ms = min(self._owing_since_ms.values())
            fence = self._core.fence
            what = fence.kind.purpose if fence is not None else "what was decided"
            yield _Wait("fence", since_ms, f"{names} to confirm {what}", is_usual=True)
        yield from self._mode_wait()
        if self._core.shards.missing:
            return  # which is what the workers wait for too
        stragglers = list(self._stragglers(now_ms))
        yield from stragglers
        if not missing and not stragglers:
            # Else who has the data is named already.
            yield from self._data_wait(now_ms)

    def _data_wait(self, now_ms: int) -> Iterator[_Wait]:
        """Workers that have the rest of an epoch, while others have no data."""
        for reader, wait in self._data_waits.items():
            ledger = wait.ledger
            holders = self.holders(ledger, reader, now_ms)
            if holders:
                what = f"epoch {ledger.epoch} of {ledger.loader[:64]!r}"
                text = f"{holders} to train the rest of {what}"
                yield _Wait("data", wait.since_ms, text, is_usual=True)
                return

    def _mode_wait(self) -> Iterator[_Wait]:
        """A change of the mode that is still to come, and who is behind."""
        record = self._core.record
        if self._wanted_mode is None or record is None or self._core.writes.failure:
            return
        if self._core.mode_is(self._wanted_mode):
            self._wanted_mode = None
            return
        clocks = {m.worker: self._core.shards.clock_of(m) for m in record.members}
        newest = max(clocks.values(), default=0)
        behind = [f"{w} (clock {c})" for w, c in clocks.items() if c < newest]
        text = (
            f"the change to {self._wanted_mode.mode.name}, for which pushes of "
            f"{record.mode.name} are still to be applied"
        )
        if behind:
            text += f": behind are {', '.join(behind)}"
        yield _Wait("mode", self._wanted_since_ms, text, is_usual=True)

    def _note_record(self, now_ms: int) -> None:
        """Notes when a record came: what shards reported before may be over with it."""
        record = self._core.record
        generation = record.generation if record is not None else 0
        if self._generation not in (None, generation):
            self._record_ms = now_ms
        self._generation = generation

    def _note_missing(self, now_ms: int) -> None:
        phase, self._phase = self._phase, self._core.phase
        if not self._core.waiting_for():
            self._missing_since_ms = None
        elif phase is not self._phase:
            # Who waited for workers to begin waits for the first values from then on.
            self._missing_since_ms = now_ms
        elif self._missing_since_ms is None:
            self._missing_since_ms = now_ms

    def _note_fence(self) -> None:
        """Notes shards that owe a report, over all fences that came to nothing."""
        fence = self._core.fence
        if fence is None:
            self._owing_since_ms.clear()
            return
        silent = fence.silent_shards(len(self._core.shards.slots))
        for index in silent if fence.seeder is None else ():
            self._owing_since_ms.setdefault(index, fence.opened_ms)
        for index in set(self._owing_since_ms).difference(silent):
            del self._owing_since_ms[index]

    def _stragglers(self, now_ms: int) -> Iterator[_Wait]:
        """Members that do not push, or else shards that wait for something else.

        A shard reports up to a second late. Workers that were evicted since are left
        out, and so are lost ones: they are named already, with what would end the wait.
        """
        record = self._core.record
        members = {m.worker.worker_id for m in record.members} if record else set()
        roster = self._core.roster
        lost = {e.worker.worker_id for e in roster.in_state(WorkerState.LOST)}
        lost_ms = {w.worker_id: ms for w, ms in roster.lost_ms(now_ms).items()}
        workers: dict[str, str] = {}
        shards: dict[str, str] = {}
        since_ms: dict[str, int] = {}
        for slot in self._core.shards.slots:
            standing = slot.standing
            if not slot.is_watching or not standing.waited_ms:
                continue
            assert standing.heard_ms is not None
            began_ms = standing.heard_ms - standing.waited_ms
            for other in standing.waiting_for:
                if other.name in members and other.name not in lost:
                    own_ms = lost_ms.get(other.name, 0)
                    workers[other.name] = str(replace(other, lost_ms=own_ms))
                    earliest_ms = since_ms.get(other.name, began_ms)
                    since_ms[other.name] = min(earliest_ms, began_ms)
            if not standing.waiting_for and standing.heard_ms > self._record_ms:
                name = f"shard {slot.index}"
                shards[name] = (
                    f"{name} (clock {standing.applied_clock}), which waits "
                    f"for {standing.waiting_reason or 'its own work'}"
                )
                since_ms[name] = began_ms
        # What a shard waits for is over once that worker is: it is not named as well.
        found = workers or ({} if lost & members else shards)
        if found:
            began_ms = min(since_ms[name] for name in found)
            yield _Wait("clock", began_ms, ", ".join(found.values()))
