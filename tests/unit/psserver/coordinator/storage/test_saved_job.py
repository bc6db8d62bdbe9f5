"""A job comes out of a manifest as it was at the cut, or not at all."""

from collections import deque
from dataclasses import replace
from typing import Any

import pytest

from psserver.coordinator.core.checkpoints import PendingCheckpoint
from psserver.coordinator.core.cut import Cut
from psserver.coordinator.core.data.ledger import DataLedger
from psserver.coordinator.storage.saved_job import manifest_of, saved_job_of
from psserver.edge.coordinator_settings import CoordinatorSettings
from pswire.checkpoint.errors import DamagedError
from pswire.checkpoint.manifest import FilePart, Manifest, part_name
from pswire.checkpoint.place import CheckpointPlace
from pswire.leased_data import DataRange, EpochShape, RecordedSplit
from pswire.membership import Mode
from tests.doubles.core_values import TERMS, key, record

SETTINGS = CoordinatorSettings(job_id="job", shard_count=2, job_seed=7, mode=Mode.SSP)
PLACE = CheckpointPlace("/checkpoints", "step-000000000012-2")
SPLIT = RecordedSplit(
    name="split", recipe="{}", digest="a" * 64, item_count=10, recorder="w0"
)


def pending() -> PendingCheckpoint:
    ledger = DataLedger(SETTINGS.job_seed)
    shape = EpochShape(position_count=64, batch_size=8, drop_last=False)
    ledger.open_epoch(key("a"), "loader", 3, shape)
    (epoch,) = ledger.epochs()
    epoch.lease(key("a"), (), 2)
    epoch.returned = deque([DataRange("loader", 3, 0, 8)])
    epoch.held[key("a")].discard(DataRange("loader", 3, 0, 8))
    return PendingCheckpoint(
        snapshot_id=3,
        cut=Cut(clock=4, sequences=((key("a"), 4), (key("b"), 8)), version=12),
        record=record({"a": 0, "b": 0}, generation=5, mode=Mode.SSP, staleness_bound=3),
        terms=TERMS,
        ledger=ledger,
        incarnations={"a": 1, "b": 1, "gone": 4},
        place=PLACE,
        parts={
            index: FilePart(part_name(index, 2), 1 << 20, f"{index}" * 32)
            for index in (1, 0)
        },
        is_finite=False,
    )


def made(checkpoint: PendingCheckpoint) -> Manifest:
    return manifest_of(checkpoint, SETTINGS, [SPLIT], created_unix_s=1e9)


def test_a_manifest_says_what_the_checkpoint_is() -> None:
    checkpoint = pending()
    manifest = made(checkpoint)

    assert Manifest.from_json(manifest.to_json()) == manifest
    assert manifest.name == PLACE.name
    assert (manifest.version, manifest.clock, manifest.mode) == (12, 4, Mode.SSP)
    assert [part.digest[0] for part in manifest.parts] == ["0", "1"]
    assert not manifest.is_finite
    assert manifest.job["sequences"] == [["a", 1, 4], ["b", 1, 8]]


def test_a_job_comes_out_of_its_manifest_as_it_was() -> None:
    checkpoint = pending()
    manifest = Manifest.from_json(made(checkpoint).to_json())
    saved = saved_job_of(manifest, PLACE.url)

    assert saved.point.place == PLACE
    assert (saved.point.version, saved.point.clock) == (12, 4)
    assert (saved.point.mode, saved.point.staleness_bound) == (Mode.SSP, 3)
    assert saved.point.generation == 5
    assert (saved.job_id, saved.job_seed) == ("job", 7)
    assert saved.terms == TERMS
    assert saved.epochs == checkpoint.ledger.epochs()
    assert saved.splits == (SPLIT,)
    assert saved.incarnations == {"a": 1, "b": 1, "gone": 4}


@pytest.mark.parametrize(
    "job",
    [
        {},
        {"record": []},
        {"epochs": [["loader", 3]]},
        {"epochs": [["loader", 3, {"shape": {"position_count": "many"}}]]},
        {"splits": [{"name": "split"}]},
        {"splits": [{"nonsense": 1}]},
        {"incarnations": {"a": "many"}},
        {"incarnations": []},
    ],
)
def test_a_manifest_that_says_nothing_of_its_job_is_damaged(
    job: dict[str, Any],
) -> None:
    manifest = made(pending())
    broken = replace(manifest, job={**manifest.job, **job} if job else {})

    with pytest.raises(DamagedError, match="step-000000000012-2 says nothing"):
        saved_job_of(broken, PLACE.url)
