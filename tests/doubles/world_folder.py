"""Checkpoints of a simulated world in a real folder, on a disk that loses writes."""

import json
from collections import Counter
from pathlib import Path
from random import Random

from psserver.shard.core.push import PushId
from pswire.checkpoint.folder import CheckpointFolder
from pswire.checkpoint.manifest import FilePart, Manifest, part_name
from pswire.checkpoint.storage import LocalStorage
from pswire.membership import WorkerKey
from tests.doubles.lossy_disk import LossyDisk
from tests.doubles.simulated_shard import Image, Values


class WorldFolder:
    """Where shards and the coordinator of a world write.

    Args:
        root: An empty folder, or one that a power cut has left.
        shard_count: Shards of the world.
        operation_count: Operations of the disk after which the power fails.

    Attributes:
        committed: The newest checkpoint of which the coordinator knows.
        committing: The one that may be there, though nobody knows.
    """

    def __init__(self, root: Path, shard_count: int, operation_count: int) -> None:
        self._disk = LossyDisk(root, operation_count)
        self._folder = CheckpointFolder("", LocalStorage(root, self._disk))
        self._folder.claim("job", "token")
        self._shard_count = shard_count
        self.committed = ""
        self.committing = ""

    def begin(self, version: int) -> str:
        return self._folder.begin(version)

    def write(self, name: str, shard_index: int, image: Image) -> FilePart:
        """Writes a shard's part, which is durable when this returns."""
        values = [
            [chunk, [[*push.worker, push.sequence, n] for push, n in counts.items()]]
            for chunk, counts in image.values.items()
        ]
        return self._folder.write_part(
            name,
            part_name(shard_index, self._shard_count),
            {},
            {"values": json.dumps(values)},
        )

    def commit(self, manifest: Manifest) -> None:
        """Completes a checkpoint, and prunes all before it."""
        self.committing = manifest.name
        self._folder.commit(manifest)
        self.committed = manifest.name
        self._folder.prune("job", 1)

    def lose(self, root: Path, random: Random) -> None:
        """The power fails: writes what is left to another folder."""
        self._disk.after_power_cut(root, random)


def newest_left(root: Path) -> tuple[Manifest, Values] | None:
    """The newest good checkpoint of a folder, as a job that goes on finds it."""
    folder = CheckpointFolder("", LocalStorage(root, LossyDisk(root)))
    manifest = folder.newest_good().manifest
    if manifest is None:
        return None
    found: Values = {}
    for part in manifest.parts:
        with folder.open_part(manifest.name, part) as reader:
            for chunk, counts in json.loads(reader.metadata["values"]):
                found[chunk] = Counter(
                    {
                        PushId(WorkerKey(worker_id, incarnation), sequence): count
                        for worker_id, incarnation, sequence, count in counts
                    }
                )
    return manifest, dict(sorted(found.items()))
