"""The values of a checkpoint as a snapshot: nothing of its job needs to run."""

import torch

from pswire.checkpoint.errors import DamagedError
from pswire.checkpoint.folder import CheckpointFolder
from pswire.checkpoint.manifest import Manifest
from pswire.checkpoint.parts import PartKey, PartReader
from pswire.placement import Chunk
from pswire.torch_types import TORCH_DTYPES
from psworker.snapshots.snapshot import Snapshot, states_of


def read_saved(folder: CheckpointFolder, manifest: Manifest) -> Snapshot:
    """Reads the values of all models, and checks each as it is read.

    Raises:
        CheckpointError: They are not those that were written, or can't be read.
    """
    schema, placement = manifest.terms.schema, manifest.placement()
    tensors = [
        torch.empty(entry.element_count, dtype=TORCH_DTYPES[entry.element_type])
        for entry in schema.entries
    ]
    for part, chunks in zip(manifest.parts, placement.chunks_by_shard, strict=True):
        with folder.open_part(manifest.name, part) as reader:
            for chunk in chunks:
                values, start = _values(reader, chunk, part.name), 0
                for piece in chunk.slices:
                    stop = start + piece.element_count
                    target = tensors[piece.entry_index]
                    target[piece.start : piece.stop] = values[start:stop]
                    start = stop
    shaped = [
        tensor.reshape(entry.shape)
        for entry, tensor in zip(schema.entries, tensors, strict=True)
    ]
    return Snapshot(
        version=manifest.version,
        clock=manifest.clock,
        generation=_generation(manifest),
        job_id=manifest.job_id,
        byte_count=manifest.terms.byte_count,
        _states=states_of(schema, shaped),
    )


def _generation(manifest: Manifest) -> int:
    """The job's own record says it; 0 where the job is of another kind of writer."""
    record = manifest.job.get("record")
    found = record.get("generation") if isinstance(record, dict) else None
    return found if isinstance(found, int) else 0


def _values(reader: PartReader, chunk: Chunk, part_name: str) -> torch.Tensor:
    key = PartKey.value(chunk.index).text
    if key not in reader.keys():  # noqa: SIM118, it is no dict
        raise DamagedError(
            f"{part_name} has no {key}, which is of its shard; use another checkpoint"
        )
    values = reader.tensor(key)
    expected = TORCH_DTYPES[chunk.element_type]
    if values.dtype != expected or values.shape != (chunk.element_count,):
        raise DamagedError(
            f"{key} in {part_name} is {list(values.shape)} of {values.dtype}, where "
            f"[{chunk.element_count}] of {expected} belongs; use another checkpoint"
        )
    return values
