"""All numbers of a chunk, as a shard holds them and as a checkpoint has them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from pswire.checkpoint.parts import PartKey
from pswire.optimizer_states import ChunkState


class HeldState(NamedTuple):
    """State that an optimizer has of a chunk.

    Attributes:
        spec_digest: The declaration that it was last updated under.
        state: The state.
    """

    spec_digest: str
    state: ChunkState


def copy_of(tensor: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor:
    """A copy, in memory of another tensor that is not needed any more, where it fits.

    The system zeroes new memory page by page, which takes longer than the copy.
    """
    if into is None or into.dtype != tensor.dtype or into.shape != tensor.shape:
        return tensor.clone()
    return into.copy_(tensor)


@dataclass(frozen=True, slots=True)
class ChunkImage:
    """All numbers of a chunk.

    Attributes:
        values: Its elements, 1-D.
        master: Where optimizers update values of 16 bits in float32, those, 1-D.
        states: By optimizer, of those that have any.
    """

    values: torch.Tensor
    master: torch.Tensor | None = None
    states: Mapping[str, HeldState] = field(default_factory=dict)

    @property
    def is_finite(self) -> bool:
        """Whether all of its values are."""
        # A sum is finite only if they are, and costs a tenth of looking at each.
        values = self.values
        return bool(values.sum().isfinite()) or bool(values.isfinite().all())

    def named(self, chunk_index: int) -> Iterator[tuple[str, torch.Tensor]]:
        """Its tensors, by their names in a part."""
        yield PartKey.value(chunk_index).text, self.values
        if self.master is not None:
            yield PartKey.master(chunk_index).text, self.master
        for optimizer, held in self.states.items():
            for key, value in held.state.items():
                yield PartKey.state_of(optimizer, chunk_index, key).text, value
