"""A job as its coordinator finds it: new, or as an earlier process left it."""

import logging
import secrets
from contextlib import suppress
from dataclasses import replace
from typing import Final

from psserver.coordinator.core.coordinator import CoordinatorCore
from psserver.coordinator.core.coordinator_effects import Persist
from psserver.coordinator.core.data.ledger import carried_over, participations_of
from psserver.coordinator.core.start_point import SavedJob, StartPoint
from psserver.coordinator.storage.job_codec import StoredJob
from psserver.coordinator.storage.job_store import JobStore, NotWrittenError
from psserver.coordinator.storage.saved_job import saved_job_of
from psserver.edge.coordinator_settings import CoordinatorSettings
from psserver.edge.state_folder import StateFolderError
from pswire.checkpoint.errors import DamagedError, MissingError, OwnerError
from pswire.checkpoint.folder import CheckpointFolder

log = logging.getLogger("psserver.coordinator")

MEASURE_KEY_BYTES: Final = 32

STARTS_PER_FLOOR: Final = 1_000
FLOOR_COUNT: Final = 1_000_000
"""Of numbers that starts of workers begin with when it is not known how often they
were started: a thousand starts of each worker lie between two of them."""


def new_job_id() -> str:
    return f"job-{secrets.token_hex(6)}"


def newest_saved(
    folder: CheckpointFolder, url: str, *, verifies: bool = True
) -> SavedJob | None:
    """The job as its newest checkpoint has it; None where there is none.

    Args:
        folder: Where to look.
        url: The same, as it is sent to shards.
        verifies: Whether one counts only if every byte of it is as it was written, and
            all its values are finite; else if its manifest is.

    Raises:
        CheckpointError: The folder can't be read, a newer release wrote it, or it has
            checkpoints none of which counts: no job begins anew beside them unasked.
    """
    if verifies:
        manifest, problems = folder.newest_good(
            check=lambda each: saved_job_of(each, url)
        )
        for name, texts in problems.items():
            log.warning("checkpoint %s is not used: %s", name, "; ".join(texts))
        if manifest is not None:
            return saved_job_of(manifest, url)
        complete = [name for name in problems if folder.is_complete(name)]
        if complete:
            raise DamagedError(
                f"of {len(complete)} in {folder.url} no checkpoint is good: put their "
                "files back from a copy, or name another folder for a new job; "
                "`psctl checkpoint verify` says what is wrong with each"
            )
        return None
    for name in reversed(folder.names()):
        with suppress(DamagedError, MissingError):
            manifest = folder.manifest(name)
            if manifest.is_finite:
                return saved_job_of(manifest, url)
    return None


def saved_by_name(
    folder: CheckpointFolder, url: str, name: str, job_id: str
) -> SavedJob:
    """A job as one of its checkpoints has it, of which every byte is read.

    Args:
        folder: Where it is.
        url: The same, as it is sent to shards.
        name: Its name; empty for the newest good one.
        job_id: The job.

    Raises:
        CheckpointError: There is none, it is another job's, a newer release wrote it,
            it is not as it was written, or its values are not finite.
    """
    if not name:
        saved = newest_saved(folder, url)
        if saved is None:
            raise MissingError(f"there is no checkpoint in {folder.url}")
        return saved
    manifest = folder.manifest(name)
    if manifest.job_id != job_id:
        raise OwnerError(
            f"{name} in {folder.url} is of job {manifest.job_id}, and this is job "
            f"{job_id}: name one of its own"
        )
    if problems := folder.verify(name):
        raise DamagedError("; ".join(problems))
    if not manifest.is_finite:
        raise DamagedError(
            f"{name} in {folder.url} has values that are not finite: use another one"
        )
    return saved_job_of(manifest, url)


