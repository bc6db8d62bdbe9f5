"""What gradients have not sent yet, as `optimizer.state_dict()` has it.

By position of the parameter, as torch numbers them there, and in the parameter's shape:
it fits whatever number of shards a job has.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Final

import torch

from psworker.residuals import Residuals

KEY: Final = "residuals"
"""Name in a state dict. A plain optimizer of torch ignores it."""


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
    groups: Iterable[dict[str, Any]],
    indexes: Mapping[int, int],
    saved: Mapping[int, torch.Tensor],
) -> Residuals:
    """Residuals that were saved.

    Args:
        groups: Parameter groups of the optimizer.
        indexes: Entry of the schema by `id()` of the parameter.
        saved: What `pack_residuals` made.

    Raises:
        ValueError: They are of parameters of other shapes.
    """
    parameters = list(_parameters(groups))
    found: Residuals = {}
    for position, residual in saved.items():
        shape = parameters[position].shape if position < len(parameters) else None
        if residual.shape != shape:
            raise ValueError(
                f"the loaded state has a residual of shape {list(residual.shape)} for "
                f"parameter {position}, which "
                + ("is not there" if shape is None else f"has the shape {list(shape)}")
                + ": load the state of the same optimizer"
            )
        index = indexes[id(parameters[position])]
        found[index] = residual.detach().float().cpu().reshape(-1)
    return found


def _parameters(groups: Iterable[dict[str, Any]]) -> Iterable[torch.Tensor]:
    return (parameter for group in groups for parameter in group["params"])
