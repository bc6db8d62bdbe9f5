"""Images of cuts: copied beside training, and kept for those who read them."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

from psserver.edge.file_calls import in_thread
from psserver.shard.tensors.apply_engine import ApplyEngine
from psserver.shard.tensors.chunk_image import ChunkImage, PendingImage
from pswire.reasons import ErrorReason, Refusal

Image = PendingImage[ChunkImage]


@dataclass(slots=True)
class _Copy:
    """An image that is being copied.

    Attributes:
        snapshot_id: Name of the cut.
        image: The image.
        task: Waits for the thread that copies.
    """

    snapshot_id: int
    image: Image
    task: asyncio.Task[None] | None = None


class ImageCopying:
    """In the event loop. At most one image is copied at a time."""

    def __init__(self) -> None:
        self._copy: _Copy | None = None

    def close(self) -> None:
        """Abandons what is being copied."""
        if self._copy is not None and self._copy.task is not None:
            self._copy.image.abandon("the shard is shutting down")
            self._copy.task.cancel()

    def begin(
        self,
        engine: ApplyEngine,
        snapshot_id: int,
        *,
        values_only: bool,
        into: Mapping[int, ChunkImage] = MappingProxyType({}),
        then: Callable[[Image], None],
    ) -> None:
        """Copies what the shard holds now.

        One that is still being copied is abandoned: the coordinator has given it up.

        Args:
            engine: What the shard holds. Nothing is being applied at the moment.
            snapshot_id: Name of the cut.
            values_only: As for `ApplyEngine.begin_image`.
            into: As for `ApplyEngine.begin_image`.
            then: Called with the image, be it that it has failed.
        """
        image = engine.begin_image(values_only=values_only, into=into)
        copy = self._copy = _Copy(snapshot_id, image)
        copy.task = asyncio.create_task(self._run(engine, copy, then))

    def release(self, snapshot_id: int) -> bool:
        """Abandons the image of a cut; whether it is being copied."""
        copy = self._copy
        if copy is None or copy.snapshot_id != snapshot_id:
            return False
        copy.image.abandon("nobody wants it any more")
        return True

    def release_up_to(self, snapshot_id: int) -> None:
        """Abandons the image of one of these cuts."""
        if self._copy is not None and self._copy.snapshot_id <= snapshot_id:
            self.release(self._copy.snapshot_id)

    async def _run(
        self, engine: ApplyEngine, copy: _Copy, then: Callable[[Image], None]
    ) -> None:
        await in_thread(partial(engine.copy_image, copy.image), is_background=True)
        engine.end_image(copy.image)
        if self._copy is copy:
            self._copy = None
        then(copy.image)


class CutImages:
    """Images that somebody may still read: of each cut, all chunks."""

    def __init__(self) -> None:
        self._images: dict[int, Mapping[int, ChunkImage]] = {}

    def add(self, snapshot_id: int, chunks: Mapping[int, ChunkImage]) -> None:
        """Keeps an image until it is released."""
        self._images[snapshot_id] = chunks

    def image(self, snapshot_id: int) -> Mapping[int, ChunkImage]:
        """The image of a snapshot, by chunk.

        Raises:
            Refusal: `SNAPSHOT_GONE`.
        """
        image = self._images.get(snapshot_id)
        if image is None:
            raise Refusal(
                ErrorReason.SNAPSHOT_GONE,
                f"snapshot {snapshot_id} is not kept any more",
            )
        return image

    def release(self, snapshot_id: int) -> bool:
        """Frees an image; returns whether it was here."""
        return self._images.pop(snapshot_id, None) is not None

    def release_up_to(self, snapshot_id: int) -> None:
        """Frees all images up to one."""
        for known in [known for known in self._images if known <= snapshot_id]:
            del self._images[known]
