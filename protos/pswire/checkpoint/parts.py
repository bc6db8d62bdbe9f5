"""Parts: the tensors of a shard in a safetensors file. Imports torch.

Each tensor has a digest in the file's metadata, so that a reader of some of them, on
another number of shards, need not read all of the file to know that they are whole.
"""

import json
import threading
from collections.abc import Mapping
from io import RawIOBase
from pathlib import Path
from typing import Final, NamedTuple, Self

import torch
from xxhash import xxh3_64_hexdigest, xxh3_128_hexdigest

from pswire.checkpoint.errors import DamagedError, StorageError
from pswire.checkpoint.manifest import FilePart
from pswire.checkpoint.part_head import (
    DIGESTS,
    check_digest,
    encode_head,
    read_digested_head,
)
from pswire.names import printable
from pswire.optimizer_states import StateKey
from pswire.torch_types import TORCH_DTYPES, buffer_of, element_type_of

_VALUE: Final = "value"
_MASTER: Final = "master"
_STATE: Final = "state"

_BUFFER_BYTES: Final = 64 << 10
"""What is written at once at least: numbers of optimizers are tensors of 4 bytes."""


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


class Stored(NamedTuple):
    """A part as it was written, as in `FilePart`."""

    byte_count: int
    digest: str


def write_part(
    path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]
) -> Stored:
    """Writes a part.

    Not by safetensors' own writer, since the head has the digests of all tensors: they
    would be hashed in a pass of its own.

    Args:
        path: The file.
        tensors: Contiguous tensors on the CPU, by `PartKey.text`.
        metadata: Texts that go with them.

    Raises:
        OSError: It can't be written.
    """
    # The largest elements first, so that each tensor is aligned as safetensors has it.
    ordered = sorted(tensors.items(), key=lambda item: -item[1].element_size())
    places = {
        name: (element_type_of(tensor.dtype), tuple(tensor.shape))
        for name, tensor in ordered
    }
    digests = dict.fromkeys(places, xxh3_64_hexdigest(b""))

    def head() -> bytes:
        return encode_head(places, {**metadata, DIGESTS: json.dumps(digests)})

    with path.open("wb", buffering=_BUFFER_BYTES) as file:
        file.write(head())  # as long as it will be
        for name, tensor in ordered:
            view = buffer_of(tensor)
            # At once, as it is in the processor's cache for the write then.
            digests[name] = xxh3_64_hexdigest(view)
            file.write(view)
        byte_count = file.tell()
        file.seek(0)
        file.write(written := head())
    return Stored(byte_count, xxh3_128_hexdigest(written))


class PartReader:
    """The tensors of a part, each read when it is asked for. Safe in several threads.

    Attributes:
        metadata: Texts that go with the tensors.
    """

    def __init__(self, file: RawIOBase, part: FilePart, place: str) -> None:
        """Reads the head.

        Args:
            file: The part, at its start; closed with the reader.
            part: What it is to be.
            place: Where it is, for errors.

        Raises:
            DamagedError: It is not as `write_part` has written it.
        """
        self._file = file
        self._place = place
        self._lock = threading.Lock()
        self._head = read_digested_head(file, part)
        self.metadata = self._head.metadata

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._file.close()

    def keys(self) -> tuple[str, ...]:
        """Names of all tensors, as `PartKey.parse` reads them."""
        return tuple(self._head.tensors)

    def tensor(self, key: str) -> torch.Tensor:
        """Reads a tensor, into memory of its own.

        Raises:
            KeyError: The part has none of that name.
            DamagedError: Its bytes are not those that were written.
        """
        place = self._head.tensors[key]
        tensor = torch.empty(place.shape, dtype=TORCH_DTYPES[place.element_type])
        digest = self._read(place.start, buffer_of(tensor))
        try:
            check_digest(digest, self._head, key)
        except DamagedError as error:
            raise DamagedError(
                f"{self._place} is damaged: {error}. Use another checkpoint"
            ) from error
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
