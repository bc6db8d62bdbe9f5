"""Readers that wait for a snapshot at the coordinator."""

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import dataclass

from psserver.coordinator.core.coordinator import CoordinatorCore
from psserver.coordinator.core.snapshots import SnapshotEntry
from psserver.coordinator.host.job_waits import JobWaits
from psserver.edge.changes import Changes
from psserver.edge.coordinator_settings import JobPhase
from psserver.edge.monotonic import now_ms
from pswire.reasons import ErrorReason, Refusal

_PIN_BITS = 62

NEWER_POLL_S = 0.05
"""How soon a reader that wants a newer version tries again."""


@dataclass(frozen=True, slots=True)
class PinnedSnapshot:
    """A snapshot and a reader's pin on it.

    Attributes:
        entry: The snapshot.
        pin_id: Name of the pin.
        ttl_ms: How long it lasts.
    """

    entry: SnapshotEntry
    pin_id: int
    ttl_ms: int


class SnapshotRequests:
    """Finds or makes snapshots, and frees them."""

    def __init__(
        self,
        core: CoordinatorCore,
        changes: Changes,
        waits: JobWaits,
        pump: Callable[[], object],
    ) -> None:
        self._core = core
        self._changes = changes
        self._waits = waits
        self._pump = pump

    async def get(self, *, newer_than: int, timeout_s: float) -> PinnedSnapshot:
        """A snapshot that was cut after this call and is newer than a version.

        Raises:
            Refusal: `NOT_STARTED`, `CUT_FAILED`, `WAIT_TIMEOUT` or `SHARD_LOST`.
        """
        snapshots = self._core.snapshots
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        finished = False
        while True:
            done = await self._cut_done(deadline - loop.time())
            finished = finished or done
            newest = snapshots.newest
            is_ready = done and not snapshots.failure and newest is not None
            if newest is not None and is_ready and newest.version > newer_than:
                return self._pinned(newest)
            if loop.time() >= deadline:
                raise self._none(newer_than, timeout_s, finished=finished)
            await asyncio.sleep(min(NEWER_POLL_S, max(0.0, deadline - loop.time())))

    def release(self, snapshot_id: int, pin_id: int) -> None:
        self._core.release_snapshot(snapshot_id, pin_id, now_ms())
        self._pump()

    def _pinned(self, entry: SnapshotEntry) -> PinnedSnapshot:
        at_ms = now_ms()
        byte_count = self._core.model.byte_count
        # Whoever knows a pin may release it: no other reader guesses it.
        name = secrets.randbits(_PIN_BITS)
        pin_id = self._core.snapshots.pin(entry, at_ms, byte_count, pin_id=name)
        return PinnedSnapshot(entry, pin_id, entry.pins[pin_id] - at_ms)

    async def _cut_done(self, timeout_s: float) -> bool:
        """Whether a cut that began after this call has come to an end in time."""
        core = self._core
        wanted = core.want_cut(now_ms())
        self._pump()
        done = await self._changes.wait_until(
            lambda: (
                core.snapshots.finished_cut_count >= wanted
                or bool(core.progress.failure)
            ),
            timeout_s,
        )
        core.progress.check_alive()
        return done

    def _none(self, newer_than: int, timeout_s: float, *, finished: bool) -> Refusal:
        snapshots = self._core.snapshots
        held_by = snapshots.held_by(now_ms())
        newest = snapshots.newest
        if finished and not held_by and newest is not None and not snapshots.failure:
            is_over = self._core.phase is JobPhase.FINISHED
            return Refusal(
                ErrorReason.WAIT_TIMEOUT,
                f"no version above {newer_than} within {timeout_s:.1f} s: the newest "
                f"is {newest.version}, and "
                + ("the job is finished" if is_over else "training makes no progress"),
                cure="ask for that one"
                if is_over
                else "look with `psctl status` for whom the job waits",
            )
        failure = snapshots.failure or held_by
        if failure:
            return Refusal(
                ErrorReason.CUT_FAILED,
                f"no snapshot within {timeout_s:.1f} s: {failure}",
            )
        # The cut is under way: there was no time for it, be it that the job began late.
        waited_for = self._waits.text(now_ms()) or "a shard is slow"
        return Refusal(
            ErrorReason.WAIT_TIMEOUT,
            f"no snapshot within {timeout_s:.1f} s: {waited_for}",
        )
