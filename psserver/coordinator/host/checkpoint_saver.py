"""Has checkpoints made: all that blocks, in threads, and who waits for one."""

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, NamedTuple, TypeVar

from psserver.coordinator.core.checkpoints import (
    LAST_STATE_WAIT_MS,
    STATE_WAIT_MS,
    CommittedCheckpoint,
    PendingCheckpoint,
)
from psserver.coordinator.core.coordinator import CoordinatorCore
from psserver.coordinator.core.coordinator_effects import (
    CheckpointFailed,
    CommitCheckpoint,
    NameCheckpoint,
    ReplaceStartPoint,
)
from psserver.coordinator.core.data.split_book import SplitBook
from psserver.coordinator.core.start_point import SavedJob
from psserver.coordinator.host.job_waits import JobWaits
from psserver.coordinator.host.restored_job import newest_saved, saved_by_name
from psserver.coordinator.storage.saved_job import manifest_of, saved_job_of
from psserver.edge.changes import Changes
from psserver.edge.file_calls import in_thread
from psserver.edge.lifecycle import LAST_CHECKPOINT_S
from psserver.edge.monotonic import now_ms
from pswire import failpoints
from pswire.byte_text import byte_text
from pswire.checkpoint.errors import (
    CheckpointError,
    DamagedError,
    FormatError,
    MissingError,
)
from pswire.checkpoint.folder import CheckpointFolder
from pswire.checkpoint.manifest import Manifest
from pswire.checkpoint.place import CheckpointPlace
from pswire.reasons import ErrorReason, Refusal

T = TypeVar("T")

log = logging.getLogger("psserver.coordinator")


class CheckpointReturn(NamedTuple):
    """What a return to a checkpoint means.

    Attributes:
        saved: The checkpoint.
        lost_step_count: Steps of all workers that are trained again.
        undone: Checkpoints that do not count any more.
    """

    saved: CommittedCheckpoint
    lost_step_count: int
    undone: tuple[str, ...]


