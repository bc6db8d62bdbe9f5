"""The memory that a worker shares with the shards of its job, as far as it does."""

import logging
from collections.abc import Mapping, Sequence
from typing import Final

from pswire.frames import REQUEST_CHUNK_FIELD
from pswire.placement import Chunk
from psworker.tensors.tensor_chunks import ChunkSource
from psworker.transport.shard_segments import Declined, ShardSegments

logger: Final = logging.getLogger("psworker")


class Segments:
    """By shard; none where tensors go over gRPC."""

    def __init__(self, by_shard: Mapping[int, ShardSegments] | None = None) -> None:
        self._by_shard = dict(by_shard or {})

    def of(self, shard_index: int) -> ShardSegments | None:
        """Memory shared with a shard, None if none is."""
        return self._by_shard.get(shard_index)

    def without(self, shard_index: int) -> "Segments":
        """What is left when a shard has lost its part: its tensors go over gRPC."""
        left = {i: each for i, each in self._by_shard.items() if i != shard_index}
        return Segments(left)

    def encode(self, source: ChunkSource, chunk: Chunk) -> bytes:
        """A `PushPullRequest` that holds only this chunk, or says where it is.

        In shared memory it is written over what was there: once for each push.
        """
        # A job that sends fewer bytes shares no memory.
        segments = self.of(chunk.shard_index) if source.encoder is None else None
        message = segments.encode(source, chunk) if segments is not None else None
        return message or source.encode(chunk, REQUEST_CHUNK_FIELD)


NO_SEGMENTS: Final = Segments()
"""All tensors go over gRPC."""


def segments_of(found: Sequence[ShardSegments | Declined]) -> Segments:
    """What came of asking every shard; says so in the log, in one line."""
    opened: dict[int, ShardSegments] = {}
    declined: dict[int, Declined] = {}
    for index, each in enumerate(found):
        if isinstance(each, Declined):
            declined[index] = each
        else:
            opened[index] = each
    if not declined:
        logger.info(
            "tensors go through shared memory to %s",
            "the shard" if len(found) == 1 else f"all {len(found)} shards",
        )
        return Segments(opened)
    is_expected = all(each.is_expected for each in declined.values())
    logger.log(
        logging.INFO if is_expected else logging.WARNING,
        "tensors go over gRPC to shard %s: %s",
        ", ".join(map(str, declined)),
        "; ".join(sorted({each.reason for each in declined.values()})),
    )
    return Segments(opened)
