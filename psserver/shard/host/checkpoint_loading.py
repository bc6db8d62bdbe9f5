"""First values of a job that goes on from a checkpoint, in place of a seeder's."""

import asyncio
import logging
from collections.abc import Callable
from functools import partial

from psserver.edge.file_calls import in_thread
from psserver.shard.host.shard_model import ShardModel
from psserver.shard.tensors.chunk_image import ChunkImage
from psserver.shard.tensors.saved_images import SavedImages
from pswire import failpoints
from pswire.checkpoint.errors import CheckpointError
from pswire.checkpoint.place import CheckpointPlace
from pswire.placement import Chunk
from pswire.reasons import Refusal

log = logging.getLogger("psserver.shard")


class CheckpointLoading:
    """Stages a checkpoint for the fence of a start. In the event loop.

    A chunk is read in a thread and staged in the loop, where it is known whether its
    fence is still open: nothing of one fence is staged under another.

    Args:
        pump: Called when the fence may be reported.
    """

    def __init__(self, pump: Callable[[], None]) -> None:
        self._pump = pump
        self._loading: asyncio.Task[None] | None = None
        self._fence_number = 0

    @property
    def is_under_way(self) -> bool:
        """Whether values are still being read."""
        return self._loading is not None and not self._loading.done()

    def begin(
        self, model: ShardModel, fence_number: int, place: CheckpointPlace
    ) -> None:
        """Loads for a fence, in place of an older one; said again, changes nothing."""
        if fence_number <= self._fence_number:
            return
        self.close()
        self._fence_number = fence_number
        self._loading = asyncio.create_task(self._load(model, fence_number, place))

    def close(self) -> None:
        """Stages nothing any more."""
        if self._loading is not None:
            self._loading.cancel()

    async def _load(
        self, model: ShardModel, fence_number: int, place: CheckpointPlace
    ) -> None:
        try:
            await _stage(model, fence_number, place)
        except (CheckpointError, Refusal) as error:
            text = error.message if isinstance(error, Refusal) else str(error)
            log.error("checkpoint %s can't be loaded: %s", place.name, text)
            model.core.fail_load(fence_number, text)
        except Exception as error:
            # Of whatever it is the coordinator is to hear: it waits for this shard.
            log.error("checkpoint %s can't be loaded", place.name, exc_info=error)
            model.core.fail_load(fence_number, type(error).__name__)
        self._pump()


async def _stage(model: ShardModel, fence_number: int, place: CheckpointPlace) -> None:
    engine, core = model.engine, model.core
    schema = model.terms.schema
    with await in_thread(partial(SavedImages, place, schema, engine.declared)) as saved:
        image = await in_thread(saved.core)
        for optimizer, trailer in image.used.items():
            engine.declared.check_hyperparameters(
                optimizer, trailer.hyperparameters, spec_digest=trailer.spec_digest
            )
        core.core_loaded(fence_number, image)
        for chunk in model.chunks:
            made = await in_thread(partial(_read, saved, chunk))
            if not core.is_open(fence_number):
                return
            engine.write_seed_image(chunk.index, made)
            core.seed_chunk_staged(chunk.index)


def _read(saved: SavedImages, chunk: Chunk) -> ChunkImage:
    image = saved.image(chunk)
    failpoints.hit("shard.restore_read")
    return image