class CheckpointSaver:
    """The folder of a job's checkpoints.

    A checkpoint gets a name there, its manifest is written, and those that are not
    needed any more are deleted.
    """

    def __init__(
        self,
        core: CoordinatorCore,
        changes: Changes,
        waits: JobWaits,
        splits: SplitBook,
        pump: Callable[[], Refusal | None],
    ) -> None:
        self._core = core
        self._changes = changes
        self._waits = waits
        self._splits = splits
        self._pump = pump
        self._folder: CheckpointFolder | None = None
        self._pruning: asyncio.Task[None] | None = None
        # Nothing is deleted while it is looked for where the job could return to.
        self._deleting = asyncio.Lock()
        self._has_warned = False
        self._last_count = 0  # of last checkpoints that are waited for
        self._tasks: set[asyncio.Task[None]] = set()

    def claim(self, folder: CheckpointFolder) -> None:
        """Makes a folder this process's, and finds the newest checkpoint in it.

        Raises:
            CheckpointError: It can't be written, or is another job's.
        """
        folder.claim(self._core.settings.job_id, secrets.token_hex(8))
        self._folder = folder
        for name in reversed(folder.names()):
            # Whether it is good is looked at when it is needed.
            with contextlib.suppress(DamagedError, FormatError, MissingError):
                self._core.checkpoints.newest = _committed(folder.manifest(name))
                return

    async def load_state(self, name: str) -> bytes:
        """What scripts have registered, as a checkpoint has it.

        Raises:
            Refusal: `CHECKPOINT_FAILED`: it can't be read, or is there no more.
        """
        folder = self._folder
        try:
            if folder is None:
                raise MissingError("this job makes no checkpoints")
            return await in_thread(lambda: folder.state(folder.manifest(name)))
        except CheckpointError as error:
            raise Refusal(
                ErrorReason.CHECKPOINT_FAILED,
                f"the registered state can't be loaded: {error}",
            ) from error

    def carry_out(
        self,
        effect: NameCheckpoint
        | CommitCheckpoint
        | CheckpointFailed
        | ReplaceStartPoint,
    ) -> None:
        match effect:
            case NameCheckpoint():
                self._begin(self._name(effect.checkpoint))
            case CommitCheckpoint():
                if failpoints.armed:
                    failpoints.hit("coordinator.checkpoint_parts")
                self._begin(self._commit(effect.checkpoint))
            case ReplaceStartPoint():
                self._begin(self._replace(effect))
            case CheckpointFailed():
                log.warning("no checkpoint was made: %s", effect.reason)

    async def save(self, timeout_s: float) -> CommittedCheckpoint:
        """Has a checkpoint made that is cut after this call.

        Raises:
            Refusal: `UNSUPPORTED`, `NOT_STARTED`, `SHARD_LOST`, `CHECKPOINT_FAILED` or
                `WAIT_TIMEOUT`.
        """
        return await self._made(timeout_s, needs_all_shards=False)

    async def restore(
        self, name: str, timeout_s: float, *, tries_only: bool
    ) -> CheckpointReturn:
        """Has the job return to a checkpoint, or finds out what that would mean.

        Args:
            name: Which one; empty for the newest good one.
            timeout_s: Longest time for reading all of it.
            tries_only: Whether nothing is to change.

        Raises:
            Refusal: `UNSUPPORTED`, `NOT_STARTED`, `SHARD_LOST`, `STATE_NOT_WRITTEN`,
                `CHECKPOINT_FAILED` with what is wrong with the checkpoint, or
                `WAIT_TIMEOUT`; no state changed.
        """
        core, folder = self._core, self._folder
        core.check_returnable()
        settings = core.checkpoints.settings
        assert settings is not None
        assert folder is not None, "claimed before anything is served"
        job_id = core.settings.job_id
        try:
            async with self._deleting:
                async with asyncio.timeout(timeout_s):
                    saved = await in_thread(
                        partial(saved_by_name, folder, settings.url, name, job_id)
                    )
                    found = saved.point.place.name
                    manifest = await in_thread(partial(folder.manifest, found))
                    undone = await in_thread(partial(folder.newer_than, found))
                lost = max(0, core.shards.version - saved.point.version)
                newest = _committed(manifest)
                if not tries_only:
                    undone = await self._leave_behind(manifest)
                    self._return(saved, newest)
        except TimeoutError:
            raise Refusal(
                ErrorReason.WAIT_TIMEOUT,
                f"the checkpoint was not read within {timeout_s:.1f} s",
            ) from None
        except CheckpointError as error:
            raise Refusal(
                ErrorReason.CHECKPOINT_FAILED,
                str(error),
                cure="the job goes on as before",
            ) from error
        return CheckpointReturn(newest, lost, undone)

    async def _leave_behind(self, manifest: Manifest) -> tuple[str, ...]:
        """Has no newer checkpoint count, one that is being committed included."""
        checkpoints, folder = self._core.checkpoints, self._folder
        assert folder is not None

        def is_committing() -> bool:
            pending = checkpoints.pending
            return pending is not None and pending.is_committing

        while True:
            await self._changes.wait_until(lambda: not is_committing())
            undone = await in_thread(partial(folder.return_to, manifest))
            if not is_committing():
                return undone

    def _return(self, saved: SavedJob, newest: CommittedCheckpoint) -> None:
        core = self._core
        core.check_returnable()  # it may have failed meanwhile
        core.progress.return_to(saved, "somebody has asked for it", now_ms())
        unwritten = self._pump()
        if unwritten is not None:
            raise unwritten
        core.returned(saved, newest, now_ms())

    async def save_last(self) -> None:
        """Has a checkpoint made before a process of the job ends, if shards live."""
        core = self._core
        if core.checkpoints.settings is None or core.record is None:
            return
        log.info("making a last checkpoint, for at most %g s", LAST_CHECKPOINT_S)
        self._last_count += 1
        core.checkpoints.state_wait_ms = LAST_STATE_WAIT_MS
        try:
            await self._made(LAST_CHECKPOINT_S, needs_all_shards=True)
            async with asyncio.timeout(LAST_CHECKPOINT_S):
                await self.pruned()
        except TimeoutError:
            log.warning("older checkpoints are not deleted: the folder does not answer")
        except Refusal as refusal:
            log.warning("no last checkpoint: %s", refusal.message)
        finally:
            # Several shards may end at a time.
            self._last_count -= 1
            if not self._last_count:
                core.checkpoints.state_wait_ms = STATE_WAIT_MS

    async def pruned(self) -> None:
        """Returns when nothing is being deleted."""
        if self._pruning is not None:
            await self._pruning

    async def _made(
        self, timeout_s: float, *, needs_all_shards: bool
    ) -> CommittedCheckpoint:
        """A checkpoint that is cut after this call.

        Args:
            timeout_s: Longest wait for it.
            needs_all_shards: Whether one that is away, or ends, is not waited for.
        """
        core, checkpoints = self._core, self._core.checkpoints
        wanted = core.want_checkpoint(now_ms())
        self._pump()
        await self._changes.wait_until(
            lambda: (
                checkpoints.answered >= wanted
                or bool(core.progress.failure)
                or (needs_all_shards and bool(core.shards.missing))
            ),
            timeout_s,
        )
        core.progress.check_alive()
        newest, away = checkpoints.newest, core.shards.missing
        if checkpoints.answered < wanted and needs_all_shards and away:
            names = ", ".join(f"shard {slot.index}" for slot in away)
            raise Refusal(ErrorReason.CHECKPOINT_FAILED, f"without {names}")
        if checkpoints.answered < wanted:
            pending = checkpoints.pending
            awaited = self._waits.text(now_ms(), at_once=True) or "the shards to write"
            if pending is not None and pending.state_of is not None:
                awaited = f"the registered state of {pending.state_of}"
            raise Refusal(
                ErrorReason.WAIT_TIMEOUT,
                f"no checkpoint within {timeout_s:.1f} s: waiting for {awaited}",
            )
        if checkpoints.failure or newest is None:
            raise Refusal(
                ErrorReason.CHECKPOINT_FAILED,
                f"no checkpoint was made: {checkpoints.failure}",
            )
        return newest

    # Inside

    def _begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Begins work that nobody waits for."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _name(self, checkpoint: PendingCheckpoint) -> None:
        settings = self._core.checkpoints.settings
        assert settings is not None
        folder = self._folder
        assert folder is not None, "claimed before anything is saved"
        version = checkpoint.cut.version
        name = await self._done(checkpoint, lambda: folder.begin(version))
        if name is not None:
            place = CheckpointPlace(settings.url, name)
            self._core.checkpoint_named(checkpoint.snapshot_id, place)
            self._pump()

    async def _commit(self, checkpoint: PendingCheckpoint) -> None:
        settings, splits = self._core.settings, self._splits.all()
        folder = self._folder
        place = checkpoint.place
        assert folder is not None, "claimed before anything is saved"
        assert place is not None, "shards have written it somewhere"

        def write() -> SavedJob:
            state = None
            if checkpoint.state:
                state = folder.write_state(place.name, checkpoint.state)
            manifest = manifest_of(
                checkpoint,
                settings,
                splits,
                created_unix_s=time.time(),
                state=state,
            )
            folder.commit(manifest)
            return saved_job_of(manifest, place.url)

        saved = await self._done(checkpoint, write)
        if saved is None:
            return
        if failpoints.armed:
            failpoints.hit("coordinator.checkpoint_committed")
        self._core.checkpoint_committed(checkpoint.snapshot_id, saved, now_ms())
        log.info(
            "checkpoint %s is complete: version %d, clock %d, %s in %.1f s",
            place.name,
            checkpoint.cut.version,
            checkpoint.cut.clock,
            byte_text(checkpoint.byte_count),
            (now_ms() - checkpoint.decided_ms) / 1000,
        )
        self._warn_of_state(checkpoint)
        self._pump()
        if self._pruning is None or self._pruning.done():
            self._pruning = self._begin(self._prune())

    async def _replace(self, effect: ReplaceStartPoint) -> None:
        """Looks for another checkpoint, the newest good one."""
        settings = self._core.checkpoints.settings
        assert settings is not None
        assert self._folder is not None
        log.error("waiting for %s", effect.reason)
        try:
            saved = await in_thread(partial(newest_saved, self._folder, settings.url))
        except CheckpointError as error:
            log.error("no other checkpoint is found: %s", error)
            return
        if saved is not None:
            self._core.replace_start_point(saved, effect.reason, now_ms())
            self._pump()

    def _warn_of_state(self, checkpoint: PendingCheckpoint) -> None:
        """Says once that a checkpoint lacks what scripts have registered."""
        worker, place = checkpoint.lacks_state_of, checkpoint.place
        if worker is None or place is None or self._has_warned:
            return
        self._has_warned = True
        log.warning(
            "checkpoint %s is without what %s has registered with ps.register_state: "
            "its script has not gone on from the push of the cut in time, or is long "
            "beyond it; a job that goes on from there has all else",
            place.name,
            worker,
        )

    async def _prune(self) -> None:
        settings = self._core.checkpoints.settings
        assert settings is not None
        assert self._folder is not None
        prune, job_id = self._folder.prune, self._core.settings.job_id
        try:
            async with self._deleting:
                deleted = await in_thread(
                    partial(prune, job_id, settings.keep_count), is_background=True
                )
        except CheckpointError as error:
            log.warning("older checkpoints are not deleted: %s", error)
            return
        if deleted:
            log.info("deleted %s", ", ".join(deleted))

    async def _done(
        self, checkpoint: PendingCheckpoint, work: Callable[[], T]
    ) -> T | None:
        """What work for a checkpoint returns; None when it fails, with the checkpoint.

        In a thread: a disk or a store may take its time.
        """
        try:
            return await in_thread(work)
        except CheckpointError as error:
            reason = str(error)
        except Exception as error:  # else it would be in the making for ever
            log.exception("a checkpoint could not be written; this is a bug")
            reason = type(error).__name__
        self._core.fail_checkpoint(checkpoint.snapshot_id, reason, now_ms())
        self._pump()
        return None


def _committed(manifest: Manifest) -> CommittedCheckpoint:
    """A checkpoint that an earlier process has made, or this one before a return."""
    age_s = max(0.0, time.time() - manifest.created_unix_s)
    return CommittedCheckpoint(
        name=manifest.name,
        version=manifest.version,
        clock=manifest.clock,
        byte_count=manifest.byte_count,
        committed_ms=now_ms() - round(age_s * 1000),
    )
