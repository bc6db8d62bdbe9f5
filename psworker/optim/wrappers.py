"""The plain model inside of what torch wraps around it, and torch's process group."""

from collections.abc import Iterator

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def without_wrappers(model: nn.Module) -> nn.Module:
    """The plain model, since names must fit its `state_dict`.

    `torch.compile` prefixes names with `_orig_mod.`, data parallelism with `module.`.
    """
    *_, innermost = _layers(model)
    return innermost


def is_in_group() -> bool:
    """Whether this process is one of several that `torch.distributed` connects."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def data_parallel_in(model: nn.Module) -> DistributedDataParallel | None:
    """The `DistributedDataParallel` around the model, `None` if there is none."""
    for layer in _layers(model):
        if isinstance(layer, DistributedDataParallel):
            return layer
    return None


def _layers(model: nn.Module) -> Iterator[nn.Module]:
    """The model and what it wraps, down to the plain one."""
    while True:
        yield model
        inner = getattr(model, "_orig_mod", None)
        if isinstance(model, nn.DataParallel | DistributedDataParallel):
            inner = model.module
        if not isinstance(inner, nn.Module):
            return
        model = inner
