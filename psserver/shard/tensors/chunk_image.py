"""All numbers of a chunk, as a shard holds them and as a checkpoint has them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from pswire.checkpoint.errors import DamagedError
from pswire.checkpoint.parts import PartKey, PartReader
from pswire.names import printable
from pswire.optimizer_states import ChunkState, StateKey
from pswire.placement import Chunk
from pswire.torch_types import TORCH_DTYPES


class HeldState(NamedTuple):
    """State that an optimizer has of a chunk.

    Attributes:
        spec_digest: The declaration that it was last updated under.
        state: The state.
    """

    spec_digest: str
    state: ChunkState


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

    def named(self, chunk_index: int) -> Iterator[tuple[str, torch.Tensor]]:
        """Its tensors, by their names in a part."""
        yield PartKey.value(chunk_index).text, self.values
        if self.master is not None:
            yield PartKey.master(chunk_index).text, self.master
        for optimizer, held in self.states.items():
            for key, value in held.state.items():
                yield PartKey.state_of(optimizer, chunk_index, key).text, value


class ChunkReader:
    """Reads chunks of one part. What it says is not trusted.

    Args:
        part: The part.
        digests: By optimizer and chunk, the declaration of its state, where that is not
            the first one.

    Raises:
        DamagedError: It has a tensor that no shard writes.
    """

    def __init__(
        self, part: PartReader, digests: Mapping[str, Mapping[int, str]]
    ) -> None:
        self._part = part
        self._digests = digests
        self._keys: dict[int, list[PartKey]] = {}
        for key in map(PartKey.parse, part.keys()):
            self._keys.setdefault(key.chunk_index, []).append(key)

    def read(self, chunk: Chunk) -> ChunkImage:
        """Reads a chunk; its state is still to be checked.

        Raises:
            DamagedError: It is not there, or of another type or size, or its bytes are
                not those that were written.
        """
        states: dict[str, dict[StateKey, torch.Tensor]] = {}
        master = PartKey.master(chunk.index)
        has_master = False
        for key in self._keys.get(chunk.index, ()):
            has_master |= key == master
            if key.state is not None:
                state = states.setdefault(key.optimizer, {})
                state[key.state] = self._part.tensor(key.text)
        return ChunkImage(
            values=self._elements(
                PartKey.value(chunk.index), chunk, TORCH_DTYPES[chunk.element_type]
            ),
            master=self._elements(master, chunk, torch.float32) if has_master else None,
            states={
                optimizer: HeldState(
                    self._digests.get(optimizer, {}).get(chunk.index, ""), state
                )
                for optimizer, state in states.items()
            },
        )

    def _elements(self, key: PartKey, chunk: Chunk, dtype: torch.dtype) -> torch.Tensor:
        if key not in self._keys.get(chunk.index, ()):
            raise DamagedError(f"it has no tensor {key.text}")
        found = self._part.tensor(key.text)
        if found.dtype != dtype or tuple(found.shape) != (chunk.element_count,):
            raise DamagedError(
                f"its tensor {printable(key.text)} has shape {list(found.shape)} of "
                f"{found.dtype}, where {chunk.element_count} of {dtype} belong"
            )
        return found
