"""A job as the manifest of a checkpoint has it, beside its values."""

import json
from collections.abc import Iterable
from dataclasses import asdict
from importlib import metadata
from typing import Any

from psserver.coordinator.core.checkpoints import PendingCheckpoint
from psserver.coordinator.core.job_model import JobModel
from psserver.coordinator.core.start_point import SavedJob, StartPoint
from psserver.coordinator.storage.job_codec import (
    dump_epoch,
    dump_record,
    load_epoch,
    load_record,
)
from psserver.edge.coordinator_settings import CoordinatorSettings
from pswire.checkpoint.errors import UNREADABLE, DamagedError
from pswire.checkpoint.manifest import FilePart, Manifest
from pswire.checkpoint.place import CheckpointPlace
from pswire.leased_data import RecordedSplit
from pswire.names import printable


def manifest_of(
    checkpoint: PendingCheckpoint,
    settings: CoordinatorSettings,
    splits: Iterable[RecordedSplit],
    *,
    created_unix_s: float,
    state: FilePart | None = None,
) -> Manifest:
    """The manifest of a checkpoint whose files are all written."""
    assert checkpoint.place is not None, "it was written somewhere"
    return Manifest(
        name=checkpoint.place.name,
        job_id=settings.job_id,
        release=metadata.version("paramserver"),
        created_unix_s=created_unix_s,
        version=checkpoint.cut.version,
        clock=checkpoint.cut.clock,
        mode=checkpoint.record.mode,
        shard_count=settings.shard_count,
        chunk_bytes=checkpoint.terms.chunk_bytes(settings),
        is_finite=checkpoint.is_finite,
        parts=tuple(part for _, part in sorted(checkpoint.parts.items())),
        terms=checkpoint.terms,
        job=_job_values(checkpoint, settings, splits),
        state=state,
    )


def saved_job_of(manifest: Manifest, url: str) -> SavedJob:
    """The job as a manifest has it.

    Args:
        manifest: The manifest.
        url: Folder of the checkpoint.

    Raises:
        DamagedError: No release has written it so.
    """
    data = manifest.job
    try:
        record = load_record(json.dumps(data["record"]))
        JobModel().restore(manifest.terms)  # refuses what no shard could run
        return SavedJob(
            job_id=manifest.job_id,
            job_seed=int(data["seed"]),
            point=StartPoint(
                place=CheckpointPlace(url, manifest.name),
                clock=manifest.clock,
                version=manifest.version,
                mode=manifest.mode,
                staleness_bound=record.staleness_bound,
                quorum=record.quorum,
                grace_window_ms=record.grace_window_ms,
                generation=record.generation,
                participation_count_before=int(
                    data.get("participation_count_before", 0)
                ),
            ),
            terms=manifest.terms,
            epochs=tuple(
                load_epoch(loader, epoch, json.dumps(values))
                for loader, epoch, values in data["epochs"]
            ),
            splits=tuple(RecordedSplit(**each) for each in data["splits"]),
            incarnations={
                name: int(count) for name, count in data["incarnations"].items()
            },
            has_state=manifest.state is not None,
        )
    except UNREADABLE as error:
        raise DamagedError(
            f"{manifest.name} says nothing of its job that can be read: "
            f"{type(error).__name__}, {printable(str(error))[:128]}; use another "
            "checkpoint"
        ) from error


def _job_values(
    checkpoint: PendingCheckpoint,
    settings: CoordinatorSettings,
    splits: Iterable[RecordedSplit],
) -> dict[str, Any]:
    return {
        "seed": settings.job_seed,
        "participation_count_before": checkpoint.ledger.participation_count_before,
        "record": json.loads(dump_record(checkpoint.record)),
        "sequences": [[*worker, last] for worker, last in checkpoint.cut.sequences],
        "incarnations": dict(checkpoint.incarnations),
        "epochs": [
            [each.loader, each.epoch, json.loads(dump_epoch(each))]
            for each in checkpoint.ledger.epochs()
        ],
        "splits": [asdict(each) for each in splits],
    }
