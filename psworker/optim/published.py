"""What a script names when it publishes values: which tensors of the job they are."""

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Final

import torch
from torch import nn

from psworker.errors import ConfigurationError

NOT_PREPARED_TEXT: Final = (
    "publish() makes values of a prepared model those of the job: call prepare() first"
)

Published = nn.Module | torch.Tensor | Iterable[torch.Tensor]


def published_entries(
    what: Sequence[Published], tensors: Sequence[torch.Tensor]
) -> tuple[int, ...]:
    """Entries of the schema, in its order, of what the user has named: else of all.

    Raises:
        ConfigurationError: A tensor belongs to no prepared model, or there is none.
    """
    indexes = {id(tensor): index for index, tensor in enumerate(tensors)}
    if not what:
        return tuple(range(len(tensors)))
    found: set[int] = set()
    for each in what:
        if isinstance(each, nn.Module):
            # What a module has beside, such as buffers of its own, is in no job.
            tensors_of_it = chain(each.parameters(), each.buffers())
            own = {indexes[id(t)] for t in tensors_of_it if id(t) in indexes}
            if not own:
                raise ConfigurationError(
                    f"publish() was given a {type(each).__name__} that has no tensor "
                    "of a prepared model: give it a model that prepare() was given, "
                    "or a part of one"
                )
            found |= own
            continue
        for tensor in (each,) if isinstance(each, torch.Tensor) else each:
            index = indexes.get(id(tensor))
            if index is None:
                raise ConfigurationError(
                    f"publish() was given {_described(tensor)} that belongs to no "
                    "prepared model: give it parameters themselves, as "
                    "model.parameters() has them, and write values into them before"
                )
            found.add(index)
    return tuple(sorted(found))


def _described(tensor: object) -> str:
    if isinstance(tensor, torch.Tensor):
        return f"a tensor of shape {list(tensor.shape)}"
    return f"a {type(tensor).__name__}"
