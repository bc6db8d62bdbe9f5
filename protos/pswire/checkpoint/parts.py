"""Parts: the tensors of a shard in a safetensors file. Imports torch.

Each tensor has a digest in the file's metadata, so that a reader of some of them, on
another number of shards, need not read all of the file to know that they are whole.
"""

import json
import os
import re
import threading
from collections.abc import Mapping
from io import RawIOBase
from pathlib import Path
from types import TracebackType
from typing import Final, NamedTuple, Self

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from xxhash import xxh3_64_hexdigest

from pswire.checkpoint.errors import UNREADABLE, DamagedError, StorageError
from pswire.checkpoint.part_head import read_head
from pswire.names import printable
from pswire.optimizer_states import StateKey
from pswire.torch_types import TORCH_DTYPES, buffer_of

_DIGESTS: Final = "paramserver.digests"

_VALUE: Final = "value"
_MASTER: Final = "master"
_STATE: Final = "state"


class PartKey(NamedTuple):
    """What a tensor of a part is.

    Attributes:
        kind: `value`, `master` (in float32, of 16-bit parameters), or `state`.
        chunk_index: Chunk of the checkpoint's placement.
        optimizer: Name of the optimizer that the state is of.
        state: Which state of which slices of the chunk.
    """

    kind: str
    chunk_index: int
    optimizer: str = ""
    state: StateKey | None = None

    @property
    def text(self) -> str:
        if self.state is None:
            return f"{self.kind}/{self.chunk_index}"
        first, stop, slot = self.state
        return f"{self.kind}/{self.optimizer}/{self.chunk_index}/{first}-{stop}/{slot}"

    @classmethod
    def value(cls, chunk_index: int) -> Self:
        return cls(_VALUE, chunk_index)

    @classmethod
    def master(cls, chunk_index: int) -> Self:
        return cls(_MASTER, chunk_index)

    @classmethod
    def state_of(cls, optimizer: str, chunk_index: int, state: StateKey) -> Self:
        return cls(_STATE, chunk_index, optimizer, state)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads the name of a tensor.

        Raises:
            DamagedError: No release gives this name.
        """
        kind, _, rest = text.partition("/")
        try:
            if kind in (_VALUE, _MASTER):
                key = cls(kind, int(rest))
            else:
                # An optimizer's name may be any text.
                optimizer, index, span, slot = rest.rsplit("/", 3)
                first, _, stop = span.partition("-")
                state = StateKey(int(first), int(stop), slot)
                key = cls.state_of(optimizer, int(index), state)
            if key.text != text:
                raise ValueError("it would be written in another way")
        except ValueError as error:
            raise DamagedError(
                f"a tensor has the name {printable(text)[:64]!r}, which this release "
                f"gives to none"
            ) from error
        return key


def write_part(
    path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]
) -> None:
    """Writes a part, by safetensors' own writer.

    Args:
        path: The file.
        tensors: Contiguous tensors on the CPU, none of which shares memory with
            another, by `PartKey.text`.
        metadata: Texts that go with them.

    Raises:
        OSError: It can't be written.
    """
    digests = {key: xxh3_64_hexdigest(buffer_of(each)) for key, each in tensors.items()}
    digests[""] = _metadata_digest(metadata)
    try:
        save_file(dict(tensors), path, {**metadata, _DIGESTS: json.dumps(digests)})
    except SafetensorError as error:
        number = re.search(r"os error ([0-9]+)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1]))) from error


def _metadata_digest(metadata: Mapping[str, str]) -> str:
    return xxh3_64_hexdigest(json.dumps(dict(metadata), sort_keys=True).encode())


class PartReader:
    """The tensors of a part, each read when it is asked for. Safe in several threads.

    Attributes:
        metadata: Texts that go with the tensors.
    """

    def __init__(self, file: RawIOBase, byte_count: int, place: str) -> None:
        """Reads the head.

        Args:
            file: The part, at its start; closed with the reader.
            byte_count: Its size.
            place: Where it is, for errors.

        Raises:
            DamagedError: It is not as `write_part` has written it.
        """
        self._file = file
        self._place = place
        self._lock = threading.Lock()
        head = read_head(file, byte_count)
        self._places = head.tensors
        self.metadata = {
            name: text for name, text in head.metadata.items() if name != _DIGESTS
        }
        try:
            self._digests: dict[str, str] = json.loads(head.metadata[_DIGESTS])
            is_whole = self._digests.keys() == {*self._places, ""} and (
                self._digests[""] == _metadata_digest(self.metadata)
            )
        except UNREADABLE as error:
            raise DamagedError("it has no digests of its tensors") from error
        if not is_whole:
            raise DamagedError("its digests are of other tensors, or of other metadata")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        self._file.close()

    def keys(self) -> tuple[str, ...]:
        """Names of all tensors, as `PartKey.parse` reads them."""
        return tuple(self._places)

    def tensor(self, key: str) -> torch.Tensor:
        """Reads a tensor, into memory of its own.

        Raises:
            KeyError: The part has none of that name.
            DamagedError: Its bytes are not those that were written.
        """
        place = self._places[key]
        tensor = torch.empty(place.shape, dtype=TORCH_DTYPES[place.element_type])
        view = buffer_of(tensor)
        if self._read(place.start, view) != self._digests[key]:
            raise DamagedError(
                f"{self._place} is damaged: the {place.byte_count} bytes of tensor "
                f"{printable(key)[:64]} from byte {place.start} on are not those that "
                "were written. Use another checkpoint"
            )
        return tensor

    def _read(self, start: int, view: memoryview) -> str:
        """Fills a view from a place of the file on; its digest."""
        try:
            with self._lock:
                self._file.seek(start)
                done = 0
                while done < len(view) and (count := self._file.readinto(view[done:])):
                    done += count
        except OSError as error:
            raise StorageError(
                f"{self._place} can't be read: {error.strerror or error}; check the "
                "disk, and try again"
            ) from error
        return xxh3_64_hexdigest(view[:done])
