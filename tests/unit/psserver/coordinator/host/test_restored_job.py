"""A job goes on only by the rules that its shards go by."""

from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest

from psserver.coordinator.core.coordinator_effects import Persist
from psserver.coordinator.core.shard_map import ShardSlot
from psserver.coordinator.host.restored_job import restored_core
from psserver.coordinator.storage.job_store import JobStore
from psserver.edge.coordinator_settings import CoordinatorSettings
from psserver.edge.state_folder import StateFolderError
from pswire.membership import LossPolicy, Mode, StepAtomicity

SETTINGS: Final = CoordinatorSettings(
    job_id="job", shard_count=2, step_atomicity=StepAtomicity.CLOCK
)


def restart(folder: Path, **changes: Any) -> CoordinatorSettings:  # noqa: ANN401
    """Starts a job and then again with other settings; the ones it has then."""
    for settings in (SETTINGS, replace(SETTINGS, job_id="other", **changes)):
        with JobStore(folder) as store:
            core = restored_core(settings, store, 0)
    return core.settings


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"shard_count": 3}, "--shards says 3"),
        (
            {"step_atomicity": StepAtomicity.CHUNK},
            "--step-atomicity clock, now it is chunk",
        ),
        ({"backup_worker_count": 1}, "--backup-workers 0, now it is 1"),
        ({"is_staleness_scaled": True}, "--staleness-scaling off, now it is on"),
        ({"delay_compensation": 0.5}, "--delay-compensation 0, now it is 0.5"),
        ({"chunk_bytes": 64 << 10}, "--chunk-kib not given, now it is 64"),
    ],
)
def test_other_rules_are_refused(
    tmp_path: Path, changes: dict[str, Any], text: str
) -> None:
    with pytest.raises(StateFolderError, match=text):
        restart(tmp_path, **changes)


def test_what_concerns_the_coordinator_alone_may_change(tmp_path: Path) -> None:
    settings = restart(
        tmp_path,
        workers_min=3,
        worker_loss_policy=LossPolicy.WAIT,
        mode=Mode.ASP,
        lease_ttl_ms=2_000,
    )
    assert settings.job_id == "job"
    assert (settings.workers_min, settings.lease_ttl_ms) == (3, 2_000)


def test_with_a_short_lease_shards_have_time_to_connect_again(tmp_path: Path) -> None:
    """A connection that was refused is tried again after up to 2.4 s."""
    settings = replace(SETTINGS, lease_ttl_ms=1_000)
    shards = tuple(
        ShardSlot(index=index, process_id=f"p{index}", address="", incarnation=1)
        for index in range(2)
    )
    with JobStore(tmp_path) as store:
        restored_core(settings, store, 0)
        store.write(Persist(shards=shards))
    with JobStore(tmp_path) as store:
        core = restored_core(settings, store, 100)

    grace_ms = settings.lease_ttl_ms // 2
    assert core.shards.lost(100 + 5_499, grace_ms) == []
    assert core.shards.lost(100 + 5_500, grace_ms) == core.shards.slots
