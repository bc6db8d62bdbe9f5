"""A shard's parts of checkpoints: copied at a cut, then written in the background.

The copy is kept until the coordinator says where its part goes, or that nobody wants
it. At most one is kept or written at a time: another one would take as much memory.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from psserver.edge.cut_report import CutReport, PartReport
from psserver.edge.file_calls import in_thread
from psserver.shard.core.core_image import CoreImage
from psserver.shard.host.arithmetic import Arithmetic
from psserver.shard.host.shard_model import ShardModel
from psserver.shard.tensors.chunk_image import ChunkImage
from psserver.shard.tensors.shard_image import ShardImage
from pswire import failpoints
from pswire.checkpoint.errors import CheckpointError
from pswire.checkpoint.folder import CheckpointFolder
from pswire.checkpoint.manifest import FilePart
from pswire.checkpoint.place import CheckpointPlace

log = logging.getLogger("psserver.shard")


@dataclass(slots=True)
class _Copy:
    """The copy of a cut.

    Attributes:
        snapshot_id: Name of the cut.
        image: What is copied; None once nobody wants it.
        awaited_count: Chunks that are still to be copied.
        failure: Why a chunk could not be copied.
    """

    snapshot_id: int
    image: ShardImage | None
    awaited_count: int
    failure: str = ""


class CheckpointParts:
    """In the event loop.

    Args:
        part_name: Name of this shard's files.
        arithmetic: Where copies are made.
        report: Called with what became of a part.
    """

    def __init__(
        self,
        part_name: str,
        arithmetic: Arithmetic,
        report: Callable[[PartReport], None],
    ) -> None:
        self._part_name = part_name
        self._arithmetic = arithmetic
        self._report = report
        self._copy: _Copy | None = None
        self._writing: asyncio.Task[None] | None = None
        self._written: PartReport | None = None

    def close(self) -> None:
        """Leaves the part that is being written as it is: it counts for nothing."""
        if self._writing is not None:
            self._writing.cancel()

    def make(
        self,
        model: ShardModel,
        snapshot_id: int,
        core: CoreImage,
        *,
        done: Callable[[CutReport], None],
    ) -> None:
        """Copies all that the shard holds.

        Args:
            model: Whose. No chunk may be applied meanwhile.
            snapshot_id: Name of the cut.
            core: The protocol as of the cut.
            done: Called with how it went.
        """
        if self._writing is not None:
            done(CutReport(snapshot_id, "it still writes the checkpoint before"))
            return
        # One of a cut before that is still there: the coordinator has given it up.
        copy = self._copy = _Copy(snapshot_id, ShardImage(core), len(model.chunks))

        def end() -> None:
            if failpoints.armed:
                failpoints.hit("shard.checkpoint_copied")
            done(CutReport(snapshot_id, copy.failure, core.holdings))

        def end_chunk() -> None:
            copy.awaited_count -= 1
            if not copy.awaited_count:
                end()

        def copied(chunk_index: int, chunk: ChunkImage) -> None:
            if copy.image is not None:
                copy.image.chunks[chunk_index] = chunk
            end_chunk()

        def failed(error: BaseException) -> None:
            log.error("the copy of cut %d failed", snapshot_id, exc_info=error)
            copy.image, copy.failure = None, type(error).__name__
            end_chunk()

        if not model.chunks:
            end()
        for chunk in model.chunks:
            self._arithmetic.run(
                partial(model.engine.image_of, chunk.index),
                chunk.byte_count,
                then=partial(copied, chunk.index),
                failed=failed,
            )

    def write(self, snapshot_id: int, place: CheckpointPlace) -> None:
        """Writes the copy of a cut; said again, reports again."""
        if self._writing is not None:
            return
        if self._written is not None and self._written.snapshot_id == snapshot_id:
            self._report(self._written)
            return
        copy = self._copy
        if copy is None or copy.snapshot_id != snapshot_id or copy.image is None:
            self._report(
                PartReport(snapshot_id, failure="its copy is not kept any more")
            )
            return
        self._copy = None
        self._writing = asyncio.create_task(self._write(snapshot_id, copy.image, place))

    def release(self, snapshot_id: int) -> bool:
        """Frees the copy of a cut, also one that is being made; whether it was here.

        What is being written goes on: a file can't be left in the middle.
        """
        copy = self._copy
        if copy is None or copy.snapshot_id != snapshot_id:
            return False
        copy.image = None
        return True

    def release_up_to(self, snapshot_id: int) -> None:
        """Frees the copy of one of these cuts."""
        if self._copy is not None and self._copy.snapshot_id <= snapshot_id:
            self._copy.image = None

    async def _write(
        self, snapshot_id: int, image: ShardImage, place: CheckpointPlace
    ) -> None:
        try:
            part, is_finite = await in_thread(
                partial(written_part, image, place, self._part_name)
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
