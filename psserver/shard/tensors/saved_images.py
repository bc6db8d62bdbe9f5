"""A checkpoint, read for a shard of any number of them.

Chunk by chunk, so that it takes no memory beside the chunk that is made and those that
it is made of. Its calls wait for a disk or a store.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Final, Self

from psserver.shard.core.core_image import CoreImage
from psserver.shard.tensors.chunk_image import ChunkImage
from psserver.shard.tensors.optimizer_state import check_state
from psserver.shard.tensors.recut_images import Source, put_together
from psserver.shard.tensors.shard_image import PartOfImage
from psserver.shard.tensors.shard_optimizers import DeclaredOptimizers
from pswire.checkpoint.errors import CheckpointError, DamagedError
from pswire.checkpoint.folder import CheckpointFolder
from pswire.checkpoint.place import CheckpointPlace
from pswire.checkpoint.recut import Recut
from pswire.placement import Chunk
from pswire.process_memory import give_back_freed_memory
from pswire.reasons import Refusal
from pswire.schema import ModelSchema

_FREED_BYTES_MAX: Final = 16 << 20
"""Values of which the memory is free again, after which the system gets it back."""


class SavedImages:
    """Images of chunks, made of what the shards of a checkpoint have written."""

    def __init__(
        self, place: CheckpointPlace, schema: ModelSchema, declared: DeclaredOptimizers
    ) -> None:
        """Reads the manifest.

        Args:
            place: Where the checkpoint is.
            schema: Tensors of the job that goes on from it.
            declared: Optimizers of that job.

        Raises:
            CheckpointError: It can't be read, or is of another model.
        """
        self._place = place
        self._declared = declared
        self._folder = CheckpointFolder(place.url)
        self._manifest = self._folder.manifest(place.name)
        if self._manifest.terms.schema != schema:
            raise CheckpointError(
                f"{place.name} in {self._folder.url} is of another model than the "
                "job's; name the folder of this job's checkpoints"
            )
        self._placement = self._manifest.placement()
        self._recut = Recut(self._placement)
        self._open = ExitStack()
        self._parts: dict[int, PartOfImage] = {}
        self._sources: dict[int, Source] = {}
        self._freed_byte_count = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def core(self) -> CoreImage:
        """The protocol of the first shard: what is read of it is the same on all.

        Raises:
            CheckpointError: It can't be read.
        """
        return self._part(0).core

    def image(self, chunk: Chunk) -> ChunkImage:
        """Makes a chunk.

        Raises:
            CheckpointError: It can't be read.
        """
        runs = list(self._recut.runs(chunk))
        needed = dict.fromkeys(run.chunk_index for run in runs)
        # The last one may go on in the next chunk.
        self._sources = {
            index: self._sources.get(index) or self._source(index) for index in needed
        }
        self._freed_byte_count += chunk.byte_count
        if self._freed_byte_count >= _FREED_BYTES_MAX:
            self._freed_byte_count = 0
            give_back_freed_memory()
        return put_together(chunk, runs, self._sources, self._declared)

    def _source(self, chunk_index: int) -> Source:
        chunk = self._placement.chunks[chunk_index]
        part = self._part(chunk.shard_index)
        with self._naming(chunk.shard_index):
            image = part.read(chunk)
            for optimizer, held in image.states.items():
                spec = self._declared.spec(optimizer, held.spec_digest)
                known = self._declared.known_groups(spec)
                groups = [known.get(piece.entry_index) for piece in chunk.slices]
                check_state(spec, chunk, groups, held.state)
        return Source(chunk, image)

    def _part(self, shard_index: int) -> PartOfImage:
        known = self._parts.get(shard_index)
        if known is None:
            part = self._manifest.parts[shard_index]
            opened = self._open.enter_context(
                self._folder.open_part(self._place.name, part)
            )
            with self._naming(shard_index):
                known = self._parts[shard_index] = PartOfImage(opened)
        return known

    @contextmanager
    def _naming(self, shard_index: int) -> Iterator[None]:
        """Names the part in which something is wrong."""
        try:
            yield
        except (DamagedError, Refusal) as error:
            name = f"{self._place.name}/{self._manifest.parts[shard_index].name}"
            text = error.message if isinstance(error, Refusal) else str(error)
            if name in text:
                raise
            raise DamagedError(
                f"{name} in {self._folder.url} is damaged: {text}. Use another "
                "checkpoint"
            ) from error
