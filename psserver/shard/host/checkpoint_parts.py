"""A shard's parts of checkpoints: images of cuts, written in the background.

An image is kept until the coordinator says where its part goes, or that nobody wants
it. At most one is kept or written at a time: another one would take as much memory.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from functools import partial

from psserver.edge.cut_report import PartReport
from psserver.edge.file_calls import in_thread
from psserver.shard.tensors.chunk_image import ChunkImage
from psserver.shard.tensors.shard_image import ShardImage
from pswire import failpoints
from pswire.checkpoint.errors import CheckpointError
from pswire.checkpoint.folder import CheckpointFolder
from pswire.checkpoint.manifest import FilePart
from pswire.checkpoint.place import CheckpointPlace
from pswire.process_memory import KEPT_BYTES

log = logging.getLogger("psserver.shard")


class CheckpointParts:
    """In the event loop.

    Args:
        part_name: Name of this shard's files.
        report: Called with what became of a part.
    """

    def __init__(self, part_name: str, report: Callable[[PartReport], None]) -> None:
        self._part_name = part_name
        self._report = report
        self._kept: tuple[int, ShardImage] | None = None
        self._spare: Mapping[int, ChunkImage] = {}
        self._writing: asyncio.Task[None] | None = None
        self._written: PartReport | None = None

    def close(self) -> None:
        """Leaves the part that is being written as it is: it counts for nothing."""
        if self._writing is not None:
            self._writing.cancel()

    def make_room(self) -> Mapping[int, ChunkImage] | None:
        """Ends the image that nobody had written, since another one is to be made.

        Returns:
            Chunks that nobody needs any more, whose memory the next image may take.
            None while a part is being written: there is no room for another image.
        """
        if self._writing is not None:
            return None
        spare, self._spare, self._kept = self._spare, {}, None
        return spare

    def keep(self, snapshot_id: int, image: ShardImage) -> None:
        """Keeps the image of a cut until it is written, or released."""
        self._kept = snapshot_id, image

    def write(self, snapshot_id: int, place: CheckpointPlace) -> None:
        """Writes the copy of a cut; said again, reports again."""
        if self._writing is not None:
            return
        if self._written is not None and self._written.snapshot_id == snapshot_id:
            self._report(self._written)
            return
        if self._kept is None or self._kept[0] != snapshot_id:
            self._report(
                PartReport(snapshot_id, failure="its copy is not kept any more")
            )
            return
        (_, image), self._kept = self._kept, None
        self._writing = asyncio.create_task(self._write(snapshot_id, image, place))

    def release(self, snapshot_id: int) -> bool:
        """Frees the image of a cut; whether it was here.

        What is being written goes on: a file can't be left in the middle.
        """
        is_here = self._kept is not None and self._kept[0] == snapshot_id
        if is_here:
            self._kept = None
        return is_here

    def release_up_to(self, snapshot_id: int) -> None:
        """Frees the image of one of these cuts."""
        if self._kept is not None and self._kept[0] <= snapshot_id:
            self._kept = None

    async def _write(
        self, snapshot_id: int, image: ShardImage, place: CheckpointPlace
    ) -> None:
        try:
            part, is_finite = await in_thread(
                partial(written_part, image, place, self._part_name),
                is_background=True,
            )
            self._written = PartReport(snapshot_id, part, is_finite=is_finite)
        except CheckpointError as error:
            log.error("its part of checkpoint %s failed: %s", place.name, error)
            self._written = PartReport(snapshot_id, failure=str(error))
        except Exception as error:
            # The job can go on without this checkpoint; the coordinator tries again.
            log.error("its part of checkpoint %s failed", place.name, exc_info=error)
            self._written = PartReport(snapshot_id, failure=type(error).__name__)
        finally:
            self._writing = None
            self._spare = image.chunks if image.byte_count <= KEPT_BYTES else {}
        self._report(self._written)


def written_part(
    image: ShardImage, place: CheckpointPlace, part_name: str
) -> tuple[FilePart, bool]:
    """Writes a part; returns it, and whether its values are finite."""
    is_finite = image.is_finite
    part = CheckpointFolder(place.url).write_part(
        place.name, part_name, image.tensors(), image.metadata()
    )
    failpoints.hit("shard.checkpoint_written")
    return part, is_finite
