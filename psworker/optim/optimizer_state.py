"""Optimizer state as torch keeps it, as shards do by chunk, and as it is saved.

In the user's thread. State of an entry is a mapping of names: elementwise state has
the shape of the parameter, a count or other number has none.

A saved state has two things beyond torch's own. Residuals, what gradients have not sent
yet: by position of the parameter, as torch numbers them, and in the parameter's shape,
so that they fit whatever number of shards a job has. And state that is not rounded to
the parameter's type.
"""

from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Final

import torch
from torch.optim import Optimizer

from pswire.limits import GRADIENT_NORM_MAX
from pswire.optimizer_states import (
    SCALARS,
    ChunkState,
    StateKey,
    as_count,
    decode_state,
    encode_state,
)
from pswire.placement import Chunk, Placement, Slice
from psworker.errors import ConfigurationError
from psworker.tensors.push_compression import Residuals

RESIDUALS_KEY: Final = "residuals"
"""Name in a state dict. A plain optimizer of torch ignores it."""

_ADVICE: Final = "load the state of the same optimizer"

EntryState = dict[str, torch.Tensor]
"""State of one tensor of the schema, on the CPU; elementwise state is 1-D."""

States = dict[int, EntryState]
"""State by position in the schema. Tensors without state are not in it."""


def states_of(optimizer: Optimizer, indexes: Mapping[int, int]) -> States:
    """The state that an optimizer of torch holds, if it has taken steps.

    `indexes` are positions in the schema by `id()` of the parameter, here as below.
    """
    found: States = {}
    for parameter, state in optimizer.state.items():
        index = indexes.get(id(parameter))
        # Adagrad fills its state as it is built, with a step count of 0.
        if index is not None and state and float(state.get("step", 1)) != 0:
            found[index] = {
                name: _as_sent(name, value)
                for name, value in state.items()
                if value is not None
            }
    return found


def edited_states(
    edited: Mapping[torch.Tensor, Mapping[str, Any]], indexes: Mapping[int, int]
) -> States:
    """State by parameter as a script has left it; without any if it is empty.

    Raises:
        ValueError: It is none that shards could keep; says of which position, and why.
    """
    found: States = {}
    for parameter, state in edited.items():
        index = indexes[id(parameter)]
        if not isinstance(state, Mapping):
            raise ValueError(index, f"is a {type(state).__name__} and no dict")
        values = {name: value for name, value in state.items() if value is not None}
        for name, value in values.items():
            if problem := _problem(name, value, parameter):
                raise ValueError(index, f"holds {str(name)[:64]!r}, which {problem}")
        if values:
            found[index] = {
                name: _as_sent(name, value).clone() for name, value in values.items()
            }
    return found


def _problem(name: object, value: object, parameter: torch.Tensor) -> str | None:
    """Why a value is no state of a parameter that shards could keep."""
    if name in SCALARS:
        is_number = isinstance(value, int | float | torch.Tensor)
        if not is_number or torch.as_tensor(value).numel() != 1:
            return f"is a {type(value).__name__} and no number"
    elif not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return "is no tensor of floats"
    elif value.shape != parameter.shape:
        return f"has the shape {list(value.shape)}, not {list(parameter.shape)}"
    return None


def by_parameter(
    tensors: Sequence[torch.Tensor], states: States, *, class_name: str
) -> dict[torch.Tensor, dict[str, Any]]:
    """State as torch keeps it, on the devices and in the shapes it wants.

    `tensors` are the parameters by position in the schema.
    """
    return {
        tensors[index]: {
            name: as_count(class_name, value)
            if name in SCALARS
            else value.view(tensors[index].shape).to(tensors[index].device)
            for name, value in states[index].items()
        }
        for index in sorted(states)  # in their order, whoever answered first
    }


def gather(parts: Iterable[tuple[int, bytes]], placement: Placement) -> States:
    """Puts together what shards have sent: chunk and safetensors file of each part.

    Raises:
        Refusal: A part can't be read.
    """
    return put_together(
        ((index, decode_state(data)) for index, data in parts), placement
    )


def put_together(
    parts: Iterable[tuple[int, ChunkState]], placement: Placement
) -> States:
    """State of tensors, from that of the chunks they are in."""
    found: States = {}
    sizes = _sizes_of(placement)
    for chunk_index, chunk_state in parts:
        slices = placement.chunks[chunk_index].slices
        for key, value in chunk_state.items():
            pieces = slices[key.first : key.stop]
            if key.name in SCALARS:
                for piece in pieces:
                    _note_number(found, piece.entry_index, key.name, value)
                continue
            counts = [piece.element_count for piece in pieces]
            for piece, own in zip(pieces, value.split(counts), strict=True):
                state = found.setdefault(piece.entry_index, {})
                whole = state.get(key.name)
                if whole is None:
                    size = sizes[piece.entry_index]
                    whole = state[key.name] = torch.zeros(size, dtype=own.dtype)
                whole[piece.start : piece.stop] = own
    return found


def parts_of(chunk: Chunk, states: States) -> Iterator[bytes]:
    """Safetensors files with the state of a chunk; none when it has none."""
    found: dict[StateKey, torch.Tensor] = {}
    numbered = list(enumerate(chunk.slices))
    for alike, group in groupby(numbered, lambda each: _likeness(states, each[1])):
        if alike is None:
            continue
        members = list(group)
        first, stop = members[0][0], members[-1][0] + 1
        example = states[members[0][1].entry_index]
        for name, value in example.items():
            if name in SCALARS:
                found[StateKey(first, stop, name)] = value.clone()
                continue
            pieces = [
                states[piece.entry_index][name][piece.start : piece.stop]
                for _, piece in members
            ]
            found[StateKey(first, stop, name)] = torch.cat(pieces)
    return encode_state(found)


