"""Optimizer state of a chunk as safetensors: named tensors and nothing that runs.

State is told for spans of slices: neighbours with one history share one tensor, so
that thousands of small parameters are a few tensors. Imports torch.
"""

from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from pswire.reasons import ErrorReason, Refusal

SCALARS: Final = frozenset({"step", "mu_product"})
"""State that is one number for a whole parameter. All other is elementwise."""


class StateKey(NamedTuple):
    """Which state of which slices of a chunk, from `first` to `stop` without it."""

    first: int
    stop: int
    name: str


ChunkState = Mapping[StateKey, torch.Tensor]
"""State of a chunk: elements 1-D, numbers without dimensions."""


def as_count(class_name: str, value: torch.Tensor) -> torch.Tensor | int:
    """A number of the state as torch's own class keeps it.

    Float32 in every kernel, but for SparseAdam: an `int`, from which it computes in
    float64.
    """
    return int(value) if class_name == "SparseAdam" else value.to(torch.float32)


def encode_state(state: ChunkState) -> Iterator[bytes]:
    """Writes the state of a chunk, each name by itself, so that messages stay small.

    Args:
        state: Contiguous tensors on the CPU that share no memory.
    """
    numbers = {key: value for key, value in state.items() if key.name in SCALARS}
    if numbers:
        yield _file_of(numbers)
    for name in dict.fromkeys(key.name for key in state):
        if name not in SCALARS:
            yield _file_of({k: value for k, value in state.items() if k.name == name})


def decode_state(data: bytes) -> dict[StateKey, torch.Tensor]:
    """Reads what `encode_state` wrote; the tensors have memory of their own.

    Raises:
        Refusal: `MALFORMED_MESSAGE`.
    """
    try:
        return {_key_of(name): value for name, value in load(data).items()}
    except (SafetensorError, ValueError, KeyError, RuntimeError) as error:
        raise Refusal(
            ErrorReason.MALFORMED_MESSAGE,
            f"optimizer state can't be read: {str(error)[:128]}",
        ) from None


def _file_of(state: ChunkState) -> bytes:
    return save({f"{k.first}:{k.stop}:{k.name}": value for k, value in state.items()})


def _key_of(text: str) -> StateKey:
    first, stop, name = text.split(":", 2)
    key = StateKey(int(first), int(stop), name)
    if not 0 <= key.first < key.stop:
        raise ValueError(f"{text[:64]!r} names no slices")
    return key
