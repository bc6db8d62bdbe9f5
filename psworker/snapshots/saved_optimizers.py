"""Optimizers of a checkpoint, as torch's own classes save theirs."""

import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from pswire.checkpoint.errors import UNREADABLE, DamagedError
from pswire.checkpoint.folder import CheckpointFolder
from pswire.checkpoint.json_shape import fields, names_of, number, real, rows, text
from pswire.checkpoint.manifest import Manifest
from pswire.checkpoint.parts import PartKey, PartReader
from pswire.names import printable
from pswire.optimizer_classes import class_named
from pswire.optimizers import check_supported, unflatten_group
from pswire.reasons import Refusal
from pswire.schema import ModelSchema, OptimizerSpec
from pswire.torch_types import TORCH_DTYPES
from psworker.optim.optimizer_state import States, by_parameter, put_together

if TYPE_CHECKING:
    from pswire.optimizer_states import StateKey


_USED: Final = names_of(
    fields(
        {
            "hyperparameters": rows(rows(real)),
            "scheduler_steps": rows(number()),
            "spec_digest": text,
        }
    )
)
"""What a part says of the newest update of each optimizer."""


class SavedOptimizers(NamedTuple):
    """Optimizers of a checkpoint, by their names in the job.

    Attributes:
        state_dicts: What plain optimizers of the same classes, over the same parameters
            in the same groups, take by `load_state_dict`.
        scheduler_steps: Steps of the schedulers of each, as `prepare` got them.
        parameter_names: Names of the parameters that its state dict numbers.
    """

    state_dicts: dict[str, dict[str, Any]]
    scheduler_steps: dict[str, list[int]]
    parameter_names: dict[str, list[str]]


def read_optimizers(folder: CheckpointFolder, manifest: Manifest) -> SavedOptimizers:
    """Reads the state of all optimizers, which is checked as it is read.

    Raises:
        DamagedError: A part is not as it was written, or says what no shard writes.
        StorageError: The folder can't be read.
    """
    placement = manifest.placement()
    pieces: dict[str, dict[int, dict[StateKey, torch.Tensor]]] = {}
    used: Mapping[str, Any] = {}
    for part in manifest.parts:
        with folder.open_part(manifest.name, part) as reader:
            used = _used(reader) or used
            for key in map(PartKey.parse, reader.keys()):
                if key.state is not None:
                    chunks = pieces.setdefault(key.optimizer, {})
                    state = chunks.setdefault(key.chunk_index, {})
                    state[key.state] = reader.tensor(key.text)
    found, names = {}, {}
    entries = manifest.terms.schema.entries
    for first in manifest.terms.first_optimizers:
        parts = pieces.get(first.name, {}).items()
        try:
            spec, values = _settings(manifest, first, used)
            states = put_together(parts, placement)
            found[first.name] = _state_dict(spec, values, states, manifest)
            names[first.name] = [entries[index].name for index in spec.entry_indexes]
        except (AttributeError, LookupError, Refusal, TypeError, ValueError) as error:
            raise DamagedError(
                f"the state of optimizer {printable(first.name)[:64]} in "
                f"{manifest.name} is not as shards write it: "
                f"{printable(str(error))[:128]}; use another checkpoint"
            ) from error
    stepped = [name for name in found if name in used]
    steps = {name: list(used[name]["scheduler_steps"]) for name in stepped}
    return SavedOptimizers(found, steps, names)


def _used(reader: PartReader) -> Mapping[str, Any]:
    """By optimizer the settings of its newest update, as its shard says."""
    try:
        used: Mapping[str, Any] = json.loads(reader.metadata["core"])["used"]
    except UNREADABLE as error:
        raise DamagedError("a part says nothing of its shard") from error
    _USED(used, "used")
    return used


def _settings(
    manifest: Manifest, first: OptimizerSpec, used: Mapping[str, Any]
) -> tuple[OptimizerSpec, list[tuple[float, ...]]]:
    """The declaration that holds, and the values of its groups."""
    declared = [s for s in manifest.terms.optimizers if s.name == first.name]
    newest = used.get(first.name)
    if newest is None:  # it has taken no step
        return declared[-1], [group.hyperparameters for group in declared[-1].groups]
    matching = [s for s in declared if s.digest == newest["spec_digest"]]
    return (matching or declared)[-1], [tuple(v) for v in newest["hyperparameters"]]


def _state_dict(
    spec: OptimizerSpec,
    values: list[tuple[float, ...]],
    states: States,
    manifest: Manifest,
) -> dict[str, Any]:
    """Has torch's own class make it, which numbers parameters and names settings."""
    check_supported(spec.class_name)
    tensors = list(_parameters(manifest.terms.schema))
    groups = [
        {
            "params": [tensors[index] for index in group.entry_indexes],
            **unflatten_group(spec.class_name, spec.hyperparameter_names, own),
        }
        for group, own in zip(spec.groups, values, strict=True)
    ]
    optimizer: torch.optim.Optimizer = class_named(spec.class_name)(groups)
    optimizer.state.clear()  # Adagrad fills its state as it is built
    optimizer.state.update(by_parameter(tensors, states, class_name=spec.class_name))
    return optimizer.state_dict()


def _parameters(schema: ModelSchema) -> Iterator[torch.Tensor]:
    """Stand-ins without memory: of a parameter only its shape is asked for."""
    for entry in schema.entries:
        dtype = TORCH_DTYPES[entry.element_type]
        yield torch.empty((), dtype=dtype).expand(entry.shape)
