"""A checkpoint of shards of a test, without the job around them."""

from pathlib import Path

from psserver.shard.core.core_image import CoreImage
from psserver.shard.tensors.shard_image import ShardImage
from pswire.checkpoint.folder import CheckpointFolder
from pswire.checkpoint.manifest import Manifest, part_name
from pswire.checkpoint.place import CheckpointPlace
from pswire.membership import Mode
from tests.doubles.checkpoints import JOB
from tests.unit.psserver.shard.tensors.shards import Shards

NAME = "step-000000000004"


def image_of(shards: Shards, shard_index: int, core: CoreImage) -> ShardImage:
    """All that a shard holds."""
    engine = shards.engines[shard_index]
    chunks = shards.placement.chunks_by_shard[shard_index]
    images = {chunk.index: engine.image_of(chunk.index) for chunk in chunks}
    return ShardImage(core, images)


def save(
    shards: Shards, folder: Path, core: CoreImage, *, chunk_bytes: int = 0
) -> CheckpointPlace:
    """Writes a checkpoint as shards and their coordinator do."""
    checkpoints = CheckpointFolder(str(folder))
    shard_count = len(shards.engines)
    parts = []
    for index in range(shard_count):
        image = image_of(shards, index, core)
        parts.append(
            checkpoints.write_part(
                NAME,
                part_name(index, shard_count),
                image.tensors(),
                image.metadata(),
            )
        )
    checkpoints.commit(
        Manifest(
            name=NAME,
            job_id="job",
            release="test",
            created_unix_s=0.0,
            version=4,
            clock=2,
            mode=Mode.BSP,
            shard_count=shard_count,
            chunk_bytes=chunk_bytes,
            is_finite=True,
            parts=tuple(parts),
            terms=shards.terms,
            job=JOB,
        )
    )
    return CheckpointPlace(str(folder), NAME)
