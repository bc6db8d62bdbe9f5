"""State of optimizers past `torch.optim.Optimizer.load_state_dict` as it was saved.

torch rounds what it reads to the type of the parameters. Shards keep state of float32
for parameters of 16 bits, and rounded it may be of no use: the second moments of small
gradients are zero in float16. torch passes on what is neither a tensor nor iterable.
"""

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class _Whole:
    """A tensor that torch does not see."""

    value: torch.Tensor


def held_whole(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a state dict of which torch rounds nothing.

    Args:
        state_dict: As an optimizer saves it. Is not changed, and shares its tensors.
    """
    states = {
        number: {name: _held(name, value) for name, value in state.items()}
        if isinstance(state, Mapping)
        else state
        for number, state in state_dict["state"].items()
    }
    return {**state_dict, "state": states}


def release_whole(states: Mapping[Any, Any]) -> None:
    """Puts tensors back in place, in the type that shards keep them in.

    Args:
        states: By parameter, as torch has read it from what `held_whole` has made.
            Is changed.
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
