"""A model as safetensors: a file, or a Hugging Face folder with an index of several."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Final

import torch

from pswire.checkpoint.part_head import encode_head
from pswire.torch_types import buffer_of, element_type_of
from psworker.snapshots.snapshot_path import written_whole

INDEX: Final = "model.safetensors.index.json"

Tensors = Mapping[str, torch.Tensor]
"""Tensors of a model by name, the same object under each of its names. May be of the
device `meta`: they are asked for type and shape alone."""


def write_huggingface(
    path: Path,
    tensors: Tensors,
    read: Callable[[str], Iterable[torch.Tensor]],
    *,
    metadata: Mapping[str, str],
    file_bytes_max: int | None = None,
) -> tuple[str, ...]:
    """Writes a folder, whole or not at all; returns the names of its files.

    It holds as much in memory as `read` returns at a time.

    Args:
        path: The folder. If it is there, it has to be empty.
        tensors: What to write. Of a tensor with several names the first one counts, as
            in what `save_pretrained` writes; the model ties the others as it is made.
        read: Values of a tensor, in pieces on the CPU, in C order.
        metadata: Texts that go with the tensors of each file.
        file_bytes_max: Bytes of tensors in a file; a larger tensor has one of its own.
            None for one file.

    Raises:
        OSError: It can't be written.
    """
    kept, others = _without_ties(tensors)
    dealt = list(_dealt(kept, file_bytes_max))
    files = {
        "model.safetensors"
        if len(dealt) == 1
        else f"model-{number:05d}-of-{len(dealt):05d}.safetensors": names
        for number, names in enumerate(dealt, 1)
    }
    with written_whole(path) as partial:
        partial.mkdir()
        for file_name, names in files.items():
            ties = {other: name for other, name in others.items() if name in names}
            with (partial / file_name).open("wb") as file:
                own = {name: kept[name] for name in names}
                write_file(file, own, read, {**metadata, "format": "pt", **ties})
        if len(files) > 1:
            weights = {name: file for file, names in files.items() for name in names}
            size = sum(tensor.nbytes for tensor in kept.values())
            index = {"metadata": {"total_size": size}, "weight_map": weights}
            (partial / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True))
    return (*files, INDEX) if len(files) > 1 else tuple(files)


def _without_ties(tensors: Tensors) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The tensors, each by its first name, and that name by each of the others."""
    first: dict[int, str] = {}
    others = {
        name: first[id(tensor)]
        for name, tensor in tensors.items()
        if first.setdefault(id(tensor), name) != name
    }
    return {name: tensors[name] for name in first.values()}, others


def _dealt(tensors: Tensors, byte_count_max: int | None) -> Iterator[list[str]]:
    """Names of the tensors of each file, in the model's order."""
    names: list[str] = []
    byte_count = 0
    for name, tensor in tensors.items():
        size = tensor.nbytes
        if names and byte_count_max is not None and byte_count + size > byte_count_max:
            yield names
            names, byte_count = [], 0
        names.append(name)
        byte_count += size
    yield names


def write_file(
    file: IO[bytes],
    tensors: Tensors,
    read: Callable[[str], Iterable[torch.Tensor]],
    metadata: Mapping[str, str],
) -> None:
    """Writes one file, each tensor in full; see `write_huggingface`.

    safetensors' own `save_file` says of a disk in a text alone what it answered, and
    takes no tensors that share memory.

    Raises:
        OSError: It can't be written.
    """
    # Large elements first: each tensor then begins at a multiple of its element's size.
    names = sorted(tensors, key=lambda name: -tensors[name].itemsize)
    places = {
        name: (element_type_of(tensors[name].dtype), tuple(tensors[name].shape))
        for name in names
    }
    file.write(encode_head(places, metadata))
    for name in names:
        for piece in read(name):
            file.write(buffer_of(piece.contiguous()))
