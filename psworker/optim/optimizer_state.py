"""Optimizer state as torch keeps it, for each parameter, and as shards do, by chunk.

In the user's thread. State of an entry is a mapping of names: elementwise state has
the shape of the parameter, a count or other number has none.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import torch
from torch.optim import Optimizer

from pswire.optimizer_states import (
    SCALARS,
    StateKey,
    as_count,
    decode_state,
    encode_state,
)
from pswire.placement import Chunk, Placement, Slice

EntryState = dict[str, torch.Tensor]
"""State of one tensor of the schema, on the CPU; elementwise state is 1-D."""

States = dict[int, EntryState]
"""State by position in the schema. Tensors without state are not in it."""


def states_of(optimizer: Optimizer, indexes: Mapping[int, int]) -> States:
    """The state that an optimizer of torch holds, where it has taken steps.

    Args:
        optimizer: Any of the supported classes.
        indexes: Position in the schema by `id()` of the parameter.
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
    """State as a script has left it.

    Args:
        edited: State by parameter; without any where it is empty.
        indexes: Position in the schema by `id()` of the parameter.

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

    Args:
        tensors: Parameters by position in the schema.
        states: Of each.
        class_name: Class of torch whose state it is.
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
    """Puts together what shards have sent.

    Args:
        parts: Chunk and safetensors file of each part.
        placement: How tensors are cut.

    Raises:
        Refusal: A part can't be read.
    """
    found: States = {}
    sizes = _sizes_of(placement)
    for chunk_index, data in parts:
        slices = placement.chunks[chunk_index].slices
        for key, value in decode_state(data).items():
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
