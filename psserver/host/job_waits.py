"""For whom a job waits, and since when: for the log, the status and errors.

Three things may keep a job waiting: the coordinator's core for processes that are
missing or lost; an open fence for a shard that does not answer; and a clock for workers
that do not push, as the shards tell.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass

from psserver.core.coordinator import CoordinatorCore
from psserver.core.roster import WorkerEntry, WorkerState
from psserver.core.shard_map import ShardSlot
from pswire.limits import WAITING_INTERVAL_MS

REPEAT_MS = 10_000
"""How often the log says it again."""

log = logging.getLogger("psserver.coordinator")


@dataclass(frozen=True, slots=True)
class _Wait:
    """One wait.

    Attributes:
        source: What waits; a wait of one source goes on while there is any.
        since_ms: When it began.
        text: Who is waited for, with its last sign of life and its clock.
    """

    source: str
    since_ms: int
    text: str


class JobWaits:
    """For whom a job waits.

    Args:
        core: The job's state.
    """

    def __init__(self, core: CoordinatorCore) -> None:
        self._core = core
        self._missing_since_ms: int | None = None
        self._owing_since_ms: dict[int, int] = {}
        self._said_ms: int | None = None

    def note_report(self, shard_index: int) -> None:
        """A shard has answered the fence that is open."""
        self._owing_since_ms.pop(shard_index, None)

    def look(self, now_ms: int) -> None:
        """Notes what is waited for now, and logs what takes long."""
        self._note_missing(now_ms)
        self._note_fence()
        long = [
            wait
            for wait in self._waits(now_ms)
            if now_ms - wait.since_ms >= WAITING_INTERVAL_MS
        ]
        if not long:
            if self._said_ms is not None:
                log.info("nobody is waited for any more")
            self._said_ms = None
        elif self._said_ms is None or now_ms - self._said_ms >= REPEAT_MS:
            self._said_ms = now_ms
            for wait in long:
                waited_s = (now_ms - wait.since_ms) / 1000
                log.warning("waiting for %s, for %.0f s", wait.text, waited_s)

    def text(self, now_ms: int) -> str:
        """Whom the job waits for, in words; empty when for nobody.

        A fence that is open is worth a word when it takes long, since most take
        milliseconds.
        """
        return "; ".join(
            f"{wait.text}, for {(now_ms - wait.since_ms) / 1000:.0f} s"
            for wait in self._waits(now_ms)
            if wait.source != "fence" or now_ms - wait.since_ms >= WAITING_INTERVAL_MS
        )

    # Inside

    def _waits(self, now_ms: int) -> Iterator[_Wait]:
        missing = self._core.waiting_for()
        if missing:
            since_ms = self._missing_since_ms
            text = missing + self._signs_of_life(now_ms)
            yield _Wait("core", now_ms if since_ms is None else since_ms, text)
        if self._owing_since_ms:
            slots = self._core.shards.slots
            names = [
                _shard_text(slots[i], now_ms) for i in sorted(self._owing_since_ms)
            ]
            text = f"{', '.join(names)} to answer a fence"
            yield _Wait("fence", min(self._owing_since_ms.values()), text)
        yield from self._stragglers(now_ms)

    def _note_missing(self, now_ms: int) -> None:
        if not self._core.waiting_for():
            self._missing_since_ms = None
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

    def _signs_of_life(self, now_ms: int) -> str:
        """Last sign of life and clock of all that are missing or lost."""
        lost = self._core.roster.in_state(WorkerState.LOST)
        shown = [
            *(self._worker_text(entry, now_ms) for entry in lost),
            *(
                _shard_text(slot, now_ms)
                for slot in self._core.shards.missing
                if slot.process_id
            ),
        ]
        return f" ({', '.join(shown)})" if shown else ""

    def _worker_text(self, entry: WorkerEntry, now_ms: int) -> str:
        silent_s = max(0, now_ms - entry.heard_ms) / 1000
        record = self._core.record
        member = record.member_of(entry.worker) if record is not None else None
        at = f", clock {self._core.shards.clock_of(member)}" if member else ""
        return f"{entry.worker} silent for {silent_s:.0f} s{at}"

    def _stragglers(self, now_ms: int) -> Iterator[_Wait]:
        found: dict[str, str] = {}
        since_ms = now_ms
        for slot in self._core.shards.slots:
            standing = slot.standing
            if not slot.is_watching or not standing.waiting_for:
                continue
            assert standing.heard_ms is not None
            since_ms = min(since_ms, standing.heard_ms - standing.waited_ms)
            for other in standing.waiting_for:
                found[other.name] = (
                    f"{other.name} (clock {other.clock}, "
                    f"{_silence_text(other.silent_ms)})"
                )
        if found:
            yield _Wait("clock", since_ms, ", ".join(found.values()))


def _shard_text(slot: ShardSlot, now_ms: int) -> str:
    silent_ms = -1 if slot.heard_ms is None else max(0, now_ms - slot.heard_ms)
    return (
        f"shard {slot.index} ({_silence_text(silent_ms)}, "
        f"clock {slot.standing.applied_clock})"
    )


def _silence_text(silent_ms: int) -> str:
    return "never heard of" if silent_ms < 0 else f"silent for {silent_ms / 1000:.0f} s"
