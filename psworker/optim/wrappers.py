"""The plain model inside of what torch wraps around it."""

from collections.abc import Iterator

from torch import nn
from torch.nn.parallel import DistributedDataParallel


def without_wrappers(model: nn.Module) -> nn.Module:
    """The plain model, since names must fit its `state_dict`.

    `torch.compile` prefixes names with `_orig_mod.`, data parallelism with `module.`.
    """
    *_, innermost = _layers(model)
    return innermost


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