def _likeness(states: States, piece: Slice) -> tuple[object, ...] | None:
    """What slices have in common that may share their state; None without any."""
    state = states.get(piece.entry_index)
    if state is None:
        return None
    return tuple(
        (name, value.item() if name in SCALARS else value.dtype)
        for name, value in sorted(state.items())
    )


def _as_sent(name: str, value: object) -> torch.Tensor:
    if name in SCALARS:
        return torch.as_tensor(value, dtype=torch.float32).detach().cpu().clone()
    assert isinstance(value, torch.Tensor), "all other state is elementwise"
    if value.is_sparse:  # SGD's momentum of sparse gradients
        value = value.to_dense()
    return value.detach().reshape(-1).cpu()


def _note_number(
    states: States, entry_index: int, name: str, value: torch.Tensor
) -> None:
    """Keeps a number; where chunks of a tensor differ, while others push, the largest.

    A product that shrinks with every step is then that of the chunk that is behind.
    """
    state = states.setdefault(entry_index, {})
    known = state.get(name)
    if known is None or bool(value > known):
        state[name] = value.clone()


def _sizes_of(placement: Placement) -> dict[int, int]:
    sizes: dict[int, int] = {}
    for chunk in placement.chunks:
        for piece in chunk.slices:
            sizes[piece.entry_index] = max(sizes.get(piece.entry_index, 0), piece.stop)
    return sizes


def pack_residuals(
    groups: Iterable[dict[str, Any]], indexes: Mapping[int, int], residuals: Residuals
) -> dict[int, torch.Tensor]:
    """Residuals by position of the parameter, in its shape, to be saved."""
    return {
        position: residuals[index].view(parameter.shape)
        for position, parameter in enumerate(_parameters(groups))
        if (index := indexes.get(id(parameter))) in residuals
    }


def unpack_residuals(
    groups: Iterable[dict[str, Any]], indexes: Mapping[int, int], saved: object
) -> Residuals:
    """Residuals by entry, out of what a file has of `pack_residuals`.

    Raises:
        ConfigurationError: They are of parameters of other shapes, or no residuals.
    """
    if not isinstance(saved, Mapping):
        raise ConfigurationError(
            f"the loaded state has a {type(saved).__name__} as {RESIDUALS_KEY!r}, in "
            f"place of a dict of tensors by number of the parameter: {_ADVICE}"
        )
    parameters: dict[object, torch.Tensor] = dict(enumerate(_parameters(groups)))
    found: Residuals = {}
    for position, residual in saved.items():
        # As a key of a dict, True is 1.
        known = parameters.get(position) if type(position) is int else None
        parameter = _fitting(position, residual, known)
        values = residual.detach().float().cpu().reshape(-1)
        # A sum of squares of several chunks may be above what each of them may have.
        if not bool((values.abs() <= GRADIENT_NORM_MAX).all()):
            raise ConfigurationError(
                f"the loaded state has a residual for parameter {position} with "
                f"elements that are not finite, or larger than {GRADIENT_NORM_MAX:g}, "
                "which no shard takes: load an earlier state, or leave residuals out "
                f"with `state.pop({RESIDUALS_KEY!r})`"
            )
        found[indexes[id(parameter)]] = values
    return found


def _fitting(
    position: object, residual: object, parameter: torch.Tensor | None
) -> torch.Tensor:
    """The parameter, if what was saved for it fits."""
    shape = None if parameter is None else parameter.shape
    if not isinstance(residual, torch.Tensor):
        what = f"a {type(residual).__name__} as the residual"
    elif residual.layout is not torch.strided or residual.is_complex():
        what = f"a residual of {residual.dtype} and {residual.layout}"
    elif parameter is None or residual.shape != shape:
        what = f"a residual of shape {list(residual.shape)}"
    else:
        return parameter
    raise ConfigurationError(
        f"the loaded state has {what} for parameter {position!r}, which "
        + ("is not there" if shape is None else f"has the shape {list(shape)}")
        + f": {_ADVICE}"
    )


def _parameters(groups: Iterable[dict[str, Any]]) -> Iterable[torch.Tensor]:
    return (parameter for group in groups for parameter in group["params"])


@dataclass(frozen=True, slots=True)
class _Whole:
    """A tensor that torch does not see."""

    value: torch.Tensor


def held_whole(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a state dict, over the same tensors, of which torch rounds nothing."""
    states = {
        number: {name: _held(name, value) for name, value in state.items()}
        if isinstance(state, Mapping)
        else state
        for number, state in state_dict["state"].items()
    }
    return {**state_dict, "state": states}


def release_whole(states: Mapping[Any, Any]) -> None:
    """Puts tensors back into what torch has read of a `held_whole` copy.

    They are of the type that shards keep them in.
    """
    for parameter, state in states.items():
        if not isinstance(parameter, torch.Tensor):
            continue
        assert isinstance(state, MutableMapping), "torch makes a dict for each"
        is_rounded = parameter.dtype.itemsize == 2
        dtype = torch.float32 if is_rounded else parameter.dtype
        for name, value in state.items():
            if isinstance(value, _Whole):
                state[name] = value.value.to(parameter.device, dtype)


def _held(name: str, value: object) -> object:
    # torch lets the step count alone.
    if isinstance(value, torch.Tensor) and name != "step":
        return _Whole(value)
    return value
