"""What `optimizer.state_dict()` of a prepared optimizer has beyond torch's own.

Residuals, what gradients have not sent yet: by position of the parameter, as torch
numbers them there, and in the parameter's shape, so that they fit whatever number of
shards a job has. And state that is not rounded to the parameter's type.
"""

from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from pswire.limits import GRADIENT_NORM_MAX
from psworker.errors import ConfigurationError
from psworker.tensors.residuals import Residuals

KEY: Final = "residuals"
"""Name in a state dict. A plain optimizer of torch ignores it."""

_ADVICE: Final = "load the state of the same optimizer"


def pack_residuals(
    groups: Iterable[dict[str, Any]], indexes: Mapping[int, int], residuals: Residuals
) -> dict[int, torch.Tensor]:
    """Residuals to be saved.

    Args:
        groups: Parameter groups of the optimizer.
        indexes: Entry of the schema by `id()` of the parameter.
        residuals: By entry.
    """
    return {
        position: residuals[index].view(parameter.shape)
        for position, parameter in enumerate(_parameters(groups))
        if (index := indexes.get(id(parameter))) in residuals
    }


def unpack_residuals(
    groups: Iterable[dict[str, Any]], indexes: Mapping[int, int], saved: object
) -> Residuals:
    """Residuals that were saved.

    Args:
        groups: Parameter groups of the optimizer.
        indexes: Entry of the schema by `id()` of the parameter.
        saved: What `pack_residuals` made, as a file has it.

    Raises:
        ConfigurationError: They are of parameters of other shapes, or no residuals.
    """
    if not isinstance(saved, Mapping):
        raise ConfigurationError(
            f"the loaded state has a {type(saved).__name__} as {KEY!r}, in place of a "
            f"dict of tensors by number of the parameter: {_ADVICE}"
        )
    parameters = list(_parameters(groups))
    found: Residuals = {}
    for position, residual in saved.items():
        parameter = _parameter_at(parameters, position)
        _check_shape(position, residual, None if parameter is None else parameter.shape)
        values = residual.detach().float().cpu().reshape(-1)
        # A sum of squares of several chunks may be above what each of them may have.
        if not bool((values.abs() <= GRADIENT_NORM_MAX).all()):
            raise ConfigurationError(
                f"the loaded state has a residual for parameter {position} with "
                f"elements that are not finite, or larger than {GRADIENT_NORM_MAX:g}, "
                "which no shard takes: load an earlier state, or leave residuals out "
                f"with `state.pop({KEY!r})`"
            )
        found[indexes[id(parameter)]] = values
    return found


def _parameter_at(
    parameters: Sequence[torch.Tensor], position: object
) -> torch.Tensor | None:
    if isinstance(position, bool) or not isinstance(position, int):
        return None
    return parameters[position] if 0 <= position < len(parameters) else None


def _check_shape(position: object, residual: object, shape: torch.Size | None) -> None:
    """Checks that a residual fits its parameter.

    Args:
        position: Of the parameter, as it was saved.
        residual: What was saved for it.
        shape: Of the parameter; None where it is not there.

    Raises:
        ConfigurationError: It does not.
    """
    if not isinstance(residual, torch.Tensor):
        what = f"a {type(residual).__name__} as the residual"
    elif residual.layout is not torch.strided or residual.is_complex():
        what = f"a residual of {residual.dtype} and {residual.layout}"
    elif residual.shape != shape:
        what = f"a residual of shape {list(residual.shape)}"
    else:
        return
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
