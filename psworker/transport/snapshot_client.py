"""A shard's part of a snapshot, read on a connection of its own."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from pswire.channels import ChannelKind, aio_channel
from pswire.frames import (
    RESPONSE_CHUNK_FIELD,
    ChunkFrame,
    decode_chunk,
    split_fields,
)
from pswire.limits import PROTOCOL_VERSION
from pswire.v1 import parameter_service_pb2 as pb
from psworker.transport.calls import calling

if TYPE_CHECKING:
    import grpc.aio

    from psworker.transport.values import ShardAddress

_METHOD = "/pswire.v1.ParameterService/PullSnapshot"


class SnapshotClient:
    """One start of one shard, as a reader sees it. Made and used on the event loop."""

    def __init__(self, shard: "ShardAddress") -> None:
        self.shard = shard
        self._peer = f"shard {shard.shard_index} at {shard.address}"
        self._channel = aio_channel(shard.address, ChannelKind.SNAPSHOT)
        # `None` serializers: bytes come from gRPC as they are.
        self._pull: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = (
            self._channel.unary_stream(_METHOD, None, None)
        )

    async def close(self) -> None:
        """Ends the channel and the calls on it."""
        await self._channel.close()

    async def pull_snapshot(
        self,
        job_id: str,
        snapshot_id: int,
        on_chunk: Callable[[ChunkFrame], None],
        *,
        timeout_s: float,
        chunk_indexes: Sequence[int] = (),
        held_digests: Sequence[int] = (),
    ) -> None:
        """Receives chunks of the shard.

        Args:
            job_id: Job the snapshot is of.
            snapshot_id: Name of the snapshot.
            on_chunk: Takes each part of a chunk as it comes, on the event loop.
            timeout_s: Deadline of the call.
            chunk_indexes: Which, ascending; none for all.
            held_digests: Of the elements of each of these as they are here; none to
                receive all of their values.

        Raises:
            CallError: The call failed, or `on_chunk` has refused what came.
        """
        request = pb.PullSnapshotRequest(
            protocol_version=PROTOCOL_VERSION,
            job_id=job_id,
            snapshot_id=snapshot_id,
            shard_incarnation=self.shard.incarnation,
            chunk_indexes=chunk_indexes,
            held_digests=held_digests,
        ).SerializeToString()
        async with calling(
            self._peer, lambda: self._pull(request, timeout=timeout_s)
        ) as call:
            while True:
                message = await call.read()
                if not isinstance(message, bytes):
                    return  # grpc.aio.EOF
                for number, view in split_fields(message):
                    if number == RESPONSE_CHUNK_FIELD:
                        on_chunk(decode_chunk(view))
