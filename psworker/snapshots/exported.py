"""A checkpoint as plain torch keeps one: state dicts of models and of optimizers."""

import os
import warnings
from pathlib import Path
from typing import Any

import torch

from pswire.checkpoint.folder import CheckpointFolder
from pswire.checkpoint.manifest import Manifest
from psworker.snapshots.saved_optimizers import read_optimizers
from psworker.snapshots.saved_snapshot import read_saved


def exported_state(folder: CheckpointFolder, manifest: Manifest) -> dict[str, Any]:
    """State dicts by the names that models and optimizers have in the job.

    Raises:
        CheckpointError: A file is not as it was written, or can't be read.
    """
    snapshot = read_saved(folder, manifest)
    optimizers = read_optimizers(folder, manifest)
    return {
        "models": {name: snapshot.state_dict(name) for name in snapshot.models},
        "optimizers": optimizers.state_dicts,
        "scheduler_steps": optimizers.scheduler_steps,
        "parameter_names": optimizers.parameter_names,
        "job_id": manifest.job_id,
        "version": manifest.version,
        "clock": manifest.clock,
    }


def write_state_dict(state: dict[str, Any], path: Path) -> None:
    """Writes what `torch.load(path, weights_only=True)` reads, whole or not at all."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def write_dcp(state: dict[str, Any], path: Path) -> None:
    """Writes a folder of `torch.distributed.checkpoint`.

    There parameters of optimizers have names in place of numbers, as
    `torch.distributed.checkpoint.state_dict` gives them.
    """
    from torch.distributed.checkpoint.state_dict_saver import save

    named = {
        name: _named(packed, state["parameter_names"][name])
        for name, packed in state["optimizers"].items()
    }
    with warnings.catch_warnings():
        # Of torch, that it saves as one process: it is one.
        warnings.filterwarnings("ignore", "torch.distributed is", UserWarning)
        save({**state, "optimizers": named}, checkpoint_id=path, no_dist=True)


def _named(packed: dict[str, Any], names: list[str]) -> dict[str, Any]:
    return {
        "state": {names[number]: each for number, each in packed["state"].items()},
        "param_groups": [
            {**group, "params": [names[number] for number in group["params"]]}
            for group in packed["param_groups"]
        ],
    }
