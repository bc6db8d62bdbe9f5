"""A job as its coordinator finds it: new, or as an earlier process left it."""

import logging
import secrets
from dataclasses import replace

from psserver.coordinator.core.coordinator import CoordinatorCore
from psserver.coordinator.storage.job_store import JobStore
from psserver.edge.coordinator_settings import CoordinatorSettings
from psserver.edge.state_folder import StateFolderError

log = logging.getLogger("psserver.coordinator")


def new_job_id() -> str:
    return f"job-{secrets.token_hex(6)}"


def restored_core(
    settings: CoordinatorSettings, store: JobStore, now_ms: int
) -> CoordinatorCore:
    """The core as an earlier process left it, or a new one.

    Raises:
        StateFolderError: The folder holds a job of another shape.
    """
    stored = store.load()
    if stored is None:
        store.save_job(
            job_id=settings.job_id,
            job_seed=settings.job_seed,
            shard_count=settings.shard_count,
        )
        store.save_step_rules(_step_rules(settings))
        return CoordinatorCore(settings)
    if stored.shard_count != settings.shard_count:
        raise StateFolderError(
            f"the state folder holds a job with {stored.shard_count} shards, "
            f"--shards says {settings.shard_count}; use another folder"
        )
    _check_step_rules(stored.step_rules, settings)
    core = CoordinatorCore(
        replace(settings, job_id=stored.job_id, job_seed=stored.job_seed),
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
    )
    core.restore_ledger(store.load_epochs(), stored.enrolments)
    if stored.record is not None:
        log.info("restored the job at generation %d", stored.record.generation)
    return core


def _step_rules(settings: CoordinatorSettings) -> dict[str, str]:
    """How steps are made, by option: shards and workers heard it when they came."""
    return {
        "--step-atomicity": settings.step_atomicity.label,
        "--backup-workers": str(settings.backup_worker_count),
        "--staleness-scaling": "on" if settings.is_staleness_scaled else "off",
        "--delay-compensation": f"{settings.delay_compensation:g}",
        "--chunk-kib": str(settings.chunk_bytes >> 10 or "not given"),
    }


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
