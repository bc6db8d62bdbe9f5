"""The values of a checkpoint as a snapshot: nothing of its job needs to run."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import lru_cache

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
    schema = manifest.terms.schema
    tensors = []
    with opened_values(folder, manifest) as pieces_of:
        for index, entry in enumerate(schema.entries):
            dtype, start = TORCH_DTYPES[entry.element_type], 0
            tensor = torch.empty(entry.element_count, dtype=dtype)
            for piece in pieces_of(index):
                tensor[start : start + len(piece)] = piece
                start += len(piece)
            tensors.append(tensor.reshape(entry.shape))
    return Snapshot(
        version=manifest.version,
        clock=manifest.clock,
        generation=_generation(manifest),
        job_id=manifest.job_id,
        byte_count=manifest.terms.byte_count,
        _states=states_of(schema, tensors),
    )


@contextmanager
def opened_values(
    folder: CheckpointFolder, manifest: Manifest
) -> Iterator[Callable[[int], Iterator[torch.Tensor]]]:
    """Opens the values; yields what reads a tensor by its position in the schema.

    It returns 1-D pieces that follow each other, and checks each. Of the chunks the
    newest is kept: tensors of one type are best read in the order of the schema.
    """
    placement = manifest.placement()
    with ExitStack() as opened:
        readers = [
            opened.enter_context(folder.open_part(manifest.name, part))
            for part in manifest.parts
        ]

        @lru_cache(maxsize=1)
        def values_of(chunk_index: int) -> torch.Tensor:
            chunk = placement.chunks[chunk_index]
            part = manifest.parts[chunk.shard_index]
            return _values(readers[chunk.shard_index], chunk, part.name)

        def pieces_of(entry_index: int) -> Iterator[torch.Tensor]:
            for chunk in placement.chunks_by_entry.get(entry_index, ()):
                start = 0
                for piece in chunk.slices:
                    stop = start + piece.element_count
                    if piece.entry_index == entry_index:
                        yield values_of(chunk.index)[start:stop]
                    start = stop

        yield pieces_of


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
