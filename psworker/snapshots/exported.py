"""A checkpoint in the formats of others."""

import warnings
from pathlib import Path
from typing import Any

import torch

from pswire.checkpoint.folder import CheckpointFolder
from pswire.checkpoint.manifest import Manifest
from pswire.checkpoint.registered_state import decode_states
from pswire.torch_types import TORCH_DTYPES
from psworker.snapshots.huggingface import write_huggingface
from psworker.snapshots.saved_optimizers import read_optimizers
from psworker.snapshots.saved_snapshot import opened_values, read_saved
from psworker.snapshots.snapshot import metadata_of, state_of, states_of
from psworker.snapshots.snapshot_path import written_whole


def exported_state(folder: CheckpointFolder, manifest: Manifest) -> dict[str, Any]:
    """State by the names that models, optimizers and other objects have in the job.

    Raises:
        CheckpointError: A file is not as it was written, or can't be read.
    """
    snapshot = read_saved(folder, manifest)
    optimizers = read_optimizers(folder, manifest)
    registered = folder.state(manifest)
    return {
        "models": {name: snapshot.state_dict(name) for name in snapshot.models},
        "optimizers": optimizers.state_dicts,
        "scheduler_steps": optimizers.scheduler_steps,
        "parameter_names": optimizers.parameter_names,
        "registered": decode_states(registered) if registered else {},
        "job_id": manifest.job_id,
        "version": manifest.version,
        "clock": manifest.clock,
    }


def write_state_dict(state: dict[str, Any], path: Path) -> None:
    """Writes what `torch.load(path, weights_only=True)` reads, whole or not at all.

    Raises:
        OSError: It can't be written.
    """
    # To an open file: torch writes the name of one that it opens into it.
    with written_whole(path) as partial, partial.open("wb") as file:
        torch.save(state, file)


def write_dcp(state: dict[str, Any], path: Path) -> None:
    """Writes a folder of `torch.distributed.checkpoint`, whole or not at all.

    There parameters of optimizers have names in place of numbers, as
    `torch.distributed.checkpoint.state_dict` gives them.

    Raises:
        OSError: It can't be written.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_saver import save

    named = {
        name: _named(packed, state["parameter_names"][name])
        for name, packed in state["optimizers"].items()
    }
    with written_whole(path) as partial, warnings.catch_warnings():
        # Of torch, that it saves as one process: it is one.
        warnings.filterwarnings("ignore", "torch.distributed is", UserWarning)
        partial.mkdir()
        try:
            save({**state, "optimizers": named}, checkpoint_id=partial, no_dist=True)
        except CheckpointException as error:  # a BaseException, of this one process
            ((failure, _),) = error.failures.values()
            raise failure from error


def write_model(
    folder: CheckpointFolder,
    manifest: Manifest,
    path: Path,
    *,
    model: str | None,
    file_bytes_max: int | None,
) -> tuple[str, ...]:
    """Writes the values of a model as a Hugging Face folder; the names of its files.

    Args:
        folder: The folder of the checkpoint.
        manifest: The checkpoint.
        path: As in `write_huggingface`, and `file_bytes_max` too.
        model: Which model, where there are several.
        file_bytes_max: See `path`.

    Raises:
        CheckpointError: A part is not as it was written, or can't be read.
        ConfigurationError: There are several models and none is named, or another.
        OSError: It can't be written.
    """
    schema = manifest.terms.schema
    stand_ins = [
        torch.empty(entry.shape, dtype=TORCH_DTYPES[entry.element_type], device="meta")
        for entry in schema.entries
    ]
    tensors = state_of(states_of(schema, stand_ins), model)
    indexes = {id(tensor): index for index, tensor in enumerate(stand_ins)}
    with opened_values(folder, manifest) as pieces_of:
        return write_huggingface(
            path,
            tensors,
            lambda name: pieces_of(indexes[id(tensors[name])]),
            metadata=metadata_of(manifest),
            file_bytes_max=file_bytes_max,
        )


def _named(packed: dict[str, Any], names: list[str]) -> dict[str, Any]:
    return {
        "state": {names[number]: each for number, each in packed["state"].items()},
        "param_groups": [
            {**group, "params": [names[number] for number in group["params"]]}
            for group in packed["param_groups"]
        ],
    }
