"""By what the workers of a job compare their models and loaders.

Cheap: classes and names of modules, sizes of loaders. Contents are read only if two
look the same without, and never so that the script could notice: no sample is loaded,
no sampler drawn.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, Final

import torch
import xxhash
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, Sampler

from pswire.object_marks import LOADER, MODEL, ObjectMark
from pswire.torch_types import TORCH_DTYPES, buffer_of, bytes_of
from psworker.optim.wrappers import without_wrappers

_SHOWN_LENGTH: Final = 200
_SAMPLE_COUNT: Final = 64
"""Rows of a data set in memory that are looked at, from its first to its last."""
_DEPTH: Final = 4
"""How deep data sets within data sets are looked at."""
_PART_COUNT_MAX: Final = 4096
"""Most parts of a data set that are looked at."""


def mark_models(
    models: Mapping[str, nn.Module], named: Collection[str]
) -> tuple[ObjectMark, ...]:
    """Describes models by name; `named` are the names that the script has given."""
    plain = {name: without_wrappers(model) for name, model in models.items()}
    structures = {name: _digest(_structure(model)) for name, model in plain.items()}
    alike = _alike({name: structures[name] for name in plain if name not in named})
    return tuple(
        ObjectMark(
            kind=MODEL,
            name=name,
            described=_class_name(model)[:_SHOWN_LENGTH],
            structure=structures[name],
            content=_digest(_values(model)) if name in alike else "",
            named=name in named,
        )
        for name, model in plain.items()
    )


def mark_loaders(
    loaders: Mapping[str, DataLoader[Any]], named: Collection[str]
) -> tuple[ObjectMark, ...]:
    """Describes loaders, where there are several; see `mark_models`."""
    if len(loaders) < 2:
        return ()
    looks = {name: _loader_look(loader) for name, loader in loaders.items()}
    alike = _alike({name: looks[name] for name in loaders if name not in named})
    return tuple(
        ObjectMark(
            kind=LOADER,
            name=name,
            described=looks[name][0][:_SHOWN_LENGTH],
            structure=_digest(looks[name]),
            content=_digest(islice(_data(loader.dataset, _DEPTH), _PART_COUNT_MAX))
            if name in alike
            else "",
            named=name in named,
        )
        for name, loader in loaders.items()
    )


def _alike(looks: Mapping[str, object]) -> set[str]:
    """Names of those that look like another one."""
    all_looks = list(looks.values())
    return {name for name, look in looks.items() if all_looks.count(look) > 1}


def _structure(model: nn.Module) -> Iterator[str]:
    """Modules and tensors by name, in whatever order they were registered."""
    modules = model.named_modules(remove_duplicate=False)
    for name, module in sorted(modules, key=lambda each: each[0]):
        yield f"{name}:{_class_name(module)}"
    for name, tensor in sorted(_tensors(model), key=lambda each: each[0]):
        yield f"{name}:{tuple(tensor.shape)}:{tensor.dtype}"


def _class_name(module: nn.Module) -> str:
    if isinstance(module, torch.jit.ScriptModule):
        # All scripted modules are of one class; this is the one they were made from.
        return str(getattr(module, "original_name", type(module).__name__))
    # Without its module, which is `__main__` or not by how a script is started.
    return type(module).__qualname__


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The parameters, each under all of its names."""
    for name, tensor in model.named_parameters(remove_duplicate=False):
        if _is_plain(tensor):
            yield name, tensor


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        tensor.layout is torch.strided
        and not (tensor.is_meta or tensor.is_quantized)
        and tensor.dtype in TORCH_DTYPES.values()
    )


def _values(model: nn.Module) -> Iterator[bytes | memoryview]:
    for name, tensor in sorted(_tensors(model), key=lambda each: each[0]):
        yield name.encode()
        yield _bytes(tensor)


def _loader_look(loader: DataLoader[Any]) -> tuple[str, str]:
    """What a loader is, for people, and what else it differs in from others."""
    dataset: Any = loader.dataset
    count = "any number" if isinstance(dataset, IterableDataset) else len(dataset)
    collate = getattr(loader.collate_fn, "__qualname__", type(loader.collate_fn))
    return (
        f"{type(dataset).__qualname__} of {count} samples in batches of "
        f"{loader.batch_size}, by {type(loader.sampler).__qualname__}",
        f"{loader.drop_last} {type(loader.batch_sampler).__qualname__} {collate}",
    )


def _data(held: object, depth: int) -> Iterator[bytes | memoryview]:
    """What a data set holds in memory, as far as can be seen without loading it."""
    if isinstance(held, torch.Tensor):
        yield repr((tuple(held.shape), str(held.dtype))).encode()
        if _is_plain(held) and held.numel():
            rows = held.reshape(1) if held.dim() == 0 else held
            yield _bytes(rows[:: max(1, len(rows) // _SAMPLE_COUNT)])
    elif type(held).__module__ == "numpy" and hasattr(held, "tobytes"):
        array: Any = held
        step = max(1, len(array) // _SAMPLE_COUNT) if getattr(array, "ndim", 0) else 1
        yield repr((getattr(array, "shape", ()), str(array.dtype))).encode()
        if array.dtype != object:
            yield (array[::step] if getattr(array, "ndim", 0) else array).tobytes()
    elif isinstance(held, str | bytes | int | float | bool | range | None):
        yield repr(held)[:_SHOWN_LENGTH].encode()
    elif isinstance(held, list | tuple) and depth:
        yield repr((type(held).__name__, len(held))).encode()
        for each in held[:: max(1, len(held) // _SAMPLE_COUNT)]:
            yield from _data(each, depth - 1)
    elif isinstance(held, dict) and depth:
        yield repr(len(held)).encode()
        for key, value in list(held.items())[:_SAMPLE_COUNT]:
            yield repr(key)[:_SHOWN_LENGTH].encode()
            yield from _data(value, depth - 1)
    elif depth and not isinstance(held, Sampler | nn.Module):
        yield type(held).__qualname__.encode()
        for name, value in sorted(getattr(held, "__dict__", {}).items()):
            yield name.encode()
            yield from _data(value, depth - 1)


def _bytes(tensor: torch.Tensor) -> memoryview:
    return buffer_of(bytes_of(tensor).cpu())


def _digest(parts: Iterable[str | bytes | memoryview]) -> str:
    digest = xxhash.xxh3_128()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()
