"""How a worker comes to share memory with a shard: both look whether they can first.

Whatever stands against it leaves tensors on gRPC, with the reason for the log.
"""

import asyncio
import contextlib
import socket
from dataclasses import dataclass

from pswire.limits import PROTOCOL_VERSION
from pswire.membership import WorkerKey
from pswire.membership_codec import identity_message
from pswire.memory_segments import MemorySegment, SegmentError, boot_id
from pswire.placement import Placement
from pswire.segment_handshake import (
    ACKNOWLEDGEMENT,
    HANDSHAKE_TIMEOUT_S,
    Answer,
    Offer,
    address_of,
    check_peer,
)
from pswire.shared_layout import GradientLayout, SegmentKind, ValuesLayout
from pswire.v1 import parameter_service_pb2 as pb
from psworker.transport.shard_segments import ShardSegments
from psworker.transport.values import ShardAddress


@dataclass(frozen=True, slots=True)
class Declined:
    """No memory is shared with a shard.

    Attributes:
        reason: Why.
        is_expected: Whether that is as it should be: it is on another machine, or
            somebody has switched it off.
    """

    reason: str
    is_expected: bool


def segments_request(
    job_id: str, worker: WorkerKey, shard: ShardAddress, *, generation: int
) -> pb.OpenSegmentsRequest:
    """Asks a shard whether it shares memory with this process.

    Args:
        job_id: The job.
        worker: Who asks, a member.
        shard: Who is asked.
        generation: Newest generation known here.
    """
    return pb.OpenSegmentsRequest(
        protocol_version=PROTOCOL_VERSION,
        job_id=job_id,
        worker=identity_message(worker),
        shard_incarnation=shard.incarnation,
        generation=generation,
        boot_id=boot_id(),
    )


async def hand_over(
    response: pb.OpenSegmentsResponse, placement: Placement, shard_index: int
) -> ShardSegments | Declined:
    """Makes a gradient segment, gives it to a shard and maps the shard's values.

    Args:
        response: What the shard has said.
        placement: How tensors are cut.
        shard_index: Which shard.
    """
    if response.declined:
        return Declined(response.declined, is_expected=True)
    try:
        return await asyncio.to_thread(
            _hand_over, response.socket_name, response.token, placement, shard_index
        )
    except (OSError, SegmentError) as error:
        # As between two containers of one machine, which see different sockets.
        return Declined(f"it is on this machine, but {error}", is_expected=False)


def _hand_over(
    name: str, token: bytes, placement: Placement, shard_index: int
) -> ShardSegments:
    size = GradientLayout.of(placement, shard_index).byte_count
    gradient = MemorySegment.create(SegmentKind.GRADIENT, size)
    with contextlib.closing(gradient), _connected(name) as peer:
        check_peer(peer)
        Offer(token, gradient.header, gradient.descriptor).send(peer)
        answer = Answer.receive(peer)
        values = MemorySegment.adopt(answer.header, answer.descriptor)
        expected = ValuesLayout.of(placement, shard_index).byte_count
        if answer.header.byte_count != expected:
            raise SegmentError(
                f"its segment of values has {answer.header.byte_count} bytes, "
                f"expected {expected}"
            )
        peer.send(ACKNOWLEDGEMENT)
    return ShardSegments(placement, shard_index, gradient, values)


def _connected(name: str) -> socket.socket:
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        peer.settimeout(HANDSHAKE_TIMEOUT_S)
        peer.connect(address_of(name))
    except OSError:
        peer.close()
        raise
    return peer
