"""A shard's parts of snapshots."""

import logging
from collections.abc import Callable

from psserver.edge.cut_report import CutReport
from psserver.shard.host.arithmetic import Arithmetic
from psserver.shard.tensors.apply_engine import ApplyEngine
from psserver.shard.tensors.shard_vectors import ShardVectors
from pswire.reasons import ErrorReason, Refusal

log = logging.getLogger("psserver.shard")


class CutImages:
    """Images that somebody may still read. Ids grow; images are made one at a time."""

    def __init__(self) -> None:
        self._images: dict[int, ShardVectors] = {}
        # Newest snapshot that was released before its image was here: none up to it
        # is wanted any more.
        self._unwanted_max = 0

    def make(
        self,
        engine: ApplyEngine,
        snapshot_id: int,
        arithmetic: Arithmetic,
        *,
        done: Callable[[CutReport], None],
    ) -> None:
        """Copies all values, and keeps the copy unless nobody wants it by then.

        Args:
            engine: Whose values. No chunk may be applied meanwhile.
            snapshot_id: Name of the cut.
            arithmetic: Where the copy is made.
            done: Called with how it went.
        """

        def copied(image: ShardVectors) -> None:
            if snapshot_id > self._unwanted_max:
                self._images[snapshot_id] = image
            done(CutReport(snapshot_id))

        def failed(error: BaseException) -> None:
            log.error("snapshot %d failed", snapshot_id, exc_info=error)
            done(CutReport(snapshot_id, type(error).__name__))

        vectors = engine.vectors
        arithmetic.run(vectors.copy, vectors.byte_count, then=copied, failed=failed)

    def image(self, snapshot_id: int) -> ShardVectors:
        """The image of a snapshot.

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
        """Frees an image, also one that is to come; returns whether it was here."""
        is_here = self._images.pop(snapshot_id, None) is not None
        if not is_here:
            self._unwanted_max = max(self._unwanted_max, snapshot_id)
        return is_here

    def release_up_to(self, snapshot_id: int) -> None:
        """Frees all images up to one."""
        self._unwanted_max = max(self._unwanted_max, snapshot_id)
        for known in [known for known in self._images if known <= snapshot_id]:
            del self._images[known]
