"""The placement of tensors that make up a model by themselves."""

from collections.abc import Sequence

import torch

from pswire.placement import Placement, place
from pswire.schema import ModelSchema, SchemaEntry
from pswire.torch_types import element_type_of


def placement_of(tensors: Sequence[torch.Tensor], shard_count: int = 2) -> Placement:
    """Each tensor is a parameter of its own, `p0`, `p1` and so on."""
    entries = tuple(
        SchemaEntry(
            name=f"p{index}",
            shape=tuple(tensor.shape),
            element_type=element_type_of(tensor.dtype),
        )
        for index, tensor in enumerate(tensors)
    )
    return place(ModelSchema(entries), shard_count)
