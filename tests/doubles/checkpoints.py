"""Checkpoints of a small job, written to a folder."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from psserver.coordinator.core.data.epoch_ledger import EpochLedger
from psserver.coordinator.storage.job_codec import dump_epoch, dump_record
from pswire.checkpoint.folder import CheckpointFolder
from pswire.checkpoint.manifest import FilePart, Manifest, part_name
from pswire.checkpoint.parts import PartKey
from pswire.checkpoint.registered_state import encode_states
from pswire.job_terms import JobTerms
from pswire.leased_data import EpochShape
from pswire.membership import Mode
from pswire.optimizer_states import StateKey
from pswire.schema import ElementType, ModelSchema, SchemaEntry
from tests.doubles.core_values import record, sgd

SCHEMA = ModelSchema(
    (
        SchemaEntry(name="généré", shape=(3, 4), element_type=ElementType.FLOAT32),
        SchemaEntry(name="bias", shape=(), element_type=ElementType.FLOAT32),
    )
)
TERMS = JobTerms(schema=SCHEMA, optimizers=(sgd(groups=((0, 1),)),))
JOB: dict[str, Any] = {
    "seed": 7,
    "participation_count_before": 0,
    "record": json.loads(dump_record(record({"w0": 0, "w1": 0}))),
    "sequences": [],
    "incarnations": {"w0": 1, "w1": 1},
    "epochs": [],
    "splits": [],
}


def job_of(generation: int, *epochs: tuple[str, int]) -> dict[str, Any]:
    """The state of a job of which these epochs are open, none of them dealt."""
    shape = EpochShape(position_count=8, batch_size=2, drop_last=False)
    return {
        **JOB,
        "record": {**JOB["record"], "generation": generation},
        "epochs": [
            [loader, epoch, json.loads(dump_epoch(EpochLedger(loader, epoch, shape)))]
            for loader, epoch in epochs
        ],
    }


def manifest_of(
    parts: Sequence[FilePart],
    name: str = "step-000000000500",
    *,
    job_id: str = "job",
    is_finite: bool = True,
    state: FilePart | None = None,
) -> Manifest:
    return Manifest(
        name=name,
        job_id=job_id,
        release="0.1.0",
        created_unix_s=1.5,
        version=int(name.split("-")[1]),
        clock=250,
        mode=Mode.BSP,
        shard_count=len(parts),
        chunk_bytes=0,
        is_finite=is_finite,
        parts=tuple(parts),
        terms=TERMS,
        job=JOB,
        state=state,
    )


def tensors_of(shard_index: int, version: int) -> dict[str, torch.Tensor]:
    """What a shard might write: values that say which version they are of."""
    state = PartKey.state_of("optimizer", shard_index, StateKey(0, 2, "momentum"))
    return {
        PartKey.value(shard_index).text: torch.full((13,), float(version)),
        state.text: torch.arange(13.0) + version,
    }


def save(
    folder: CheckpointFolder,
    version: int,
    *,
    job_id: str = "job",
    shard_count: int = 2,
    is_finite: bool = True,
    states: Mapping[str, object] | None = None,
) -> str:
    """Writes a checkpoint as coordinator and shards do; its name."""
    name = folder.begin(version)
    parts = [
        folder.write_part(
            name,
            part_name(index, shard_count),
            tensors_of(index, version),
            {"core": f"shard {index} at {version}"},
        )
        for index in range(shard_count)
    ]
    state = folder.write_state(name, encode_states(states)) if states else None
    folder.commit(
        manifest_of(parts, name, job_id=job_id, is_finite=is_finite, state=state)
    )
    return name
