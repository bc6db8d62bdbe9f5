"""A job goes on only by the rules that its shards go by."""

from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest

from psserver.coordinator.core.coordinator import CoordinatorCore
from psserver.coordinator.core.coordinator_effects import Persist
from psserver.coordinator.core.data.epoch_ledger import EpochLedger
from psserver.coordinator.core.shard_map import ShardSlot
from psserver.coordinator.core.start_point import SavedJob, StartPoint
from psserver.coordinator.host.restored_job import (
    STARTS_PER_FLOOR,
    newest_saved,
    restored_core,
)
from psserver.coordinator.storage.job_store import JobStore
from psserver.edge.coordinator_settings import CoordinatorSettings
from psserver.edge.state_folder import StateFolderError
from pswire.checkpoint.errors import DamagedError
from pswire.checkpoint.folder import CheckpointFolder
from pswire.checkpoint.manifest import MANIFEST, part_name
from pswire.checkpoint.place import CheckpointPlace
from pswire.leased_data import DataRange, EpochShape, RecordedSplit
from pswire.membership import LossPolicy, Mode, StepAtomicity
from pswire.privacy import Privacy
from tests.doubles.checkpoints import save
from tests.doubles.core_values import TERMS, key, record

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


# From a checkpoint

POINT: Final = StartPoint(
    place=CheckpointPlace("/checkpoints", "step-000000000024"),
    clock=12,
    version=24,
    mode=Mode.ASP,
    staleness_bound=0,
    generation=5,
)

SAVED: Final = SavedJob(
    job_id="job-before",
    job_seed=7,
    point=POINT,
    terms=TERMS,
    epochs=(
        EpochLedger(
            "loader",
            3,
            EpochShape(position_count=8, batch_size=2, drop_last=False),
            held={key("w0/4"): {DataRange("loader", 3, 0, 2)}},
            cursor=2,
        ),
    ),
    splits=(RecordedSplit(name="split", digest="0" * 64, item_count=8),),
    incarnations={"w0": 4},
)


def begin_from(folder: Path, *, start_count: int = 1) -> CoordinatorCore:
    """Starts the coordinator of a new state folder by a checkpoint, and again."""
    for _ in range(start_count):
        with JobStore(folder) as store:
            core = restored_core(SETTINGS, store, 0, SAVED)
            assert store.load_splits() == SAVED.splits
    return core


@pytest.mark.parametrize("start_count", [1, 3])
def test_an_empty_folder_goes_on_from_the_checkpoint(
    tmp_path: Path, start_count: int
) -> None:
    core = begin_from(tmp_path, start_count=start_count)
    assert (core.settings.job_id, core.settings.job_seed) == ("job-before", 7)
    assert core.record is None
    assert core.model.terms == TERMS
    assert core.ledger.epochs() == SAVED.epochs
    assert core.way_back is SAVED
    point = core.progress.start_point
    assert point is not None
    # All that is left of the open epochs counts as pushed before.
    assert point.participation_count_before == len(SAVED.epochs)
    assert replace(point, incarnation_floor=0, participation_count_before=0) == POINT
    assert point.incarnation_floor >= STARTS_PER_FLOOR + 4


def test_a_private_job_says_what_of_its_budget_is_not_known(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    private = replace(TERMS, privacy=Privacy(1.0, 1.0, 1e-5, (4.0, 6.0, 8.0)))
    with JobStore(tmp_path / "plain") as store:
        restored_core(SETTINGS, store, 0, SAVED)
    assert "differential privacy" not in caplog.text
    with JobStore(tmp_path / "private") as store:
        core = restored_core(SETTINGS, store, 0, replace(SAVED, terms=private))
    assert "what was pushed after it" in caplog.text
    assert core.model.terms == private
    # The open epoch once as pushed before, and once as it goes on.
    assert core.ledger.participation_count == 2


def test_starts_of_before_are_told_apart_when_nothing_but_the_checkpoint_is_left(
    tmp_path: Path,
) -> None:
    """Restored twice from one checkpoint, of which only the values are known."""
    floors = set()
    for name in ("one", "two"):
        point = begin_from(tmp_path / name).progress.start_point
        assert point is not None
        floors.add(point.incarnation_floor)
    one, two = sorted(floors)
    assert two - one >= STARTS_PER_FLOOR


def test_a_folder_and_checkpoints_of_two_jobs_are_refused(tmp_path: Path) -> None:
    with JobStore(tmp_path) as store:
        restored_core(SETTINGS, store, 0)
    with (
        JobStore(tmp_path) as store,
        pytest.raises(StateFolderError, match=r"holds job job, and .* job-before"),
    ):
        restored_core(SETTINGS, store, 0, SAVED)


def test_a_job_that_returns_to_a_checkpoint_has_no_record_after_a_restart(
    tmp_path: Path,
) -> None:
    shards = (
        ShardSlot(index=0, process_id="p0", address="host:1", incarnation=3),
        ShardSlot(index=1, incarnation=2),
    )
    later = EpochLedger("loader", 4, SAVED.epochs[0].shape)
    with JobStore(tmp_path) as store:
        restored_core(replace(SETTINGS, job_id="job-before"), store, 0)
        store.write(Persist(record=record({"w0/4": 0}, generation=6), epochs=(later,)))
        store.write(
            Persist(start_point=POINT, terms=TERMS, epochs=SAVED.epochs, shards=shards)
        )
    with JobStore(tmp_path) as store:
        core = restored_core(SETTINGS, store, 0, SAVED)
    assert core.record is None
    assert core.progress.start_point == POINT
    assert core.ledger.epochs() == SAVED.epochs
    assert [slot.incarnation for slot in core.shards.slots] == [3, 2]


def test_a_job_that_has_not_started_again_goes_on_from_where_somebody_has_gone_since(
    tmp_path: Path,
) -> None:
    begin_from(tmp_path)
    other = replace(POINT, place=CheckpointPlace("/folder", "step-000000000012"))
    saved = replace(SAVED, point=replace(other, generation=3), epochs=())
    with JobStore(tmp_path) as store:
        before = store.load()
        core = restored_core(SETTINGS, store, 0, saved)
    assert before is not None
    assert before.start_point is not None
    floor = before.start_point.incarnation_floor
    # The epoch that was open may have been pushed in each of the two lives before.
    assert core.progress.start_point == replace(
        other, incarnation_floor=floor, participation_count_before=2
    )
    assert core.ledger.epochs() == ()


@pytest.mark.parametrize("damaged", [part_name(1, 2), MANIFEST])
def test_no_job_begins_anew_beside_checkpoints_that_are_all_damaged(
    tmp_path: Path, damaged: str
) -> None:
    folder = CheckpointFolder(str(tmp_path))
    folder.claim("job", "token")
    for version in (10, 20):
        (tmp_path / save(folder, version) / damaged).write_bytes(b"{}")
    with pytest.raises(DamagedError, match=r"of 2 in .* no checkpoint is good"):
        newest_saved(folder, str(tmp_path))


def test_one_that_was_never_complete_is_none(tmp_path: Path) -> None:
    folder = CheckpointFolder(str(tmp_path))
    folder.claim("job", "token")
    (tmp_path / folder.begin(10)).mkdir()
    assert newest_saved(folder, str(tmp_path)) is None
