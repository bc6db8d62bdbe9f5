"""A shard's parts of snapshots."""

from collections.abc import Mapping

from psserver.shard.tensors.chunk_image import ChunkImage
from pswire.reasons import ErrorReason, Refusal


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
