"""Optimizer state of a chunk as safetensors: named tensors and nothing that runs.

State is kept for spans of slices: neighbours with one history share one tensor, so
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

TENSOR_COUNT_MAX: Final = 8192
"""Most tensors of one part: where each of thousands of small parameters has a history
of its own, their names take 100 bytes each, and a part is one message."""


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
    names = dict.fromkeys(key.name for key in state if key.name not in SCALARS)
    for members in (SCALARS, *({name} for name in names)):
        keys = [key for key in state if key.name in members]
        for first in range(0, len(keys), TENSOR_COUNT_MAX):
            part = keys[first : first + TENSOR_COUNT_MAX]
            yield _file_of({key: state[key] for key in part})


def decode_state(data: bytes) -> dict[StateKey, torch.Tensor]:
    """Reads what `encode_state` wrote; the tensors have memory of their own.

    Raises:
        Refusal: `MALFORMED_MESSAGE`, or `LIMIT_EXCEEDED` for more than
            `TENSOR_COUNT_MAX` tensors.
    """
    # The head of a file is JSON, an object that has one for each tensor, which costs
    # far more than its bytes; it is not read before they are few.
    head_stop = 8 + int.from_bytes(data[:8], "little")
    if data.count(b"{", 8, min(head_stop, len(data))) > TENSOR_COUNT_MAX + 2:
        raise Refusal(
            ErrorReason.LIMIT_EXCEEDED,
            f"a part of an optimizer's state has more than {TENSOR_COUNT_MAX} tensors",
        )
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
