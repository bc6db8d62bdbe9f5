"""All that a shard holds, as of a cut, and its part of a checkpoint.

The tensors of a part have the names of `PartKey`. Its metadata are texts of JSON:
`core`, the shard's protocol; `declared`, by optimizer and chunk the declaration that
its state is of, where that is not the first one; `dropped`, what is in no checkpoint.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch

from psserver.shard.core.core_image import CoreImage
from psserver.shard.tensors.chunk_image import ChunkImage, HeldState
from pswire.checkpoint.errors import UNREADABLE, DamagedError
from pswire.checkpoint.parts import PartKey, PartReader
from pswire.names import printable
from pswire.placement import Chunk
from pswire.torch_types import TORCH_DTYPES

if TYPE_CHECKING:
    from pswire.optimizer_states import StateKey

DROPPED: Final = (
    "errors of lossy compression that workers add to their next push",
    "values that each worker was sent, which delay compensation and compression use",
)
"""What nobody can go on with: workers begin anew, and pull all values as they are."""


@dataclass(frozen=True, slots=True)
class ShardImage:
    """All that a shard holds.

    Attributes:
        core: The protocol.
        chunks: The numbers, by chunk.
    """

    core: CoreImage
    chunks: Mapping[int, ChunkImage]

    @property
    def byte_count(self) -> int:
        """Bytes of all numbers."""
        return sum(tensor.nbytes for tensor in self.tensors().values())

    @property
    def is_finite(self) -> bool:
        """Whether all of its values are."""
        return all(chunk.is_finite for chunk in self.chunks.values())

    def tensors(self) -> dict[str, torch.Tensor]:
        """Of a part, by name."""
        return {
            name: tensor
            for index, chunk in self.chunks.items()
            for name, tensor in chunk.named(index)
        }

    def metadata(self) -> dict[str, str]:
        """Of a part, by name."""
        declared: dict[str, dict[int, str]] = {}
        for index, chunk in self.chunks.items():
            for optimizer, held in chunk.states.items():
                if held.spec_digest:
                    declared.setdefault(optimizer, {})[index] = held.spec_digest
        return {
            "core": self.core.to_json(),
            "declared": json.dumps(declared),
            "dropped": json.dumps(DROPPED),
        }


class PartOfImage:
    """Reads a part. What it says is not trusted.

    Attributes:
        core: The protocol of its shard.

    Raises:
        DamagedError: No shard writes this.
    """

    def __init__(self, part: PartReader) -> None:
        self._part = part
        try:
            self.core = CoreImage.from_json(part.metadata["core"])
            self._declared = _declared(json.loads(part.metadata["declared"]))
        except UNREADABLE as error:
            raise DamagedError(
                f"its metadata are not a shard's: {printable(str(error))[:128]}"
            ) from error
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
                    self._declared.get(optimizer, {}).get(chunk.index, ""), state
                )
                for optimizer, state in states.items()
            },
        )

    def _elements(self, key: PartKey, chunk: Chunk, dtype: torch.dtype) -> torch.Tensor:
        if key not in self._keys.get(chunk.index, ()):
            raise DamagedError(f"it has no tensor {key.text}")
        return elements_of(self._part.tensor(key.text), key, chunk, dtype)


def elements_of(
    found: torch.Tensor, key: PartKey, chunk: Chunk, dtype: torch.dtype
) -> torch.Tensor:
    """A tensor that is to have an element for each of a chunk.

    Raises:
        DamagedError: It is of another type or size.
    """
    if found.dtype != dtype or tuple(found.shape) != (chunk.element_count,):
        raise DamagedError(
            f"its tensor {printable(key.text)[:64]} has shape {list(found.shape)} of "
            f"{found.dtype}, where {chunk.element_count} of {dtype} belong"
        )
    return found


def _declared(data: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[int, str]]:
    return {
        optimizer: {int(index): str(digest) for index, digest in chunks.items()}
        for optimizer, chunks in data.items()
    }