def restored_core(
    settings: CoordinatorSettings,
    store: JobStore,
    now_ms: int,
    saved: SavedJob | None = None,
) -> CoordinatorCore:
    """The core as an earlier process left it, or a new one.

    Args:
        settings: What the command line says.
        store: The state folder.
        now_ms: Monotonic time.
        saved: The job as its newest good checkpoint has it. With a state folder that
            has no job it goes on from there.

    Raises:
        StateFolderError: The folder holds a job of another shape, or another job than
            the checkpoint.
    """
    stored = store.load()
    measure_key = secrets.token_bytes(MEASURE_KEY_BYTES)
    if stored is None:
        store.save_job(
            job_id=saved.job_id if saved else settings.job_id,
            job_seed=saved.job_seed if saved else settings.job_seed,
            shard_count=settings.shard_count,
            measure_key=measure_key,
        )
        store.save_step_rules(_step_rules(settings))
        if saved is None:
            return CoordinatorCore(replace(settings, measure_key=measure_key))
        stored = _loaded(store)
    if saved is not None and stored.job_id != saved.job_id:
        raise StateFolderError(
            f"the state folder holds job {stored.job_id}, and the checkpoints are of "
            f"job {saved.job_id}: give the --state-dir and the --checkpoint-dir of one "
            "job, or to go on with the job of the checkpoints a new --state-dir"
        )
    if saved is not None and stored.record is None:
        before = stored.start_point
        # Another one since, if somebody has gone back behind that of before.
        if before is None or before.place.name != saved.point.place.name:
            _begin_from(saved, store, before)
            stored = _loaded(store)
    if stored.shard_count != settings.shard_count:
        raise StateFolderError(
            f"the state folder holds a job with {stored.shard_count} shards, "
            f"--shards says {settings.shard_count}; use another folder"
            + (", to go on from the newest checkpoint with so many" if saved else "")
        )
    _check_step_rules(stored.step_rules, settings)
    if saved is not None and settings.aggregation.is_robust:
        _check_clocked(saved, settings)
    core = CoordinatorCore(
        replace(
            settings,
            job_id=stored.job_id,
            job_seed=stored.job_seed,
            measure_key=stored.measure_key or measure_key,
        ),
        start_count=store.count_start(),
    )
    for shard in stored.shards:
        slot = core.shards.slots[shard.index]
        slot.process_id = shard.process_id
        slot.address = shard.address
        slot.incarnation = shard.incarnation
        slot.memory = shard.memory
        # As if the connection broke when the time to come back is over.
        slot.broken_ms = now_ms + settings.return_ms
    core.restore(
        terms=stored.terms,
        record=stored.record,
        incarnations=stored.incarnations,
        processes=stored.worker_processes,
        now_ms=now_ms,
        start_point=stored.start_point,
    )
    core.restore_ledger(store.load_epochs(), stored.enrolments)
    core.way_back = saved
    if stored.record is not None:
        log.info("restored the job at generation %d", stored.record.generation)
    elif stored.start_point is not None:
        log.info("the job goes on from %s", stored.start_point)
    return core


def _begin_from(saved: SavedJob, store: JobStore, before: StartPoint | None) -> None:
    """Keeps a job as a checkpoint has it, in a state folder without a record.

    How often workers and shards were started after the checkpoint is not known, and
    some may live: numbers begin where no start of before has any, drawn since nothing
    is left that would tell them apart. Nor is it known what was pushed since: of
    epochs that were open all that is left counts as pushed once before.
    """
    spent_count = saved.point.participation_count_before + participations_of(
        saved.epochs
    )
    if before is not None:
        spent_here = before.participation_count_before
        spent_here += participations_of(store.load_epochs())
        spent_count = max(spent_count, spent_here)
    floor = (1 + secrets.randbelow(FLOOR_COUNT)) * STARTS_PER_FLOOR
    floor += max(saved.incarnations.values(), default=0)
    generation = saved.point.generation
    if before is not None:
        floor = before.incarnation_floor
        generation = before.generation
    point = replace(
        saved.point,
        incarnation_floor=floor,
        generation=generation,
        participation_count_before=carried_over(spent_count, saved.epochs),
    )
    if saved.terms.privacy is not None:
        log.warning(
            "differential privacy: how often samples were part of pushes is counted "
            "as of %s; what was pushed after it, beyond the epochs that were open "
            "then, is not known here, and has to be added to what `psctl status` says",
            point,
        )
    try:
        for split in saved.splits:
            store.write(Persist(split=split))
        store.write(Persist(start_point=point, terms=saved.terms, epochs=saved.epochs))
    except NotWrittenError as error:
        raise StateFolderError(f"the state folder can't be written: {error}") from error


def _loaded(store: JobStore) -> StoredJob:
    stored = store.load()
    assert stored is not None, "it was kept"
    return stored


def _step_rules(settings: CoordinatorSettings) -> dict[str, str]:
    """How steps are made, by option: shards and workers heard it when they came."""
    return {
        "--step-atomicity": settings.step_atomicity.label,
        "--backup-workers": str(settings.backup_worker_count),
        "--staleness-scaling": "on" if settings.is_staleness_scaled else "off",
        "--delay-compensation": f"{settings.delay_compensation:g}",
        "--chunk-kib": str(settings.chunk_bytes >> 10 or "not given"),
        "--aggregation": str(settings.aggregation),
        "--gradient-norm-max": f"{settings.gradient_norm_max:g}",
        "--on-bad-gradient": settings.bad_gradient_policy.label,
    }


def _check_clocked(saved: SavedJob, settings: CoordinatorSettings) -> None:
    """Refuses to go on from a checkpoint in a mode in which nothing is aggregated.

    Raises:
        StateFolderError: Its mode is such a one.
    """
    if not saved.point.mode.rules.is_clocked:
        raise StateFolderError(
            f"--aggregation {settings.aggregation} takes the gradients of several "
            f"workers, and the checkpoint is of a job in {saved.point.mode.label}, "
            "where each is applied by itself: leave it out"
        )


def _check_step_rules(stored: dict[str, str], settings: CoordinatorSettings) -> None:
    """Refuses to go on with a job by other rules than its shards go by.

    Raises:
        StateFolderError: Some differ.
    """
    now = _step_rules(settings)
    differing = [
        f"{option} {value}, now it is {now[option]}"
        for option, value in stored.items()
        if option in now and now[option] != value
    ]
    if differing:
        raise StateFolderError(
            f"the state folder holds a job that was started with "
            f"{' and '.join(differing)}: its shards and workers go by what they were "
            "told then; say the same again, or use another folder for a new job"
        )
